"""The rollouts of one item, side by side, scored each and together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from backends.errors import SettingsError
from backends.tasks import run_all
from lachesis.figures.item_keys import whole_and_part
from lachesis.figures.summary import BUILTIN_FIGURES, BUILTIN_PREFIXES
from lachesis.loop.result import AgentResult
from lachesis.loop.rollout import Rollout, holding_sandboxes
from lachesis.rewards.doubtful import settled
from lachesis.rewards.reward import RewardError
from lachesis.runs.doubts import look_for_reference, settle, show_first
from lachesis.runs.environment import Environment
from lachesis.runs.failures import RunStopped, UnusableSettings
from lachesis.tool_context.sealing import HostDiskFull
from lachesis_client import RequestRejected, Unauthorized
from lachesis_client.errors import NothingThere

Finished: TypeAlias = Callable[[Any, Rollout], None]
"""Learns of an item's rollout."""


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """The rollouts of one item, including those that had to be played again."""

    item: Any
    item_key: str
    tools: Sequence[Mapping[str, Any]]
    rollouts: Sequence[Rollout]
    toolsets: Sequence[str] | None = None
    """Drawn from a distribution; None without one."""
    declined: str = ""
    """Why the environment, by its own decision, made no group of the item."""
    extras: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Data that is sent with the samples of a rollout, by its id: `overrides`, and other fields of Atropos' groups."""
    group_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Atropos' field; `group_size` is this group's size."""
    returned: Mapping[str, Any] | None = None
    """The group as the environment returned it, with the sampled tokens."""
    beside: Rollout | None = None
    """Completions that were sampled while the group was collected and are in none of its rollouts: the answers of a
    judge, or those that the environment dropped. They are not a rollout of the item; their tokens are counted as
    undelivered."""

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.reward is not None]

    @property
    def left_to_agents(self) -> bool:
        """Whether agents, and nothing else, kept it from every score."""
        return bool(self.rollouts) and all(rollout.left_to_agent for rollout in self.rollouts)

    @property
    def of_broken_item(self) -> bool:
        """Whether its item is left out of this run as broken."""
        return any(rollout.broken_item for rollout in self.rollouts)

    @property
    def in_doubt(self) -> bool:
        """Whether the reward of one raised what may be its agent's doing, and nothing has shown it yet."""
        return any(rollout.doubt is not None for rollout in self.rollouts)

    @property
    def rewards(self) -> list[float | None]:
        return [rollout.reward for rollout in self.rollouts]

    @property
    def tracebacks(self) -> list[str]:
        return [traces for rollout in self.rollouts if (traces := rollout.tracebacks) is not None]


async def play_item(
    env: Environment,
    item: Any,
    item_key: str,
    *,
    size: int,
    rounds: int = 1,
    evaluation: bool = False,
    finished: Finished = lambda item, rollout: None,
) -> list[PlayedGroup]:
    """The groups of one item, at least one. Every run gets its groups here.

    An environment that collects its groups itself may return several of an item; any other one has `play_group`.
    """
    if env.collects and not evaluation:
        groups = await env.collect_groups(item, item_key)
        for group in groups:
            for rollout in group.rollouts:
                finished(item, rollout)
        return groups
    return [await play_group(env, item, item_key, size=size, rounds=rounds, evaluation=evaluation, finished=finished)]


async def play_group(
    env: Environment,
    item: Any,
    item_key: str,
    *,
    size: int,
    rounds: int = 1,
    evaluation: bool = False,
    finished: Finished = lambda item, rollout: None,
) -> PlayedGroup:
    """The group of one item, of `size` scored rollouts where that was possible. With the key of a later sample of the
    item, that is the first of its rollouts.

    Args:
        rounds: how often rollouts without a score are replaced by others, plus one. A trainer takes whole groups only.
        finished: called with each rollout as soon as it has its score.

    Raises:
        RunStopped: the server rejects the key, or knows no such model or route; the environment finds a setting
            missing; this machine's disk is full.
    """
    whole, first = whole_and_part(item_key)
    toolsets, tools = env.group_tools(whole)
    with suppress(Exception):  # every rollout says so
        tools = [*tools, *(tool.definition() for tool in env.tools_for(item))]
    rollouts: list[Rollout] = []
    look_for_reference(env)

    async def play(index: int) -> Rollout:
        rollout = await env.play_rollout(item, whole, first + index, tools, evaluation=evaluation)
        if env.compute_group_reward is None and rollout.doubt is None:
            finished(item, rollout)
        return rollout

    async with holding_sandboxes():
        for _ in range(rounds):
            scored = sum(rollout.reward is not None or rollout.doubt is not None for rollout in rollouts)
            if scored == size or any(rollout.broken_item for rollout in rollouts):
                break
            rollouts += await run_all(map(play, range(len(rollouts), len(rollouts) + size - scored)))
            stop_if_hopeless(rollouts)
        late = [env.compute_group_reward is not None or rollout.doubt is not None for rollout in rollouts]
        rollouts = await env.player.score_group(item, rollouts)
        stop_if_hopeless(rollouts)
    rollouts = await settle(env, item, rollouts, tools)
    for rollout, is_late in zip(rollouts, late, strict=True):
        if is_late and rollout.doubt is None:
            finished(item, rollout)
    measured = [rollout.measured(partial(_metrics, env, item)) for rollout in rollouts]
    return PlayedGroup(item, item_key, tools, measured, toolsets=toolsets)


def settled_group(env: Environment, finished: Finished, group: PlayedGroup, *, last: bool = False) -> PlayedGroup:
    """A group in doubt with the current evidence. `last`: this is the last check, and remaining doubts are errors of
    the environment."""
    rollouts = []
    for before, rollout in zip(group.rollouts, settled(env.player, group.rollouts), strict=True):
        if rollout.doubt is not None and last:
            rollout = replace(rollout, doubt=None)
        if before.doubt is not None and rollout.doubt is None:
            finished(group.item, rollout)
            rollout = rollout.measured(partial(_metrics, env, group.item))
        rollouts.append(rollout)
    show_first(env, rollouts)
    return replace(group, rollouts=rollouts)


def _metrics(env: Environment, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
    metrics = env.rollout_metrics(item, result, reward)
    for name in map(str, metrics):
        if name in BUILTIN_FIGURES or name.startswith(BUILTIN_PREFIXES):
            raise RewardError(
                f"{env.run_name}: rollout_metrics returned {name!r}, which is the name of a built-in figure; rename it"
            )
    return metrics


def stop_if_hopeless(rollouts: Sequence[Rollout]) -> None:
    """Raises `RunStopped` for what would fail every rollout: a key, the name of the model, a missing judge, a full
    disk."""
    for rollout in rollouts:
        if isinstance(rollout.error, HostDiskFull):
            raise RunStopped(str(rollout.error)) from rollout.error
        if isinstance(rollout.error, SettingsError) or _every_request_would_fail(rollout.error):
            raise UnusableSettings(str(rollout.error)) from rollout.error


def _every_request_would_fail(error: Exception | None) -> bool:
    """Whether the key, the name of the model or the kind of server is wrong."""
    of_route = isinstance(error, RequestRejected) and error.status == 404 and not error.refuses_content
    return of_route or isinstance(error, Unauthorized | NothingThere)
