"""The sentences at the beginning of a training report, and whether their intervals hold what they name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lachesis.figures.intervals import mean_over_items
from lachesis_view.reports.verdict import _mean, verdict

STEPS, GROUPS, SAMPLES, RUNS = 4, 6, 4, 300


def steps_of_a_run(draw: random.Random) -> tuple[list[dict[str, Any]], float]:
    """Lines of a run whose items are solved with chances from 0 to 1, and the mean chance of the items it played."""
    lines, chances = [], []
    for step in range(STEPS):
        scores = []
        for _ in range(GROUPS):
            chances.append(chance := draw.betavariate(0.7, 0.7))
            scores.append([float(draw.random() < chance) for _ in range(SAMPLES)])
        found = mean_over_items(scores)
        ends = {"train/reward_low": found.low, "train/reward_high": found.high}
        lines.append({"step": step, "train/reward": found.mean, **ends})
    return lines, sum(chances) / len(chances)


def coverage(narrowed: Callable[[float, float], float]) -> float:
    """How often the interval holds the mean of the items that were played; `narrowed` moves its ends."""
    draw, held = random.Random(7), 0
    for _ in range(RUNS):
        lines, truth = steps_of_a_run(draw)
        mean, low, high = _mean(lines, "train/reward")
        held += narrowed(low, mean) <= truth <= narrowed(high, mean)
    return held / RUNS


def test_the_interval_over_several_steps_holds_the_mean_of_the_items_that_were_played() -> None:
    assert coverage(lambda end, mean: end) >= 0.95
    assert coverage(lambda end, mean: mean + (end - mean) / 4) < 0.9, "a narrow one would be noticed"


def test_the_first_sentence_compares_the_first_with_the_last_steps() -> None:
    def line(step: int, reward: float) -> dict[str, Any]:
        return {
            "step": step, "train/reward": reward, "train/reward_low": reward - 0.1, "train/reward_high": reward + 0.1
        }  # fmt: skip

    [said] = verdict([line(step, 0.2 + 0.06 * step) for step in range(10)], {})
    assert said == "Mean reward: 0.230 [0.159, 0.301] in the first 2 steps, 0.710 [0.639, 0.781] in the last 2 steps."
    [said] = verdict([line(1, 0.4), line(2, 0.5)], {})
    assert said.endswith("; the intervals overlap.") and "at step 1" in said
    assert verdict([{"step": 1}], {}) == []
