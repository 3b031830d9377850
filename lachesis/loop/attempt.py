"""One start of a rollout, as far as it came, and what all starts of a rollout have in common."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lachesis.loop.interrupted import InterruptedRollout, note_rollout
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import TokenCount
from lachesis.loop.rollout import HeldSandbox, Rollout
from lachesis.rewards.timed_call import Scored

if TYPE_CHECKING:
    from backends import SandboxSpec
    from lachesis.loop.result import AgentResult
    from lachesis.rewards.reward import Reward
    from lachesis.tool_context.tool_context import ToolContext
    from lachesis_client.chat_options import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What all attempts at a rollout have in common."""

    item: Any
    messages: Sequence[Mapping[str, Any]] | Callable[[], Sequence[Mapping[str, Any]]]
    item_key: str
    index: int
    tools: Sequence[Mapping[str, Any]]
    temperature: float
    split: Split
    spec: SandboxSpec | None
    branch: Any
    """The `TreeBranch` that it is, if its group is of trees."""
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def start(self) -> Any:
        """The fork of another rollout at which it begins; None at the prompt."""
        return self.branch.start if self.branch is not None else None

    def tokens_of(self, result: AgentResult) -> TokenCount:
        """What an attempt sampled itself, without the turns that it had from another rollout."""
        start = self.start
        return result.tokens if start is None else result.tokens.without(start.rollout.tokens)


@dataclass(slots=True)
class Attempt:
    """One start of a rollout, as far as it came."""

    number: int
    """From 1."""
    outcome: Outcome = Outcome.INFRA_ERROR
    reason: str = ""
    error: Exception | None = None
    result: AgentResult | None = None
    scored: Scored[Reward | None] = field(default_factory=Scored)
    context: ToolContext | None = None
    """What the reward was called with."""
    held: HeldSandbox | None = None
    cut: list[AgentResult] = field(default_factory=list)
    """The results of agents that were cancelled."""
    failed: Mapping[str, Exception] = field(default_factory=dict)
    """Requests of the environment's set-up or reward that were not answered."""
    unfinished: TokenCount = field(default_factory=TokenCount)
    """What its agent sampled where there is no result."""

    def note_interrupted(self, plan: RolloutPlan) -> None:
        """Keep the finished turns of a rollout that is cancelled."""
        result = self.result
        if result is None or result.outcome is Outcome.COMPLETED:
            return
        rollout = Rollout(
            rollout_id=plan.rollout_id,
            item_key=plan.item_key,
            index=plan.index,
            outcome=Outcome.INFRA_ERROR,
            reason="interrupted",
            reward=None,
            result=result,
            attempts=self.number,
        )
        note_rollout(InterruptedRollout(rollout, plan.tools))
