"""Intervals of means: against values of scipy 1.17, by hand, and by simulation."""

from __future__ import annotations

import math
import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.evaluation import Scores, bounds, mean_over_items, paired, samples_needed
from lachesis.evaluation.intervals import Z95, t95, wilson


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (13, 14, 0.6853, 0.9873),
        (50, 1319, 0.0289, 0.0496),
    ],
)
def test_wilson(right: int, count: int, low: float, high: float) -> None:
    mean = mean_over_items([[1.0]] * right + [[0.0]] * (count - right))
    assert (mean.mean, mean.items) == (right / count, count)
    assert (mean.low, mean.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        *[(1, 12.70620474), (2, 4.30265273), (3, 3.18244631), (4, 2.77644511), (7, 2.36462425), (10, 2.22813885)],
        *[
            (29, 2.04522964),
            (30, 2.04227246),
            (98, 1.98446745),
            (99, 1.98421695),
            (100, 1.98397152),
            (1318, 1.96176551),
        ],
    ],
)
def test_the_quantile_of_t_is_that_of_scipy(freedom: int, quantile: float) -> None:
    assert t95(freedom) == pytest.approx(quantile, rel=1e-7)


def test_graded_scores_have_the_t_interval_of_the_items_means() -> None:
    """`scipy.stats.ttest_1samp([0.2, 0.75, 0.4, 1.5, -0.3], 0).confidence_interval()`"""
    mean = mean_over_items([[0.2], [0.5, 1.0], [None, 0.4], [1.5, 1.5, 1.5], [-0.3], [None, None], []])
    assert (mean.mean, mean.items) == (pytest.approx(0.51), 5)
    assert (mean.low, mean.high) == pytest.approx((-0.3233961, 1.3433961), abs=1e-6)


def test_attempts_at_one_item_count_as_one_item() -> None:
    assert mean_over_items([[1.0] * 8] * 5) == mean_over_items([[1.0]] * 5), "eight equal attempts prove nothing more"
    alike = mean_over_items([[1.0] * 4, [0.0] * 4] * 10)
    assert alike == mean_over_items([[1.0], [0.0]] * 10)


def test_attempts_that_differ_within_an_item_prove_more_than_one() -> None:
    """Clustered by hand: item means 0.5, 1, 0, 0.5 have the squares 1/2, where single samples have 4 / 4; their t has
    three degrees of freedom."""
    mean = mean_over_items([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    assert (mean.mean, mean.items) == (0.5, 4)
    assert (mean.low, mean.high) == pytest.approx(wilson(0.5, 4 * 1.03 / 0.53, 3.18244631))
    assert mean_over_items([[0.0, 1.0]] * 9).high == pytest.approx(wilson(0.5, 18, 2.30600414)[1]), "but no more"


def test_nothing_to_average_is_nan() -> None:
    assert math.isnan(mean_over_items([]).mean)
    assert str(mean_over_items([])) == "undefined"
    assert mean_over_items([[], [], [None]]).items == 0
    assert math.isnan(mean_over_items([[0.3]]).low), "one item has no spread"
    assert str(mean_over_items([[0.2]])) == "0.200", "and no interval to show"
    assert str(mean_over_items([[1.0]])).endswith("1.000], 95 % interval")


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
def test_wilson_stays_within_0_and_1_and_narrows_with_more_items(count: int, data: st.DataObject) -> None:
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
    assert 0.935 <= inside / SEEDS <= 0.97


@pytest.mark.parametrize(("items", "chances"), [(10, (1.8, 0.2)), (50, (1.96, 0.04))])
def test_few_items_that_hardly_ever_fail_do_not_make_an_interval_too_short(
    items: int, chances: tuple[float, float]
) -> None:
    """Their variance is hardly known: alone, it makes intervals that hold the mean in 88 to 91 %."""
    random = numpy.random.default_rng(1)
    runs = [mean_over_items(simulated(random, random.beta(*chances, items), 16, 0.2)) for _ in range(SEEDS)]
    assert sum(mean.low <= chances[0] / sum(chances) <= mean.high for mean in runs) / SEEDS >= 0.95


def test_counting_failures_of_the_infrastructure_as_0_would_be_biased() -> None:
    """The simulation can tell: the same runs with 0 for each invalid sample are off by a fifth."""
    random = numpy.random.default_rng(1)
    runs = [simulated(random, random.beta(0.5, 0.5, 50), 4, 0.2) for _ in range(200)]
    zeros = [mean_over_items([[score or 0.0 for score in item] for item in run]) for run in runs]
    assert float(numpy.mean([mean.mean for mean in zeros])) == pytest.approx(0.4, abs=0.01)
    assert sum(mean.low <= 0.5 <= mean.high for mean in zeros) < 150


def test_graded_scores_are_covered_too() -> None:
    random = numpy.random.default_rng(3)
    inside = 0
    for _ in range(SEEDS):
        levels = random.normal(0.3, 0.4, 20)
        mean = mean_over_items((levels[:, None] + random.normal(0, 0.2, (20, 3))).tolist())
        inside += mean.low <= 0.3 <= mean.high
    assert 0.94 <= inside / SEEDS <= 0.96
    assert t95(19) > Z95


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
    small = mean_over_items([[-1.0], [2.0], [4.0]])
    for scale in (1e200, 1e-200):
        large = mean_over_items([[-1.0 * scale], [2.0 * scale], [4.0 * scale]])
        assert large.low / scale == pytest.approx(small.low) and large.high / scale == pytest.approx(small.high)
