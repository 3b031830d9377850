"""Budgets of a rollout."""

from __future__ import annotations

from dataclasses import dataclass

from lachesis.loop.outcome import Outcome, RolloutEnded
from lachesis.loop.result import TokenCount
from lachesis_client import InferenceError
from lachesis_messages.messages import FinishReason
from lachesis_messages.responses import ChatResponse


def fills_context(response: ChatResponse, max_tokens: int | None) -> bool:
    """Whether an answer was cut off before `max_tokens`, so by the context of the model."""
    used = response.usage.completion_tokens
    cut = response.finish_reason is FinishReason.LENGTH
    return cut and (max_tokens is None or (used is not None and used < max_tokens))


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Budgets of one rollout; None means no limit."""

    max_tool_calls: int | None = None
    rollout_token_budget: int | None = None
    """Completion tokens over all turns, as the server counts them."""
    max_seconds: float | None = None
    """The agent's own time: commands as they run, and answered completions."""
    max_waiting: float | None = None
    """Seconds that servers and sandboxes may take in addition, and as many for one request in flight."""
    max_resamples: int = 3
    """How often one turn is sampled again when nothing usable came."""
    max_faulty_turns: int = 3
    """Turns in a row with a call that could not be run."""

    def spends_all(self, tokens: TokenCount) -> bool:
        """Whether these tokens are the whole budget."""
        return self.rollout_token_budget is not None and tokens.completion_tokens >= self.rollout_token_budget

    def check(self, tokens: TokenCount, tool_calls: int) -> None:
        """
        Raises:
            RolloutEnded: a budget is used up.
            InferenceError: it is unknown whether the budget of tokens is.
        """
        if self.max_tool_calls is not None and tool_calls >= self.max_tool_calls:
            raise RolloutEnded(Outcome.MAX_TURNS, f"the budget of {self.max_tool_calls} tool calls is used up")
        if self.rollout_token_budget is not None and tokens.uncounted_requests:
            raise InferenceError(
                "model server",
                "it reports no token usage, so the token budget cannot be enforced",
                "unset --env.rollout_token_budget or use a server that reports usage",
            )
        if self.spends_all(tokens):
            used_up = f"the budget of {self.rollout_token_budget} tokens is used up"
            raise RolloutEnded(Outcome.CONTEXT_EXHAUSTED, used_up)
