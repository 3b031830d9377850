"""How a rollout ended: one of a few names, and what follows from each."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Why a rollout stopped. Only the model's own doing is ever scored."""

    COMPLETED = "completed"
    """The model ended with an answer."""
    MAX_TURNS = "max_turns"
    """The budget of turns or of tool calls is used up."""
    CONTEXT_EXHAUSTED = "context_exhausted"
    """The prompt no longer fits the model, the token budget is used up, or the answer was cut off by its limit."""
    MODEL_ERROR = "model_error"
    """The model wrote nothing usable, also when asked again; rolled back to the last valid state."""
    INFRA_ERROR = "infra_error"
    """A server or a sandbox failed, also with fresh ones. Says nothing about the model: never scored."""
    TIMEOUT = "timeout"
    """The wall-clock budget is used up. A slow machine looks the same as a slow model: never scored."""
    CANCELLED = "cancelled"
    """The run was stopped from outside. Never scored."""

    @property
    def scored(self) -> bool:
        """Whether the reward may look at what was left behind."""
        return self in _SCORED


_SCORED = frozenset({Outcome.COMPLETED, Outcome.MAX_TURNS, Outcome.CONTEXT_EXHAUSTED, Outcome.MODEL_ERROR})
