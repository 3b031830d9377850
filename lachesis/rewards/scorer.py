"""Calls an environment's own code for a rollout, its rewards and the set-up of its sandbox: within a time limit, and on
a thread where they are plain functions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from backends import BackendError, SandboxExhausted
from backends.errors import SettingsError
from backends.tasks import cancel_requests
from lachesis.loop.result import AgentResult
from lachesis.loop.rollout_session import RolloutSession, begin_session
from lachesis.rewards.agent_fault import AgentFault, agent_faults
from lachesis.rewards.call_scope import CallScope
from lachesis.rewards.evidence import Doubt, Evidence, passed_by
from lachesis.rewards.overtime import OutOfTime, Overtime
from lachesis.rewards.reward import JudgeRefused, Reward, RewardError, checked_group, checked_reward, finite_number
from lachesis.rewards.reward_threads import RewardThreads
from lachesis.rewards.watching import Watch
from lachesis.tool_context.context_calls import SharedState
from lachesis.tool_context.pace import OwnTime
from lachesis.tool_context.tool_context import ToolContext
from lachesis.tracebacks import explained
from lachesis_client.failed_requests import failed_requests
from lachesis_messages.history import MessageHistory
from lachesis_tools import ToolRegistry, ToolSession

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Scored(Generic[T_co]):
    """The outcome of a reward function: a value, or the reason why there is none."""

    value: T_co | None = None
    error: BaseException | None = None
    """The environment's."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """By the place of the context: what the agent did that kept the function from its value."""
    raised: bool = False
    """Whether the function, or the check of its value, raised the error."""
    doubt: Doubt | None = None
    """What tells whether the agent caused the error; None where it did not."""

    @property
    def traceback(self) -> str | None:
        return None if self.error is None else explained(self.error)

    @property
    def wrong_setting(self) -> SettingsError | None:
        """The error that the environment's code found in the settings of the run."""
        return self.error if isinstance(self.error, SettingsError) else None


REWARD_THREADS = 64
"""Plain `def` rewards that may run at once."""

RewardFunction = Callable[..., Any]
"""`async def`, or plain `def`, which runs on a thread."""


class SetUpFailed(Exception):
    """The environment's own code could not set up a sandbox. `__cause__` is its error."""


