"""How a rollout ends: one of a few outcomes."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Why a rollout stopped. Only outcomes that the model itself caused are scored."""

    COMPLETED = "completed"
    """The model ended with an answer."""
    MAX_TURNS = "max_turns"
    """The budget of turns or of tool calls is used up."""
    CONTEXT_EXHAUSTED = "context_exhausted"
    """The prompt no longer fits the model, the token budget is used up, or the answer was cut off by its limit."""
    MODEL_ERROR = "model_error"
    """The model wrote nothing usable, also when sampled again; the rollout is at its last valid state."""
    INFRA_ERROR = "infra_error"
    """A server or a sandbox failed, also after new starts. Says nothing about the model: never scored."""
    TIMEOUT = "timeout"
    """The wall-clock budget is used up. A slow machine looks the same as a slow model: never scored."""

    @property
    def scored(self) -> bool:
        """Whether the rollout gets a reward."""
        return self in _SCORED


_SCORED = frozenset({Outcome.COMPLETED, Outcome.MAX_TURNS, Outcome.CONTEXT_EXHAUSTED, Outcome.MODEL_ERROR})
