"""One rollout: lease a sandbox, let the agent play, score what it left behind, release the sandbox.

Failure is not zero: a rollout has a reward only when the agent's own doing was looked at. Broken infrastructure gets a
fresh start a few times and is then left out; an exception in the reward is the environment's error and is kept as such.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from backends import BackendError, SandboxSpec
from lachesis.agent.loop import ExecuteTools, HermesAgentLoop, LoopLimits
from lachesis.agent.outcome import Outcome
from lachesis.agent.result import AgentResult
from lachesis.agent.reward_log import RewardCall
from lachesis.agent.reward_threads import RewardThreads
from lachesis.agent.tool_context import BlockingToolContext, ToolContext
from lachesis.inference import RequestRejected, Router, TokenServer
from lachesis.inference.balancer import Split
from lachesis.inference.chat_template import PromptError
from lachesis.tools import ToolRegistry, ToolResult, ToolSession, ToolSessions, call_tools
from lachesis.trajectories import TokenSample, ToolCall

if TYPE_CHECKING:
    from lachesis.runs.settings import HermesAgentEnvConfig  # which loads Atropos, and a report does without

log = logging.getLogger(__name__)

Reward = Callable[[Any, AgentResult, Any], "float | Awaitable[float]"]


_REPEATS = (RequestRejected, PromptError)
"""The server would refuse the same request again, and the template the same conversation."""


class RewardError(Exception):
    """A reward is no finite number, or took too long. Like any exception of a reward: an error of the environment."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished attempt at one item."""

    rollout_id: str
    item_key: str
    index: int
    """Place in the group, from 0."""
    outcome: Outcome
    reason: str
    reward: float | None
    """None when the rollout is left out: the infrastructure failed, time ran out, or the reward raised."""
    result: AgentResult | None
    """None when not even the agent's first request could be made."""
    traceback: str | None = None
    """Of an exception in the environment's own code. One in the reward leaves no reward, one in the metrics does."""
    error: Exception | None = None
    """What broke the infrastructure."""
    attempts: int = 1
    """Starts that it took; more than one when the infrastructure broke earlier ones."""
    retried_after: Sequence[str] = ()
    """Why each of the earlier starts was given up."""
    lost_completion_tokens: int = 0
    """Completion tokens of the earlier starts; those of the last one are in `result`."""
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward_calls: Sequence[RewardCall] = ()
    """What the reward did in the sandbox."""

    @property
    def may_pass(self) -> bool:
        """It never came to its reward, and another time it may: the infrastructure was in the way, and nothing else."""
        return not self.outcome.scored and self.traceback is None and not isinstance(self.error, _REPEATS)

    @property
    def samples(self) -> list[TokenSample]:
        """The exact tokens of what was sampled (Phase 2), in which the rollout counts once; empty in Phase 1."""
        return self.result.samples(self.rollout_id) if self.result is not None else []

    @classmethod
    def broken(cls, item_key: str, index: int, error: BaseException) -> Rollout:
        """A rollout that an exception in the environment's own code ended."""
        return cls(
            rollout_id=uuid.uuid4().hex,
            item_key=item_key,
            index=index,
            outcome=Outcome.INFRA_ERROR,
            reason=f"exception in the environment: {type(error).__name__}: {error}",
            reward=None,
            result=None,
            traceback="".join(traceback.format_exception(error)),
        )


