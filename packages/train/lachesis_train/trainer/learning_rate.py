"""The learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then constant, or down to `least` of it at the last step; down to 0 only after the last step,
    which would otherwise change nothing."""

    learning_rate: float
    steps: int
    """Of the whole run."""
    warmup: int = 0
    kind: Literal["constant", "linear", "cosine"] = "constant"
    least: float = 0.0

    def at(self, step: int) -> float:
        """The learning rate of step `step`, from 1."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        if self.kind == "constant":
            return self.learning_rate
        last = self.steps + (self.least == 0)
        done = min(1.0, (step - self.warmup) / max(1, last - self.warmup))
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.least + (1 - self.least) * left)
