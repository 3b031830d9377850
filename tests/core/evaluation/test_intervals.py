"""Intervals of means: against the equations of empirical likelihood, by hand, by enumeration and by simulation."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.interval_coverage import coverage, distributions
from lachesis.figures.intervals import UNSEEN, Z95, Scores, mean_of_values, mean_over_items, score_range
from lachesis.figures.passes import bounds, samples_needed
from lachesis_view.pairs import paired


def distance(values: list[float], mean: float, end: float) -> float:
    """The root of the statistic of empirical likelihood of a mean, from its own equation (Owen 2001, 2.2): the sum of
    (value - mean) / (1 + tilt * (value - mean)) is 0."""
    weighted = [(value - mean, 1.0) for value in values] + [(end - mean, UNSEEN)]
    low, high = (-1 / max(d for d, _ in weighted), -1 / min(d for d, _ in weighted))
    for _ in range(200):
        tilt = (low + high) / 2
        above = sum(count * d / (1 + tilt * d) for d, count in weighted) > 0
        low, high = (tilt, high) if above else (low, tilt)
    return math.sqrt(2 * sum(count * math.log(1 + tilt * d) for d, count in weighted))


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=30))
def test_a_limit_is_where_the_empirical_likelihood_with_unseen_items_says(values: list[float]) -> None:
    found = mean_of_values(values)
    if found.low < min(found.mean, max(values)):
        assert distance(values, found.low, 0.0) == pytest.approx(Z95, abs=1e-4)
    if found.high > max(found.mean, min(values)):
        assert distance(values, found.high, 1.0) == pytest.approx(Z95, abs=1e-4)


def test_by_hand() -> None:
    """No pass in 20 items: log((1 - u) * 20.6 / 20) * 20 + log(u * 20.6 / 0.6) * 0.6 is -1.92073 at u = 0.16233."""
    none = mean_over_items([[0.0]] * 20)
    assert (none.mean, none.low, none.items) == (0.0, 0.0, 20)
    u = none.high
    assert u == pytest.approx(0.16233, abs=1e-5)
    assert 20 * math.log((1 - u) * 20.6 / 20) + 0.6 * math.log(u * 20.6 / 0.6) == pytest.approx(-(Z95**2) / 2)
    passed = mean_over_items([[1.0]] * 20)
    assert (passed.low, passed.high) == (pytest.approx(1 - u), 1.0)


@pytest.mark.parametrize("value", [0.0, 0.001, 0.4, 1.0, -1.0, 2.0, 1e-300, 1e200, -1.7e308])
@pytest.mark.parametrize("items", [1, 4, 20, 1000])
def test_equal_scores_are_no_certainty(value: float, items: int) -> None:
    mean = mean_over_items([[value]] * items)
    assert mean.mean == value
    assert mean.low <= value <= mean.high
    assert mean.high / 2 - mean.low / 2 > max(1.0, abs(value)) / items / 3
    assert math.isfinite(mean.low) and math.isfinite(mean.high)


def test_the_range_of_scores() -> None:
    assert score_range([0.2, 1.0]) == score_range([]) == (0.0, 1.0)
    assert score_range([-0.2, 0.3]) == (-1.0, 1.0), "scores of -1 and 1 are usual"
    assert score_range([3.0, 0.5]) == (0.0, 4.5), "4 may come, and 5: half of the range further"
    assert score_range([-3.0, 1.0]) == (-5.0, 1.0)
    most = 1.7e308
    assert all(map(math.isfinite, score_range([-most, most])))


def test_any_finite_scores_have_a_mean_and_an_interval() -> None:
    for values in (
        [1e200, 0.0],
        [1.7e308, 1.7e308, -1.7e308],
        [5e-324, 0.0],
        [1e200, -1e-200, 3.0],
        [sys.float_info.max] * 3,
    ):
        mean = mean_over_items([values, *([value] for value in values)])
        assert min(values) <= mean.mean <= max(values)
        assert -math.inf < mean.low < mean.high < math.inf
        assert bounds([*([value] for value in values), [None]]).best >= mean.mean
    assert str(mean_over_items([[1e200]])).startswith("1.000e+200 ["), "no line of 200 digits"


def test_attempts_at_one_item_count_as_one_item() -> None:
    assert mean_over_items([[1.0] * 8] * 5) == mean_over_items([[1.0]] * 5), "eight equal attempts prove nothing more"
    alike = mean_over_items([[1.0] * 4, [0.0] * 4] * 10)
    assert alike == mean_over_items([[1.0], [0.0]] * 10)
    apart = mean_over_items([[1.0, 0.0]] * 20)
    assert apart.mean == alike.mean
    assert apart.high - apart.low < (alike.high - alike.low) / 2, "attempts that differ prove more than one"


def test_nothing_to_average_is_nan() -> None:
    assert math.isnan(mean_over_items([]).mean)
    assert str(mean_over_items([])) == "undefined"
    assert mean_over_items([[], [], [None]]).items == 0
    assert str(mean_over_items([[0.2]])) == "0.200 [0.011, 0.958], 95 % interval", "one item proves little"


REWARDS = st.none() | st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0])


@given(st.lists(st.lists(REWARDS, max_size=4), max_size=20), st.randoms())
def test_the_mean_lies_in_its_interval_and_items_weigh_the_same(
    values: list[list[float | None]], order: random.Random
) -> None:
    mean = mean_over_items(values)
    found = [[score for score in attempts if score is not None] for attempts in values]
    means = [sum(attempts) / len(attempts) for attempts in found if attempts]
    assert mean.items == len(means)
    if means:
        assert mean.mean == pytest.approx(sum(means) / len(means))
    if not math.isnan(mean.low):
        assert mean.low <= mean.mean + 1e-9
        assert mean.mean <= mean.high + 1e-9
    assert mean_over_items([attempts * 2 for attempts in values]).items == mean.items
    shuffled = order.sample(values, len(values))
    assert repr(mean_over_items(shuffled)) == repr(mean), "to the last digit, so that a resumed run shows the same"


@given(st.integers(1, 200), st.data())
def test_intervals_of_shares_stay_within_0_and_1_and_narrows_with_more_items(count: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, count))
    few = mean_over_items([[1.0]] * right + [[0.0]] * (count - right))
    many = mean_over_items([[1.0]] * (right * 10) + [[0.0]] * ((count - right) * 10))
    assert 0.0 <= few.low <= few.mean <= few.high <= 1.0
    assert few.high - few.low > many.high - many.low > 0


SEEDS = 1000


def simulated(random: numpy.random.Generator, chances: numpy.ndarray, samples: int, lost: float) -> Scores:
    """An evaluation in which the infrastructure loses a share of the samples."""
    passed = random.random((len(chances), samples)) < chances[:, None]
    broken = random.random(passed.shape) < lost
    found: Scores = numpy.where(broken, None, passed.astype(float)).tolist()
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("chances", [(0.5, 0.5), (9, 1), (0.3, 0.7), (19, 1)], ids=str)
def test_with_20_percent_infrastructure_failures_the_mean_is_unbiased_and_95_percent_of_intervals_hold_it(
    chances: tuple[float, float], samples: int
) -> None:
    """The chance of a pass differs between items by a beta distribution, whose mean is what is to be estimated."""
    expected = chances[0] / sum(chances)
    random = numpy.random.default_rng(1)
    means, inside = [], 0
    for _ in range(SEEDS):
        mean = mean_over_items(simulated(random, random.beta(*chances, 50), samples, 0.2))
        means.append(mean.mean)
        inside += mean.low <= expected <= mean.high
    error = float(numpy.std(means)) / math.sqrt(SEEDS)
    assert abs(float(numpy.mean(means)) - expected) < 3.5 * error
    assert 0.935 <= inside / SEEDS <= 0.99


@pytest.mark.parametrize("items", [5, 20])
@pytest.mark.parametrize(
    ("draw", "truth"), [pytest.param(draw, truth, id=name) for name, draw, truth in distributions()][::3]
)
def test_intervals_hold_the_mean_of_all_items_in_at_least_93_percent(draw: Any, truth: float, items: int) -> None:
    """With three standard errors of the simulation; the benchmark has all distributions, and more seeds."""
    assert coverage(draw, truth, items, 300)[0] >= 0.93 - 3 * math.sqrt(0.07 * 0.93 / 300)


def test_no_chance_of_a_pass_is_held_in_less_than_93_percent() -> None:
    """Exact, not simulated: chances at the limits themselves are the worst."""
    for items in (2, 5, 8, 10, 20, 36, 50):
        found = [mean_of_values([1.0] * passed + [0.0] * (items - passed)) for passed in range(items + 1)]
        for chance in (end + step for mean in found for end in (mean.low, mean.high) for step in (-1e-9, 1e-9)):
            if 0 < chance < 1:
                held = sum(
                    math.comb(items, passed) * chance**passed * (1 - chance) ** (items - passed)
                    for passed, mean in enumerate(found)
                    if mean.low <= chance <= mean.high
                )
                assert held >= 0.937, (items, chance)


def test_counting_failures_of_the_infrastructure_as_0_would_be_biased() -> None:
    """The simulation can tell: the same runs with 0 for each invalid sample are off by a fifth."""
    random = numpy.random.default_rng(1)
    runs = [simulated(random, random.beta(0.5, 0.5, 50), 4, 0.2) for _ in range(200)]
    zeros = [mean_over_items([[score or 0.0 for score in item] for item in run]) for run in runs]
    assert float(numpy.mean([mean.mean for mean in zeros])) == pytest.approx(0.4, abs=0.01)
    assert sum(mean.low <= 0.5 <= mean.high for mean in zeros) < 150


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.lists(st.none() | FINITE, max_size=4), max_size=6))
def test_any_finite_score_has_a_mean_within_its_interval(scores: Scores) -> None:
    found = mean_over_items(scores)
    known = [score for samples in scores for score in samples if score is not None]
    if known:
        assert min(known) - 1e-9 * abs(min(known)) <= found.mean <= max(known) + 1e-9 * abs(max(known))
    assert found.items < 2 or found.low <= found.mean <= found.high
    assert len(str(found)) < 120
    worst, best = (bounds(scores).worst, bounds(scores).best) if known else (0.0, 0.0)
    assert worst <= best
    needed = samples_needed(scores)
    assert needed is None or needed >= 0


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=8))
def test_runs_with_any_finite_scores_can_be_compared(pairs: list[tuple[float, float]]) -> None:
    difference = paired([[one] for one, _ in pairs], [[other] for _, other in pairs])
    assert difference.items == len(pairs) and 0 <= difference.p <= 1


def test_large_scores_keep_the_width_that_small_ones_have() -> None:
    small, large = (mean_over_items([[-2.0 * scale], [2.0 * scale], [4.0 * scale]]) for scale in (1.0, 1e200))
    assert large.low / 1e200 == pytest.approx(small.low) and large.high / 1e200 == pytest.approx(small.high)