class RolloutPlayer:
    """Plays rollouts of one environment. Holds no state of a rollout, so any number may run at once.

    Args:
        compute_reward: `async def`, or plain `def`, which then runs on `reward_threads` with a blocking context.
        max_seconds: wall-clock time of one rollout, where that is not `config.rollout_timeout`.
    """

    def __init__(
        self,
        *,
        config: HermesAgentEnvConfig,
        server: Router | TokenServer,
        sessions: ToolSessions,
        registry: ToolRegistry,
        compute_reward: Reward,
        reward_threads: RewardThreads,
        max_seconds: float | None = None,
    ) -> None:
        self.config = config
        self.max_seconds = config.rollout_timeout if max_seconds is None else max_seconds
        self.server = server
        self.sessions = sessions
        self.registry = registry
        self.compute_reward = compute_reward
        self.reward_threads = reward_threads

    async def play(
        self,
        item: Any,
        messages: Sequence[Mapping[str, Any]],
        *,
        item_key: str,
        index: int,
        tools: Sequence[Mapping[str, Any]],
        temperature: float,
        split: Split = "train",
        spec: SandboxSpec | None = None,
    ) -> Rollout:
        """Play one rollout to its end; only cancellation and errors of this program are raised.

        `spec` is what its sandbox is to be, where that is not what the sessions give to all.
        """
        started = time.monotonic()
        rollout_id = uuid.uuid4().hex
        attempts = 0
        retried_after: list[str] = []
        lost_completion_tokens = 0
        while True:
            attempts += 1
            task_id = f"{item_key}-{index}-{rollout_id[:8]}-{attempts}"
            verifier_id = f"{task_id}-verifier"
            session = self.sessions.open(task_id, spec=spec)
            context: ToolContext | None = None
            result: AgentResult | None = None
            reward: float | None = None
            trace: str | None = None
            try:
                names = [schema["function"]["name"] for schema in tools]
                loop = HermesAgentLoop(
                    self.server.for_rollout(),
                    tools,
                    names,
                    self.config.max_agent_turns,
                    task_id,
                    temperature,
                    self.config.max_token_length,
                    self.config.extra_body,
                    execute=self.executor(session, names),
                    limits=self.limits(),
                    ephemeral_system_prompt=self.config.ephemeral_system_prompt,
                    prefill_messages=self.config.prefill_messages,
                    split=split,
                )
                result = await loop.run(messages)
                outcome, reason, error = result.outcome, result.reason, result.error
                if outcome.scored:
                    context = ToolContext(
                        session,
                        self.registry,
                        open_verifier=functools.partial(self.sessions.open, verifier_id, spec=spec),
                    )
                    reward, trace = await self.score(item, result, context)
            except BackendError as broken:
                outcome, reason, error = Outcome.INFRA_ERROR, str(broken), broken
            finally:
                await self.release(task_id, verifier_id)
            if outcome is not Outcome.INFRA_ERROR or attempts > self.config.max_infra_retries:
                break
            if isinstance(error, _REPEATS):
                break
            retried_after.append(reason)
            lost_completion_tokens += result.tokens.completion_tokens if result is not None else 0
        return Rollout(
            rollout_id=rollout_id,
            item_key=item_key,
            index=index,
            outcome=outcome,
            reason=reason,
            reward=reward,
            result=result,
            traceback=trace,
            error=error,
            attempts=attempts,
            retried_after=tuple(retried_after),
            lost_completion_tokens=lost_completion_tokens,
            seconds=time.monotonic() - started,
            reward_calls=context.calls if context is not None else (),
        )

    async def release(self, *task_ids: str) -> None:
        """Close the rollout's sandboxes, also when the rollout is cancelled: nothing of it may stay behind."""
        closing = asyncio.gather(*map(self.sessions.close, task_ids), return_exceptions=True)
        for task_id, error in zip(task_ids, await asyncio.shield(closing), strict=True):
            if isinstance(error, BackendError):
                # What was scored stays scored; the session stays listed, and the end of the run tries again.
                log.warning("the sandbox of %s could not be removed yet: %s", task_id, error)
            elif isinstance(error, BaseException):
                raise error

    def executor(self, session: ToolSession, names: Sequence[str]) -> ExecuteTools:
        """Runs tool calls in the session of one rollout."""

        async def execute(calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
            wanted = [(call.name, call.arguments) for call in calls]
            return await call_tools(wanted, session, registry=self.registry, allowed=names)

        return execute

    def limits(self) -> LoopLimits:
        config = self.config
        return LoopLimits(
            max_tool_calls=config.max_tool_calls,
            max_total_tokens=config.rollout_token_budget,
            max_seconds=self.max_seconds,
            max_resamples=config.max_resamples,
            max_faulty_turns=config.max_faulty_turns,
        )

    async def score(self, item: Any, result: AgentResult, context: ToolContext) -> tuple[float | None, str | None]:
        """The reward, or the traceback of the environment's error.

        Raises:
            BackendError: the sandbox failed under the reward, also where the reward made something else of that.
        """
        reward: float | None = None
        trace: str | None = None
        try:
            async with asyncio.timeout(self.config.reward_timeout) as limit:
                given = await self.call_reward(item, result, context)
            reward = _finite(given)
        except BackendError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                error = RewardError(f"the reward took longer than reward_timeout = {self.config.reward_timeout:g} s")
            trace = "".join(traceback.format_exception(error))
        if context.failure is not None:
            raise context.failure
        return reward, trace

    async def call_reward(self, item: Any, result: AgentResult, context: ToolContext) -> Any:
        if inspect.iscoroutinefunction(self.compute_reward):
            return await self.compute_reward(item, result, context)
        blocking = BlockingToolContext(context, asyncio.get_running_loop())
        try:
            given = await self.reward_threads.run(self.compute_reward, item, result, blocking)
            return await given if inspect.isawaitable(given) else given
        finally:
            blocking.end()


def is_cancelled() -> bool:
    """Whether this very task was asked to stop. A CancelledError without that comes from a task it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def with_metrics(rollout: Rollout, measure: Callable[[AgentResult, float | None], Mapping[str, float]]) -> Rollout:
    """The rollout with the environment's own figures. An exception there is kept and shown; the reward stays."""
    if rollout.result is None:
        return rollout
    try:
        given = measure(rollout.result, rollout.reward)
        metrics = {str(name): _number(value, f"metric {name!r}:") for name, value in given.items()}
        return replace(rollout, metrics=metrics)
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        return replace(rollout, traceback=(rollout.traceback or "") + trace)


def _finite(value: Any) -> float | None:
    return None if value is None else _number(value, "compute_reward returned")


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardError(f"{what} {value!r}; it has to be a number, or None to leave the rollout out") from None
    if not math.isfinite(number):
        raise RewardError(f"{what} {number}; it has to be finite")
    return number
