"""Rollouts that branch: the rollouts of a group as trees, which share the turns before a fork and sample them once.

A fork goes on in several ways from the same conversation, in sandboxes with the same files. The first one is the
rollout itself; every other one is a rollout that inherits the turns so far as its context. docs/trees.md has the terms.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from backends import ProcessesRunning, SandboxCheckpoint
from backends.errors import SettingsError
from backends.tasks import cancel_all, run_all
from lachesis.loop.loop import HermesAgentLoop, PlayedRollout
from lachesis.loop.result import Cost
from lachesis.loop.rollout import BeforeFork, Rollout, branch_of_rollout
from lachesis_messages.records.tree_places import TreePlace
from lachesis_tools import ToolSession
from lachesis_tools.tool_session import StateNotCopied

Width: TypeAlias = Callable[[PlayedRollout], Awaitable[int]]
"""In how many ways a rollout goes on from here."""

_SO_FAR = (
    *("turns", "faulty_turns", "tool_calls", "api_calls", "seconds_in_model", "seconds_in_tools", "tokens"),
    *("responses", "tool_errors", "step_rewards", "call_ids"),
)


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A rollout between two turns, from which any number of rollouts can go on."""

    rollout: PlayedRollout
    """As it was; it never goes on itself."""
    checkpoint: SandboxCheckpoint | None
    """None where it has no sandbox yet."""
    tools: Mapping[type[Any], Any]
    """The state of its tools."""

    @classmethod
    async def of(cls, rollout: PlayedRollout, session: ToolSession) -> ForkPoint:
        """
        Raises:
            ProcessesRunning, StateNotCopied: something runs in the sandbox, or in a tool.
            BackendUnavailable: the backend makes no checkpoints.
        """
        tools = session.copied_state()
        checkpoint = await session.checkpoint()
        kept = copy(rollout)
        kept.clock = copy(rollout.clock)
        _put(rollout, kept, own=True)
        return cls(kept, checkpoint, tools)

    @property
    def beginning(self) -> BeforeFork:
        of = self.rollout
        seconds = of.seconds_in_model, of.seconds_in_tools, of.clock.own, of.clock.waiting
        return BeforeFork(of.conversation.history, Cost(of.tokens, of.api_calls, *seconds))


def _put(of: PlayedRollout, into: PlayedRollout, *, own: bool) -> None:
    """Let `into` go on from where `of` is. `own`: the turns so far are its own."""
    for name in _SO_FAR:
        setattr(into, name, copy(getattr(of, name)))
    into.tool_counts = deepcopy(of.tool_counts)
    into.clock.own, into.clock.waiting = of.clock.own, of.clock.waiting
    into.conversation = of.conversation.fork(own=own)
    if of.compression is not None:
        into.compression = of.compression.copied(into)
        into.conversation.size = into.compression.size


@dataclass(slots=True, eq=False)
class TreeBranch:
    """A rollout of a tree, on its way to a leaf."""

    trees: Trees
    place: TreePlace
    leaves: int
    """It may become as many rollouts."""
    start: ForkPoint | None = None
    """Where it forked last; None at the root. Another attempt begins there."""
    forks: tuple[BeforeFork, ...] = ()
    """Of each fork on its path, the last one at `start`."""
    session: ToolSession | None = None
    """Of the present attempt."""
    children: list[asyncio.Task[list[Rollout]]] = field(default_factory=list)

    def join(self, loop: Any, session: ToolSession) -> None:
        """Let the loop of an attempt begin here, and fork.

        Raises:
            SettingsError: no agent of another kind can.
        """
        if not isinstance(loop, HermesAgentLoop):
            raise SettingsError(f"an agent of the kind {type(loop).__name__} cannot branch: unset tree_at")
        loop.branch, self.session = self, session
        session.put_state({} if self.start is None else self.start.tools)

    def begin(self, rollout: PlayedRollout) -> None:
        """Let a rollout without a turn begin here."""
        if self.start is None:
            return
        at, inherits = self.start.rollout, self.place.ways[-1] > 0
        _put(at, rollout, own=not inherits)
        rollout.inherited = self.forks[-1].cost if inherits else at.inherited
        servers: tuple[Any, Any] = at.server, rollout.server
        if all(getattr(server, "affinity", None) is not None for server in servers):
            known = servers[0].affinity  # the servers that have computed these turns
            servers[1].affinity = replace(known, own=dict(known.own))

    async def at_turn(self, rollout: PlayedRollout) -> None:
        """Fork before a turn, if it is one for it."""
        if self.leaves < 2 or (self.start is not None and self.place.turns[-1] == rollout.turns):
            return
        rollout.check_budgets()  # a rollout that ends here does not fork
        width = min(self.leaves, await self.trees.width(rollout))
        if width < 2:
            return
        assert self.session is not None
        try:
            point = await ForkPoint.of(rollout, self.session)
        except (ProcessesRunning, StateNotCopied) as why:
            self.place = replace(self.place, not_forked=(*self.place.not_forked, (rollout.turns, str(why))))
            return
        share, more = divmod(self.leaves, width)
        sampled = len(rollout.conversation.history.completions())
        places = [self.place.child(at, width, rollout.turns, sampled) for at in range(width)]
        self.start, self.forks = point, (*self.forks, point.beginning)
        for at in range(1, width):
            child = TreeBranch(self.trees, places[at], share + (at < more), point, self.forks)
            self.children.append(asyncio.create_task(self.trees.play(child)))
        self.place, self.leaves = replace(places[0], not_forked=self.place.not_forked), share + (more > 0)


