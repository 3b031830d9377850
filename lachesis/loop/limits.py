"""Budgets of a rollout."""

from __future__ import annotations

from dataclasses import dataclass


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
