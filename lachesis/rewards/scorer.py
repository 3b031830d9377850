"""Calls an environment's own code for a rollout, its rewards and the set-up of its sandbox: within a time limit, and on
a thread where they are plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from backends import SandboxExhausted
from lachesis.authors import defined_at
from lachesis.loop.result import AgentResult
from lachesis.loop.rollout_session import begin_session, opened_session
from lachesis.rewards.call_scope import CallScope
from lachesis.rewards.evidence import Evidence
from lachesis.rewards.reward import JudgeRefused, Reward, RewardError, checked_group, checked_reward, finite_number
from lachesis.rewards.timed_call import RewardThreads, Scored, TimeLimit, timed_call
from lachesis.rewards.watching import Watch, passed_by
from lachesis.tool_context.context_calls import SharedState
from lachesis.tool_context.tool_context import ToolContext
from lachesis_client.failed_requests import failed_requests
from lachesis_messages.history import MessageHistory
from lachesis_tools import ToolRegistry, ToolResult, ToolSession

if TYPE_CHECKING:
    from lachesis.rewards.doubt import Doubt

T = TypeVar("T")

REWARD_THREADS = 64
"""Plain `def` rewards that may run at once."""

RewardFunction = Callable[..., Any]
"""`async def`, or plain `def`, which runs on a thread."""


class SetUpFailed(Exception):
    """The environment's own code could not set up a sandbox. `__cause__` is its error."""


@dataclass(frozen=True, slots=True)
class _Asked(Generic[T]):
    """A reward of a rollout, or of a group. It may be called again with another item."""

    source: str
    """The environment and the reward."""
    function: RewardFunction
    arguments: tuple[Any, ...]
    """After the item."""
    contexts: Sequence[ToolContext | None]
    about: tuple[str, str]
    checked: Callable[[Any], T]
    """What it returned, as a score."""


