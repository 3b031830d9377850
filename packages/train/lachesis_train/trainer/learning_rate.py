"""The learning rate of each step."""

from __future__ import annotations

import math

from lachesis_train.trainer.settings import TrainingSettings


def learning_rate(training: TrainingSettings, step: int, steps: int, rate: float | None = None) -> float:
    """That of step `step`, from 1, in a run of `steps`. `rate`: instead of that of the settings.

    Linear warm-up, then constant, or down to a share of it at the last step; down to 0 only after the last step, which
    would otherwise change nothing.
    """
    most = training.learning_rate if rate is None else rate
    warmup, least = training.warmup_steps, training.min_learning_rate_ratio
    if step <= warmup:
        return most * step / warmup
    if training.learning_rate_schedule == "constant":
        return most
    last = steps + (least == 0)
    done = min(1.0, (step - warmup) / max(1, last - warmup))
    left = 1 - done if training.learning_rate_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return most * (least + (1 - least) * left)
