"""Calls the rewards of an environment: within a time limit, and on a thread where they are plain functions."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from backends import BackendError
from lachesis.agent.agent_fault import AgentFault, agent_faults
from lachesis.agent.call_scope import CallScope
from lachesis.agent.driven import Driven
from lachesis.agent.result import AgentResult
from lachesis.agent.reward import Reward, RewardError, checked_group, checked_reward
from lachesis.agent.reward_threads import RewardThreads
from lachesis.agent.tool_context import ToolContext
from lachesis.tasks import cancel_requests

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Scored(Generic[T_co]):
    """What a reward function came to: a value, or why there is none."""

    value: T_co | None = None
    traceback: str | None = None
    """Of the environment's error."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """By the place of the context: what the agent did that kept the function from its value."""


REWARD_THREADS = 64
"""Plain `def` rewards that may run at once."""

RewardFunction = Callable[..., Any]
"""`async def`, or plain `def`, which runs on a thread."""


@dataclass(slots=True)
class Scorer:
    """The rewards of one environment."""

    environment: str
    """Its name, for messages."""
    compute_reward: RewardFunction
    """`(item, result, ctx)`"""
    compute_group_reward: RewardFunction | None = None
    """`(item, results, ctxs)`; None where rollouts are scored one by one only."""
    timeout: float = 300.0
    """Seconds for one call."""
    threads: RewardThreads = field(default_factory=lambda: RewardThreads(REWARD_THREADS))

    async def score(self, item: Any, result: AgentResult, context: ToolContext) -> Scored[Reward | None]:
        """The reward of one rollout.

        Raises:
            BackendError: the sandbox failed during the reward, even if the reward caught that.
        """
        source = f"{self.environment}: compute_reward"
        scope = CallScope(source, plain=_is_plain(self.compute_reward))

        async def call() -> Reward | None:
            given = await self._call(scope, self.compute_reward, item, result, context)
            return checked_reward(given, turns=result.turns_used, source=source)

        return await self._guarded(call, [context], scope)

    async def score_group(
        self, item: Any, results: Sequence[AgentResult], contexts: Sequence[ToolContext | None]
    ) -> Scored[list[Reward | None]]:
        """The rewards of a group's rollouts, in their order; raises as `score` does."""
        function = self.compute_group_reward
        if function is None:
            raise RuntimeError("the environment has no compute_group_reward")
        source = f"{self.environment}: compute_group_reward"
        turns = [result.turns_used for result in results]
        scope = CallScope(source, plain=_is_plain(function))

        async def call() -> list[Reward | None]:
            given = await self._call(scope, function, item, list(results), list(contexts))
            return checked_group(given, turns=turns, source=source)

        return await self._guarded(call, contexts, scope)

    async def _guarded(
        self, call: Callable[[], Coroutine[Any, Any, T]], contexts: Sequence[ToolContext | None], scope: CallScope
    ) -> Scored[T]:
        before = cancel_requests()
        inside_before = [context.seconds_inside if context is not None else 0.0 for context in contexts]
        for context in contexts:
            if context is not None:
                context.enter(scope)
        # A task, since a TaskGroup in a reward may leave a request to cancel with the task that it runs in.
        running = asyncio.ensure_future(_attempt(call, scope))
        try:
            async with asyncio.timeout(self.timeout) as limit:
                given, error = await running
        except TimeoutError:  # it ran out when the reward had ended, and nobody had taken its value
            given, error = running.result()
        # A bare `except:` in a reward also catches the cancellation and the time limit: neither may become a score.
        if cancel_requests() > before:
            raise error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
        if isinstance(error, BackendError):
            raise error
        faults: dict[int, str] = {}
        if limit.expired() and (error is None or isinstance(error, (TimeoutError, asyncio.CancelledError))):
            error = RewardError(f"the reward took longer than reward_timeout = {self.timeout:g} s")
            faults = self._late(contexts, inside_before)
            for at in faults:
                context = contexts[at]
                found = await context.pace_without_agent() if context is not None else None
                if found is not None:
                    found.require_usable(str(error))
        elif error is not None:
            faults = _at_fault(agent_faults(error), contexts)
        if error is None or scope.stuck is not None:
            error = scope.problem()
            faults = {}
        if error is None and scope.faults:
            faults = _at_fault(scope.faults, contexts)
        for failure in (scope.failure, *(context.failure for context in contexts if context is not None)):
            if failure is not None:
                raise failure
        if faults:
            return Scored(faults=faults)
        if error is not None:
            return Scored(traceback="".join(traceback.format_exception(error)))
        return Scored(given)

    def _late(self, contexts: Sequence[ToolContext | None], before: Sequence[float]) -> dict[int, str]:
        """Whose commands used up the time of a reward that was late; empty where it was the reward's own work.

        What runs inside is the agent's code, which else could keep a reward from its end by sleeping.
        """
        taken = {
            at: context.seconds_inside - begun
            for at, (context, begun) in enumerate(zip(contexts, before, strict=True))
            if context is not None
        }
        if sum(taken.values()) < self.timeout / 2:
            return {}
        return {
            at: f"calls of the reward took {seconds:.1f} s inside, of reward_timeout = {self.timeout:g} s"
            for at, seconds in taken.items()
            if seconds >= self.timeout / (2 * len(taken))
        }

    async def _call(self, scope: CallScope, function: RewardFunction, *args: Any) -> Any:
        if not scope.plain:
            return await function(*args)
        given = await self.threads.run(function, *args)
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


def _is_plain(function: RewardFunction) -> bool:
    return not inspect.iscoroutinefunction(function)


async def _attempt(
    call: Callable[[], Coroutine[Any, Any, T]], scope: CallScope
) -> tuple[T | None, BaseException | None]:
    """The value, or the error. (A task that ends with SystemExit would end the event loop.)"""
    try:
        with scope.entered():
            return await Driven(call()), None
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return None, error