@dataclass(slots=True)
class Scorer:
    """The rewards of one environment, and the set-up of its sandboxes."""

    environment: str
    """Its name, for messages."""
    compute_reward: RewardFunction | None
    """`(item, result, ctx)`; None if there are other rewards."""
    compute_group_reward: RewardFunction | None = None
    """`(item, results, ctxs)`; None where rollouts are scored one by one only."""
    timeout: float = 300.0
    """Seconds for all rewards of a rollout, and again for those of a group."""
    named: Mapping[str, tuple[float, RewardFunction]] = field(default_factory=dict)
    """By name the weights and the functions of further rewards, `(item, result, ctx)`. They run before
    `compute_reward`, which may end the sandbox."""
    sandbox_files: Callable[..., Any] | None = None
    """`(item)`; None where the environment has no files, and no `setup_sandbox`."""
    setup_sandbox: Callable[..., Any] | None = None
    """`(item, ctx)`"""
    setup_timeout: float = 300.0
    session: Callable[..., Any] | None = None
    """`(item)` or `(item, tool_session)`; None where rollouts have no session of the environment's own."""
    follow_up: Callable[..., Any] | None = None
    """`(item, messages)`; None where the agent's first answer ends the rollout."""
    context_class: type[ToolContext] = ToolContext
    """Of the contexts that the functions get."""
    threads: RewardThreads = field(default_factory=lambda: RewardThreads(REWARD_THREADS))
    evidence: Evidence = field(init=False)

    def __post_init__(self) -> None:
        named = {name: function for name, (_, function) in self.named.items()}
        own = {"compute_reward": self.compute_reward, "compute_group_reward": self.compute_group_reward}
        self.evidence = Evidence({**named, **own})

    async def set_up(self, item: Any, session: ToolSession, registry: ToolRegistry) -> None:
        """Make the sandbox ready for the agent, and open the rollout's session.

        Raises:
            SetUpFailed: an error of the environment.
            BackendError: the sandbox failed, or what the session stands for.
        """
        if self.sandbox_files is not None and self.setup_sandbox is not None:
            await self._set_up_sandbox(self.sandbox_files, self.setup_sandbox, item, session, registry)
        if self.session is not None:
            await self._open_session(self.session, item, session)

    async def _set_up_sandbox(
        self,
        sandbox_files: Callable[..., Any],
        setup_sandbox: Callable[..., Any],
        item: Any,
        session: ToolSession,
        registry: ToolRegistry,
    ) -> None:
        context = self.context_class(session, registry, shared=SharedState(before_agent=True))
        limit = TimeLimit("the set-up of the sandbox", "setup_timeout", self.setup_timeout, [context], agents=False)

        async def put(files: Any, source: str) -> None:
            with _placed(sandbox_files):
                await _put(session, context, files, source)

        await self._prepare(limit, sandbox_files, item, then=put)
        await self._prepare(limit, setup_sandbox, item, context)

    async def _open_session(self, function: Callable[..., Any], item: Any, tools: ToolSession) -> None:
        async def session() -> None:
            tools.rollout_session = await opened_session(function, item, tools)

        limit = TimeLimit("the start of the session", "setup_timeout", self.setup_timeout, [], agents=False)
        await self._prepare(limit, session)
        begin_session(tools.rollout_session)

    async def _prepare(
        self, limit: TimeLimit, function: RewardFunction, *arguments: Any, then: Callable[..., Any] | None = None
    ) -> None:
        scope = self._scope(f"{self.environment}: {function.__name__}", function)

        async def call() -> None:
            given = await self._call(scope, function, *arguments)
            if then is not None:
                await then(given, scope.name)

        try:
            error = (await timed_call(call, limit, scope)).error
        except SandboxExhausted as exhausted:  # by the environment's own commands
            error = exhausted
        if error is not None:
            raise SetUpFailed(f"{scope.name}: {type(error).__name__}: {error}") from error

    async def user_message(self, item: Any, history: MessageHistory) -> str | ToolResult | None:
        """The user's message after the agent's answer; None ends the rollout.

        Raises:
            RewardError: an error of the environment.
            InferenceError: a request of it failed.
        """
        assert self.follow_up is not None
        limit = TimeLimit("the user's message", "reward_timeout", self.timeout, [], agents=False)
        scope = self._scope(f"{self.environment}: follow_up", self.follow_up)
        call = partial(self._call, scope, self.follow_up, item, history.to_openai("reasoning"))
        with failed_requests() as failed:
            said: Scored[Any] = await timed_call(call, limit, scope)
        for request in failed.values():
            raise request
        if isinstance(said.error, JudgeRefused):  # who plays the user refuses what the agent wrote
            raise said.error.refused
        if said.error is not None:
            raise RewardError(f"{scope.name}: {type(said.error).__name__}: {said.error}") from said.error
        answer: Any = said.value
        if not isinstance(answer.content if isinstance(answer, ToolResult) else answer, str | None):
            raise RewardError(f"{scope.name} returned {answer!r}; it must be text, a ToolResult, or None at the end")
        if isinstance(answer, ToolResult) and answer.reward is not None:
            finite_number(answer.reward, f"{scope.name}: its reward is")
        return cast("str | ToolResult | None", answer)

    async def score(
        self, item: Any, result: AgentResult, context: ToolContext, *, about: tuple[str, str] = ("", "")
    ) -> Scored[Reward | None]:
        """The reward of one rollout.

        Args:
            about: the key of the item, and the id of the rollout; empty for a reward that is evidence of nothing.

        Raises:
            BackendError: the sandbox failed during the reward, even if the reward caught that.
        """
        limit = TimeLimit("the reward", "reward_timeout", self.timeout, [context])
        total, parts = 0.0, dict[str, float]()
        weights = {name: weight for name, (weight, _) in self.named.items()}
        for name, (weight, function) in self.named.items():
            scored = await self._score(name, function, limit, item, result, context, about)
            if scored.value is None:
                return scored
            parts[name] = scored.value.value
            total += weight * scored.value.value
        if self.compute_reward is None:
            return Scored(Reward(total, parts, weights=weights))
        scored = await self._score("compute_reward", self.compute_reward, limit, item, result, context, about)
        if scored.value is None or not parts:
            return scored
        own = scored.value
        parts["compute_reward"] = own.value
        if twice := parts.keys() & own.components.keys():
            problem = f"{self.environment}: compute_reward returned a component {min(twice)!r}, the name of another one"
            return Scored(error=RewardError(f"{problem}; rename it"))
        weights["compute_reward"] = 1.0
        return Scored(Reward(total + own.value, {**parts, **own.components}, own.turn_rewards, weights))

    async def _score(
        self,
        name: str,
        function: RewardFunction,
        limit: TimeLimit,
        item: Any,
        result: AgentResult,
        context: ToolContext,
        about: tuple[str, str],
    ) -> Scored[Reward | None]:
        source = f"{self.environment}: {name}"

        def checked(given: Any) -> Reward | None:
            if name in self.named and given is not None:
                given = finite_number(given, f"{source} returned")
            return checked_reward(given, turns=result.turns_used, source=source)

        asked = _Asked(source, function, (result, context), [context], about, checked)
        return await self._judged(asked, item, limit)

    async def _judged(self, asked: _Asked[T], item: Any, limit: TimeLimit) -> Scored[T]:
        """What a reward gives, and what the run learns from that. Where only another item tells whether an exception is
        its agent's doing, the reward is called again with that item and what the same agents left."""
        watch, evidence = self.evidence.watch(), self.evidence
        scored = await self._once(asked, item, watch, limit)
        if (
            scored.error is not None and len(asked.contexts) > 1
        ):  # it may have passed for one what it raised for another
            return scored
        named = asked.source if scored.value is not None else ""
        evidence.learn(watch, item, *asked.about, source=named, doubt=scored.doubt)
        if not asked.about[1]:
            return scored
        limit = replace(limit)
        if (doubt := scored.doubt) is not None:
            evidence.want(doubt)
            for other in evidence.items_to_try(doubt)[:1]:
                same = await self._raises_again(asked, doubt, other, limit)
                scored = replace(scored, doubt=replace(doubt, of_item=doubt.direct if same is None else not same))
        if scored.value is not None and self.compute_group_reward is None:
            for doubt in evidence.doubts_to_try(passed_by(watch, named), asked.about[0]):
                same = await self._raises_again(asked, doubt, doubt.row, limit)
                evidence.found_out(doubt, of_item=doubt.direct if same is None else same)
        return scored

    async def _once(self, asked: _Asked[T], item: Any, watch: Watch | None, limit: TimeLimit) -> Scored[T]:
        """One call of a reward, with the doubt about an error."""
        scope = self._scope(asked.source, asked.function, watch)

        async def call() -> T:
            given = await self._call(scope, asked.function, item, *asked.arguments)
            with _placed(asked.function):
                return asked.checked(given)

        scored = await timed_call(call, limit, scope)
        if scored.error is None or not scored.raised:
            return scored
        return replace(scored, doubt=self.evidence.of_exception(scored.error, item, *asked.about, asked.source, watch))

    async def _raises_again(self, asked: _Asked[T], doubt: Doubt, item: Any, limit: TimeLimit) -> bool | None:
        """Whether the reward raises the same with another item; None where it does not come so far."""
        watch = Watch()
        before = [(context.shared, len(context.calls)) for context in asked.contexts if context is not None]
        for shared, _ in before:
            shared.repeated = True
        try:
            found = await self._once(asked, item, watch, limit)
        finally:
            for shared, count in before:
                del shared.calls[count:]  # they were not part of the reward
        if found.doubt is not None and found.doubt.raises_as(doubt):
            return True
        passed = passed_by(watch, "")
        return False if found.value is not None or any(place in passed for place in doubt.places) else None

    async def score_group(
        self,
        item: Any,
        results: Sequence[AgentResult],
        contexts: Sequence[ToolContext | None],
        *,
        about: tuple[str, str] = ("", ""),
    ) -> Scored[list[Reward | None]]:
        """The rewards of a group's rollouts, in their order; `about` as in `score`, and raises as that does."""
        function = self.compute_group_reward
        if function is None:
            raise RuntimeError("the environment has no compute_group_reward")
        source = f"{self.environment}: compute_group_reward"
        turns = [result.turns_used for result in results]

        checked = partial(checked_group, turns=turns, source=source)
        asked = _Asked(source, function, (list(results), list(contexts)), contexts, about, checked)
        scored = await self._judged(asked, item, TimeLimit("the reward", "reward_timeout", self.timeout, contexts))
        if scored.value is None or not self.named:
            return scored
        before = [result.reward.components if result.reward is not None else {} for result in results]
        return Scored([_with_named(*pair, self.named) for pair in zip(scored.value, before, strict=True)])

    async def those_alone(
        self,
        doubt: Doubt,
        item: Any,
        results: Sequence[AgentResult],
        contexts: Sequence[ToolContext | None],
        about: Sequence[tuple[str, str]],
    ) -> dict[int, Doubt]:
        """Of a group whose reward raised, by their places: the rollouts for which it raises the same where they are
        alone; `about` is that of each as in `score`."""
        if len(results) == 1:
            return {0: doubt}
        found = {}
        for at, (result, context) in enumerate(zip(results, contexts, strict=True)):
            if context is not None:
                context.repeat()
            alone = await self.score_group(item, [result], [context], about=about[at])
            if alone.doubt is not None and alone.doubt.raises_as(doubt):
                found[at] = alone.doubt
        return found

    def _scope(self, name: str, function: RewardFunction, watch: Watch | None = None) -> CallScope:
        return CallScope(name, plain=_is_plain(function), watch=watch, runs=self.context_class.runs)

    async def _call(self, scope: CallScope, function: RewardFunction, *args: Any) -> Any:
        if not scope.plain:
            return await function(*args)
        watch = scope.watch
        watched = (function, *args) if watch is None else (watch.call, function, *args)
        given = await self.threads.run(scope.work.run, *watched)
        if not inspect.isawaitable(given):
            return given
        scope.plain = False  # a decorator around an `async def`
        return await given