class Trees:
    """Plays the rollouts of a group as trees.

    Args:
        play: plays one rollout, by its number in the group; it reads `branch_of_rollout`.
        leaves: the rollouts that a whole tree has.
    """

    def __init__(self, play: Callable[[int], Awaitable[Rollout]], width: Width, leaves: int) -> None:
        self.width = width
        self._play, self._leaves = play, leaves
        self._numbers, self._roots, self._waves = itertools.count(), itertools.count(), itertools.count()

    async def rollouts(self, size: int) -> list[Rollout]:
        """`size` rollouts. Where branches ended before their forks, more trees make up for the rollouts that these
        would have had."""
        found: list[Rollout] = []
        while (free := size - len(found)) > 0:
            wave = next(self._waves)
            leaves = [min(self._leaves, free - at) for at in range(0, free, self._leaves)]
            places = [TreePlace(str(next(self._roots)), (0,), (float(each),), wave) for each in leaves]
            branches = [TreeBranch(self, place, each) for place, each in zip(places, leaves, strict=True)]
            found += itertools.chain.from_iterable(await run_all(map(self.play, branches)))
        return sorted(found, key=lambda rollout: rollout.index)

    async def play(self, branch: TreeBranch) -> list[Rollout]:
        """The rollout of a branch, and those that branch off it."""
        branch_of_rollout.set(branch)
        try:
            own = await self._play(next(self._numbers))
            others = [each for task in branch.children for each in await task]
        finally:
            await cancel_all([task for task in branch.children if not task.done()])
        error = own.error
        if own.result is not None and branch.session is None:
            error = SettingsError(
                "play_rollout is the environment's own, and its rollouts do not branch: unset tree_at"
            )
        return [replace(own, tree=branch.place, error=error, forks=branch.forks), *others]


def scored_first(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts of trees, where the first way of each fork, which has the turns before it, leads to a score if any
    way does: what is recorded of rollouts without one are no samples.

    The ways of a fork are of equal standing, so the first one and another one change places.
    """
    places = [(each.reward is None, each.tree.ways, each.tree) for each in rollouts if each.tree is not None]
    first: dict[str, TreePlace] = {}
    for _, _, place in sorted(places, key=lambda each: each[:2]):
        for part in place.parts:
            first.setdefault(part, place)
    return [rollout if rollout.tree is None else _moved(rollout, rollout.tree, first) for rollout in rollouts]


def _moved(rollout: Rollout, place: TreePlace, first: Mapping[str, TreePlace]) -> Rollout:
    """The rollout where the way of `first`, by the part before a fork, is the first one."""
    ways = list(place.ways)
    for at, part in enumerate(place.parts[:-1], 1):
        chosen = first[part].ways[at]
        ways[at] = {0: chosen, chosen: 0}.get(ways[at], ways[at])
    moved = replace(place, path=".".join(map(str, ways)))
    if moved.first_own == place.first_own:
        return replace(rollout, tree=moved)
    begun, inherited = rollout.forks[moved.first_own - 1] if moved.first_own else (None, None)
    sampled = tuple(len(fork.history.begun_with(begun).completions()) for fork in rollout.forks[moved.first_own :])
    result = rollout.result
    if result is not None:
        result = replace(result, history=result.history.begun_with(begun), inherited=inherited)
    return replace(rollout, tree=replace(moved, completions=(0,) * (moved.first_own + 1) + sampled), result=result)
