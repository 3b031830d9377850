"""Finished rollouts, and the groups of them: what is known of each, in memory."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from backends import BackendError
from backends.errors import ExitCode, LachesisError, SettingsError
from lachesis.loop.outcome import DECLINED as DECLINED
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult, Cost, TokenCount
from lachesis.rewards.reward import Reward, finite_number
from lachesis.tool_context.context_calls import RewardCall
from lachesis.tool_context.tool_context import ToolContext
from lachesis.tracebacks import explained
from lachesis_client import BadResponse, InferenceError, RequestRejected
from lachesis_client.errors import PromptError

if TYPE_CHECKING:
    from lachesis.rewards.doubt import Doubt
    from lachesis_messages.history import MessageHistory
    from lachesis_messages.records.tree_places import TreePlace

log = logging.getLogger(__name__)

MODEL_SERVER = "model_server"
"""The kind of a rollout without a score (`Rollout.unscored_kind`) that says nothing about the item or the model."""

BROKEN_ITEM = "broken_item"
"""The kind of a rollout without a score whose item cannot be played."""

_FEW_MESSAGES, _FEW_TOKENS = 64, 20_000

_REPEATS = (RequestRejected, PromptError)
"""The server would reject the same request again, and the template the same conversation."""


def repeats(error: Exception | None) -> bool:
    """Whether another attempt would end in the same way."""
    return isinstance(error, _REPEATS) or (isinstance(error, BackendError) and not error.may_pass)


FixedScore: TypeAlias = float | Literal["leave_out"]
"""A score that the settings decide. A rollout that is left out has none."""


@dataclass(frozen=True, slots=True)
class HeldSandbox:
    """The sandbox of a rollout that waits for the reward of its group."""

    context: ToolContext
    release: Callable[[], Awaitable[None]]


held_sandboxes: ContextVar[list[HeldSandbox] | None] = ContextVar("held", default=None)
"""Sandboxes that rollouts of the current group keep."""


branch_of_rollout: ContextVar[Any] = ContextVar("branch", default=None)
"""The `TreeBranch` of `lachesis.loop.trees` that the task plays; None where its group is not of trees."""


@asynccontextmanager
async def holding_sandboxes() -> AsyncIterator[None]:
    """Release at the end every sandbox that a rollout inside kept, also of rollouts that an override dropped."""
    held: list[HeldSandbox] = []
    token = held_sandboxes.set(held)
    try:
        yield
    finally:
        held_sandboxes.reset(token)
        await asyncio.gather(*(sandbox.release() for sandbox in held))


class BeforeFork(NamedTuple):
    """What a rollout of a tree has before a fork."""

    history: MessageHistory
    cost: Cost


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
    """None when the rollout is left out: the infrastructure failed, the reward raised, or a setting says so."""
    result: AgentResult | None
    """None when not even the agent's first request could be made, or its sandbox could not be set up."""
    traceback: str | None = None
    """Of an exception in the environment's own code that left no reward."""
    metrics_traceback: str | None = None
    """Of an exception in `rollout_metrics`, which the reward survives."""
    error: Exception | None = None
    """What broke the infrastructure, or is wrong with the settings."""
    attempts: int = 1
    """Starts that it took; more than one when the infrastructure broke earlier ones."""
    retried_after: Sequence[str] = ()
    """Why each of the earlier starts failed."""
    lost: TokenCount = field(default_factory=TokenCount)
    """The tokens of earlier starts; the last start's are in `result`."""
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The components of its reward and the environment's own figures."""
    turn_rewards: Sequence[float] | None = None
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Where its reward is a sum of components: their weights in it."""
    left_out: str = ""
    """Why it has no reward, where it was not left to a reward function: a setting, or an environment that collected the
    group itself."""
    not_sampled: bool = False
    """It is left out because its environment trains text that the model did not write, or not in this form."""
    agent_fault: str = ""
    """What the agent broke in its own sandbox, if that decided the score."""
    broken_item: bool = False
    """Its item fails alike in every attempt while others are answered, so it is not played again in this run."""
    fault_traceback: str = ""
    """Of an exception in a reward that was the agent's doing."""
    doubt: Doubt | None = field(default=None, repr=False, compare=False)
    """About the exception of its reward, which may be the agent's doing: nothing has shown it yet."""
    reward_calls: Sequence[RewardCall] = ()
    """The reward's calls in the sandbox."""
    held: HeldSandbox | None = field(default=None, repr=False, compare=False)
    """The sandbox, still leased, where a reward of the whole group is to come."""
    tree: TreePlace | None = None
    """In a group of trees."""
    forks: Sequence[BeforeFork] = field(default=(), repr=False, compare=False)
    """Its beginnings before the forks on its path."""

    @property
    def may_pass(self) -> bool:
        """The infrastructure, and nothing else, kept it from its reward: another attempt may succeed."""
        broken = not self.outcome.scored or self.error is not None
        return broken and self.traceback is None and not self.broken_item and not repeats(self.error)

    @property
    def may_pass_later(self) -> bool:
        """Whether a run with the same settings may succeed. A server whose answers are none is of another kind."""
        return self.may_pass and not isinstance(self.error, BadResponse)

    @property
    def of_settings(self) -> bool:
        """Whether other settings, and nothing else, are the remedy for what kept it from its reward."""
        return isinstance(self.error, LachesisError) and self.error.exit_code == ExitCode.SETTINGS

    @property
    def left_to_agent(self) -> bool:
        """Whether the agent's actions and the settings for them leave it without a reward: nothing needs a fix."""
        own = bool(self.agent_fault) or (self.outcome is Outcome.TIMEOUT and self.error is None)
        return own and self.reward is None and self.traceback is None

    @property
    def tracebacks(self) -> str | None:
        """All exceptions in the environment's own code."""
        return "".join(trace for trace in (self.traceback, self.metrics_traceback) if trace is not None) or None

    @property
    def samples(self) -> list[Any]:
        """The exact tokens that were sampled (Phase 2), in which the rollout counts once; empty in Phase 1."""
        return self.result.samples(self.rollout_id) if self.result is not None else []

    @property
    def unscored_kind(self) -> str:
        """One word for why it has no score; empty where it has one.

        `model_server` (a request to it failed), `infra_error` (a sandbox, or a request that no server would take),
        `broken_item` (its item fails alike in every attempt, while others are answered), `timeout`, `agent_fault`,
        `environment` (an exception in its own code), `declined` (the reward is None), `dropped` (an environment that
        collects its own groups did not return it), or `not_sampled` (what it returned trains text that the model did
        not say).
        """
        if self.reward is not None:
            return ""
        if self.agent_fault:
            return Outcome.AGENT_FAULT.value
        if self.traceback is not None:
            return "environment"
        if self.broken_item:
            return BROKEN_ITEM
        if self.outcome is Outcome.INFRA_ERROR:
            failed = isinstance(self.error, InferenceError) and not repeats(self.error)
            return MODEL_SERVER if failed else self.outcome.value
        if self.outcome in (Outcome.TIMEOUT, Outcome.AGENT_FAULT):
            return self.outcome.value
        if self.not_sampled:
            return "not_sampled"
        return "dropped" if self.left_out else DECLINED

    @property
    def unscored_because(self) -> str:
        """Why it has no reward, in one line."""
        if self.traceback is not None:
            return self.traceback.partition("\n")[0]
        return self.left_out or ("a reward returned None" if self.outcome.scored else self.reason)

    def rewarded(self, reward: Reward | None) -> Rollout:
        """The rollout with `reward` in place of an earlier one."""
        if reward is None:
            return replace(self, reward=None, turn_rewards=None, metrics={}, reward_weights={})
        metrics = {f"reward/{name}": value for name, value in reward.components.items()}
        return replace(
            self,
            reward=reward.value,
            turn_rewards=reward.turn_rewards,
            metrics=metrics,
            reward_weights=dict(reward.weights),
        )

    def measured(self, measure: Callable[[AgentResult, float | None], Mapping[str, float]]) -> Rollout:
        """The rollout with the environment's own figures. An exception there is kept and shown; the reward stays."""
        if self.result is None:
            return self
        try:
            given = measure(self.result, self.reward)
            metrics = {str(name): finite_number(value, f"metric {name!r}:") for name, value in given.items()}
            return replace(self, metrics={**self.metrics, **metrics})
        except Exception as error:
            trace = explained(error)
            return replace(self, metrics_traceback=trace)

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
            traceback=explained(error),
            error=error if isinstance(error, SettingsError) else None,
        )


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
    def is_small(self) -> bool:
        """Whether its record takes a millisecond or two to make, as it does for short conversations."""
        results = [rollout.result for rollout in self.rollouts if rollout.result is not None]
        if any(result.tokens.uncounted_requests for result in results):
            return False
        messages = sum(len(result.history) for result in results)
        tokens = sum(each.tokens.prompt_tokens + each.tokens.completion_tokens for each in results)
        return messages <= _FEW_MESSAGES and tokens <= _FEW_TOKENS

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