@contextmanager
def _placed(function: Callable[..., Any]) -> Iterator[None]:
    """A refusal of what a function returned names the function's place."""
    try:
        yield
    except RewardError as error:
        raise RewardError(f"{error}{defined_at(function)}") from None


async def _put(session: ToolSession, context: ToolContext, files: Any, source: str) -> None:
    """Write what `sandbox_files` returned. Raises RewardError for paths outside the workspace."""
    if not isinstance(files, Mapping):
        raise RewardError(f"{source} returned {files!r}; it must be a mapping of paths to text, bytes or a Path")
    workspace = (await session.sandbox()).workdir.rstrip("/") + "/"
    for path, content in files.items():
        if not isinstance(path, str) or not isinstance(content, str | bytes | Path):
            raise RewardError(f"{source}: {path!r} is {type(content).__name__}; a path has text, bytes or a Path")
        inside = await session.path(path)
        if not f"{inside}/".startswith(workspace):
            raise RewardError(
                f"{source}: {path!r} is {inside}, outside the workspace {workspace}; write it in setup_sandbox"
            )
        if isinstance(content, Path):
            await (context.upload_dir if content.is_dir() else context.upload_file)(content, inside)
        else:
            await context.write_file(inside, content)


def _with_named(reward: Reward | None, before: Mapping[str, float], named: Collection[str]) -> Reward | None:
    """The reward of a group with the components of the rollout's named ones, which it does not replace."""
    if reward is None:
        return None
    kept = {name: value for name, value in before.items() if name in named}
    return replace(reward, components={**kept, **reward.components})


def _is_plain(function: RewardFunction) -> bool:
    return not inspect.iscoroutinefunction(function)