@dataclass(slots=True)
class _Limit:
    """The time of one or more calls."""

    what: str
    setting: str
    seconds: float
    contexts: Sequence[ToolContext | None]
    agents: bool = True
    """Whether agents have been in these sandboxes."""
    ends: float = field(init=False)
    """On the clock of the event loop."""
    inside_before: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = asyncio.get_running_loop().time() + self.seconds
        self.inside_before = [context.seconds_inside if context is not None else 0.0 for context in self.contexts]

    async def is_used_by(self, context: ToolContext) -> bool:
        """Whether commands slept, or had processors, for so long that no busy machine has made them late."""
        begun = self.inside_before[self.contexts.index(context)]
        took = OwnTime(context.seconds_inside - begun, await context.waited_for_cpu())
        return took.is_enough(self.seconds)


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
        limit = _Limit("the set-up of the sandbox", "setup_timeout", self.setup_timeout, [context], agents=False)
        await self._prepare(limit, sandbox_files, item, then=partial(_put, session, context))
        await self._prepare(limit, setup_sandbox, item, context)

    async def _open_session(self, function: Callable[..., Any], item: Any, tools: ToolSession) -> None:
        async def session() -> None:
            takes_both = len(inspect.signature(function).parameters) > 1
            manager = function(item, tools) if takes_both else function(item)
            if not isinstance(manager, AbstractAsyncContextManager):
                raise TypeError(f"session() returned {manager!r}; decorate it with @asynccontextmanager")
            own = RolloutSession(manager, f"the session of {tools.task_id}")
            tools.before_close.append(own.close)
            tools.rollout_session = await own.open()

        limit = _Limit("the start of the session", "setup_timeout", self.setup_timeout, [], agents=False)
        await self._prepare(limit, session)
        begin_session(tools.rollout_session)

    async def _prepare(
        self, limit: _Limit, function: RewardFunction, *arguments: Any, then: Callable[..., Any] | None = None
    ) -> None:
        scope = self._scope(f"{self.environment}: {function.__name__}", function)

        async def call() -> None:
            given = await self._call(scope, function, *arguments)
            if then is not None:
                await then(given, scope.name)

        try:
            error = (await self._guarded(call, limit, scope)).error
        except SandboxExhausted as exhausted:  # by the environment's own commands
            error = exhausted
        if error is not None:
            raise SetUpFailed(f"{scope.name}: {type(error).__name__}: {error}") from error

    async def user_message(self, item: Any, history: MessageHistory) -> str | None:
        """The user's message after the agent's answer; None ends the rollout.

        Raises:
            RewardError: an error of the environment.
            InferenceError: a request of it failed.
        """
        assert self.follow_up is not None
        limit = _Limit("the user's message", "reward_timeout", self.timeout, [], agents=False)
        scope = self._scope(f"{self.environment}: follow_up", self.follow_up)
        call = partial(self._call, scope, self.follow_up, item, history.to_openai("reasoning"))
        with failed_requests() as failed:
            said: Scored[Any] = await self._guarded(call, limit, scope)
        for request in failed.values():
            raise request
        if isinstance(said.error, JudgeRefused):  # who plays the user refuses what the agent wrote
            raise said.error.refused
        if said.error is not None:
            raise RewardError(f"{scope.name}: {type(said.error).__name__}: {said.error}") from said.error
        if not isinstance(said.value, str | None):
            raise RewardError(f"{scope.name} returned {said.value!r}; it must be text, or None at the end")
        return said.value

    async def score(
        self, item: Any, result: AgentResult, context: ToolContext, *, about: tuple[str, str] = ("", "")
    ) -> Scored[Reward | None]:
        """The reward of one rollout.

        Args:
            about: the key of the item, and the id of the rollout; empty for a reward that is evidence of nothing.

        Raises:
            BackendError: the sandbox failed during the reward, even if the reward caught that.
        """
        limit = _Limit("the reward", "reward_timeout", self.timeout, [context])
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
        limit: _Limit,
        item: Any,
        result: AgentResult,
        context: ToolContext,
        about: tuple[str, str],
    ) -> Scored[Reward | None]:
        source = f"{self.environment}: {name}"

        async def once(item: Any, watch: Watch | None, limit: _Limit) -> Scored[Reward | None]:
            scope = self._scope(source, function, watch)

            async def call() -> Reward | None:
                given = await self._call(scope, function, item, result, context)
                if name in self.named and given is not None:
                    given = finite_number(given, f"{source} returned")
                return checked_reward(given, turns=result.turns_used, source=source)

            return self._doubted(await self._guarded(call, limit, scope), item, about, source, watch)

        watch = self.evidence.watch()
        scored = await once(item, watch, limit)
        return await self._learnt(scored, watch, item, about, source, partial(once, limit=replace(limit)), [context])

    def _doubted(
        self, scored: Scored[T], item: Any, about: tuple[str, str], source: str, watch: Watch | None
    ) -> Scored[T]:
        """The same, with the doubt about an error."""
        if scored.error is None or not scored.raised:
            return scored
        return replace(scored, doubt=self.evidence.doubt(scored.error, item, *about, source, watch))

    async def _learnt(
        self,
        scored: Scored[T],
        watch: Watch | None,
        item: Any,
        about: tuple[str, str],
        source: str,
        again: Callable[[Any, Watch], Coroutine[Any, Any, Scored[T]]],
        contexts: Sequence[ToolContext | None],
    ) -> Scored[T]:
        """The same. Where only another item tells whether an exception is its agent's doing, the reward is called again
        with that item and what the same agents left.

        Args:
            again: calls the reward with another item.
        """
        named = source if scored.value is not None else ""
        self.evidence.learn(watch, item, *about, source=named, doubt=scored.doubt)
        if not about[1]:
            return scored
        if (doubt := scored.doubt) is not None:
            self.evidence.want(doubt)
            if (other := self.evidence.item_to_try(doubt)) is not None:
                same = await self._raises_again(doubt, other[0], again, contexts)
                scored = replace(scored, doubt=replace(doubt, of_item=doubt.direct if same is None else not same))
        if scored.value is not None and self.compute_group_reward is None:
            passed = passed_by(watch, named)
            for doubt in self.evidence.doubts_to_try(passed, about[0]):
                same = await self._raises_again(doubt, doubt.row, again, contexts)
                self.evidence.found_out(doubt, of_item=doubt.direct if same is None else same)
        return scored

    async def _raises_again(
        self,
        doubt: Doubt,
        item: Any,
        again: Callable[[Any, Watch], Coroutine[Any, Any, Scored[T]]],
        contexts: Sequence[ToolContext | None],
    ) -> bool | None:
        """Whether the reward raises the same with another item; None where it does not come so far."""
        watch = Watch()
        before = [(context, len(context.calls)) for context in contexts if context is not None]
        for context, _ in before:
            context.repeat()
        try:
            found = await again(item, watch)
        finally:
            for context, count in before:
                context.forget_calls(count)
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

        async def once(item: Any, watch: Watch | None) -> Scored[list[Reward | None]]:
            scope = self._scope(source, function, watch)
            limit = _Limit("the reward", "reward_timeout", self.timeout, contexts)

            async def call() -> list[Reward | None]:
                given = await self._call(scope, function, item, list(results), list(contexts))
                return checked_group(given, turns=turns, source=source)

            return self._doubted(await self._guarded(call, limit, scope), item, about, source, watch)

        watch = self.evidence.watch()
        scored = await once(item, watch)
        if scored.error is None or len(results) == 1:  # else it may have passed for one what it raised for another
            scored = await self._learnt(scored, watch, item, about, source, once, contexts)
        if scored.value is None or not self.named:
            return scored
        before = [result.reward.components if result.reward is not None else {} for result in results]
        return Scored([_with_named(*pair, self.named) for pair in zip(scored.value, before, strict=True)])

    async def _guarded(self, call: Callable[[], Coroutine[Any, Any, T]], limit: _Limit, scope: CallScope) -> Scored[T]:
        before, contexts = cancel_requests(), limit.contexts
        for context in contexts:
            if context is not None:
                context.enter(scope)
        # A task, since a TaskGroup in a reward may leave a request to cancel with the task that it runs in.
        running = asyncio.ensure_future(_attempt(call, scope))
        too_late = f"{limit.what} took longer than {limit.setting} = {limit.seconds:g} s"
        overtime = Overtime(scope.work, running, limit.ends, limit.seconds, too_late)
        try:
            with overtime.watched():
                async with asyncio.timeout_at(limit.ends) as time:
                    given, error = await running
        except OutOfTime:  # it came when the code had just stopped
            given, error = None, None
        except TimeoutError:  # it ran out when the reward had ended, and nobody had taken its value
            given, error = running.result()
        # A bare `except:` in a reward also catches the cancellation and the time limit: neither may become a score.
        if cancel_requests() > before:
            raise error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
        if isinstance(error, BackendError):
            raise error
        faults: dict[int, str] = {}
        slow = overtime.found
        raised = slow is not None or (error is not None and not time.expired())
        is_over = time.expired() and (error is None or isinstance(error, (TimeoutError, asyncio.CancelledError)))
        if slow is not None or is_over:
            error = slow or RewardError(too_late)
            faults = self._late(limit, scope.work.kept_loop) if limit.agents else {}
            for at in faults:
                context = contexts[at]
                if context is None or await limit.is_used_by(context):
                    continue
                found = await context.pace_without_agent()
                if found is not None:
                    found.require_usable(str(error))
        elif error is not None:
            found_faults = agent_faults(error)
            faults = _at_fault(found_faults, contexts) if not any(each.of_image for each in found_faults) else {}
        if error is None or scope.stuck is not None:
            error = scope.problem()
            faults, raised = {}, False
        if error is None and scope.faults:
            faults = _at_fault(scope.faults, contexts)
        for failure in (scope.failure, *(context.failure for context in contexts if context is not None)):
            if failure is not None:
                raise failure
        if faults:
            return Scored(faults=faults)
        return Scored(error=error, raised=raised) if error is not None else Scored(given)

    def _late(self, limit: _Limit, kept_loop: float) -> dict[int, str]:
        """Whose commands used up the time of a reward that was late; empty where it was the reward's own work.

        What runs inside is the agent's code, which else could keep a reward from its end by sleeping.

        Args:
            kept_loop: seconds for which the reward itself kept the event loop. No call of it took these.
        """
        rest = asyncio.get_running_loop().time() - (limit.ends - limit.seconds) - kept_loop
        taken = {
            at: min(rest, context.seconds_inside - begun)
            for at, (context, begun) in enumerate(zip(limit.contexts, limit.inside_before, strict=True))
            if context is not None
        }
        if sum(taken.values()) < self.timeout / 2:
            return {}
        return {
            at: f"calls of the reward took {seconds:.1f} s inside, of reward_timeout = {self.timeout:g} s"
            for at, seconds in taken.items()
            if seconds >= self.timeout / (2 * len(taken))
        }

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


def _at_fault(faults: Sequence[AgentFault], contexts: Sequence[ToolContext | None]) -> dict[int, str]:
    """The faults by the places of their contexts. Empty where one belongs to none of these."""
    found: dict[int, str] = {}
    for fault in faults:
        places = [at for at, context in enumerate(contexts) if context is not None and context.at_fault(fault)]
        if not places:
            return {}
        found.setdefault(places[0], str(fault))
    return found


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


async def _attempt(
    call: Callable[[], Coroutine[Any, Any, T]], scope: CallScope
) -> tuple[T | None, BaseException | None]:
    """The value, or the error. (A task that ends with SystemExit would end the event loop.)"""
    try:
        with scope.entered():
            return await scope.wrapped(call()), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return None, error
