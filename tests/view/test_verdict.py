"""The sentences at the beginning of a training report, and whether their intervals hold what they name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lachesis.figures.intervals import mean_over_items
from lachesis_view.reports.verdict import between, difference, mean_of_steps, troubles, verdict

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
        mean, low, high = mean_of_steps(lines, "train/reward")
        held += narrowed(low, mean) <= truth <= narrowed(high, mean)
    return held / RUNS


def test_the_interval_over_several_steps_holds_the_mean_of_the_items_that_were_played() -> None:
    assert coverage(lambda end, mean: end) >= 0.95
    assert coverage(lambda end, mean: mean + (end - mean) / 4) < 0.9, "a narrow one would be noticed"


def test_the_interval_of_the_difference_holds_that_of_the_items_that_were_played() -> None:
    draw, held, narrow = random.Random(11), 0, 0
    for _ in range(RUNS):
        (a, before), (b, after) = steps_of_a_run(draw), steps_of_a_run(draw)
        mean, low, high = difference(mean_of_steps(a, "train/reward"), mean_of_steps(b, "train/reward"))
        held += low <= after - before <= high
        narrow += (low - mean) / 4 <= after - before - mean <= (high - mean) / 4
    assert held / RUNS >= 0.95 and narrow / RUNS < 0.9


def test_figures_that_say_trouble_are_named_with_their_steps_and_what_to_change() -> None:
    good = {
        "train/sampling/effective_sample_size": 0.9, "train/sampling/kl_k3": 0.001, "train/frac_reward_zero_std": 0.5,
        "train/completions/clipped_ratio": 0.1, "train/staleness/mean": 1.0,
        "train/outcome/completed": 3, "train/outcome/model_error": 1, "repaired_calls": [[1, 9], [0, 11]],
    }  # fmt: skip
    bad = {
        "train/sampling/effective_sample_size": 0.1, "train/sampling/kl_k3": 0.5, "train/frac_reward_zero_std": 0.75,
        "train/completions/clipped_ratio": 0.6, "train/staleness/mean": 5.0,
        "train/outcome/completed": 2, "train/outcome/model_error": 1, "repaired_calls": [[3, 9], [2, 11]],
    }  # fmt: skip
    assert troubles([]) == troubles([{"step": at, **good} for at in range(10)]) == []
    assert troubles([{"step": at, **(bad if at < 2 else good)} for at in range(10)]) == [], "two may be chance"
    calls: list[dict[str, Any]] = [{"step": at, "repaired_calls": [[0, 4]]} for at in range(5)]
    assert troubles([*calls, {"step": 5, "repaired_calls": [[1, 4]]}]) == [], "one of few calls may be chance"
    assert troubles([*calls, {"step": 5, "repaired_calls": [[3, 4]]}])[0].startswith(
        "In step 5, the parser repaired 75%"
    )
    said = troubles([{"step": at, **(bad if at > 6 else good)} for at in range(10)])
    assert said.pop().startswith("In the last 2 steps, the parser repaired 25% of the tool calls, and 8% before: ")
    assert len(said) == 6 and all(each.startswith("In 3 of 10 steps, 7 to 9, ") for each in said)
    assert "more than a quarter of the rollouts ended in a model error: " in said[4]
    assert "env.max_token_length" in said[3] and troubles([{"step": 4, **bad}])[0].startswith("In step 4, ")


def test_the_first_sentence_compares_the_first_with_the_last_steps() -> None:
    def line(step: int, reward: float) -> dict[str, Any]:
        return {
            "step": step, "train/reward": reward, "train/reward_low": reward - 0.1, "train/reward_high": reward + 0.1
        }  # fmt: skip

    [said] = verdict([line(step, 0.2 + 0.06 * step) for step in range(10)], {})
    assert (
        said
        == "Mean reward: 0.230 [0.159, 0.301] in the first 2 steps, 0.710 [0.639, 0.781] in the last 2 steps"
        + ("; the difference is +0.480 [+0.380, +0.580].")
    )
    [said] = verdict([line(1, 0.4), line(2, 0.5)], {})
    assert said.endswith("; the difference is +0.100 [-0.041, +0.241], which includes 0.") and "at step 1" in said
    assert verdict([{"step": 1}], {}) == []
    two = {"a": [line(step, 0.2 + 0.06 * step) for step in range(10)], "b": [line(1, 0.4), line(2, 0.5)]}
    assert (
        between(two)
        == "Mean reward: 0.710 [0.639, 0.781] in the last 2 steps of a, 0.500 [0.400, 0.600] at step 2 of b"
        "; the difference is -0.210 [-0.332, -0.088]."
    )
    assert between({**two, "b": [{"step": 1, "train/loss": 2.0}]}) == between({**two, "b": []}) == ""
