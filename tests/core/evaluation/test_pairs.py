"""Paired comparison of two runs: against scipy 1.17, by enumeration and by simulation."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_view.pairs import EXACT_ITEMS, paired, permutation_p


def test_the_permutation_test_is_that_of_scipy() -> None:
    """`scipy.stats.permutation_test((d,), sum, permutation_type="samples", n_resamples=inf)`"""
    assert permutation_p([0.5, 0.25, -0.25, 0.75, 0.0, 0.5, -0.5, 1.0]) == 0.21875


def test_random_assignments_agree_with_scipy() -> None:
    """The same with 400,000 random assignments; ours are 9,999."""
    differences = numpy.random.default_rng(7).normal(0.15, 0.5, 40).round(3).tolist()
    assert permutation_p(differences) == pytest.approx(0.4690, abs=0.02)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), max_size=7), st.randoms())
def test_few_differences_are_enumerated(differences: list[float], order: random.Random) -> None:
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    observed = abs(sum(differences)) - 1e-9
    assert permutation_p(differences) == pytest.approx(sum(each >= observed for each in sums) / len(sums))
    assert permutation_p(order.sample(differences, len(differences))) == permutation_p(differences)


def test_both_ways_to_compute_p_agree() -> None:
    differences = numpy.random.default_rng(1).normal(0.4, 1.0, EXACT_ITEMS).tolist()
    exact = permutation_p(differences)
    assert permutation_p([*differences, 1e-12]) == pytest.approx(exact, abs=4 * math.sqrt(exact / 9999))


def test_a_difference_is_of_the_items_that_both_runs_have() -> None:
    a = [[0.0], [0.0, 0.25], [None], [0.5, 0.1], [-1.0], [0.3], [0.5]]
    b = [[0.2], [0.875], [1.0], [0.7], [0.5], [0.0, None], [None]]
    found = paired(a, b)
    assert (found.items, found.better, found.worse) == (5, 4, 1)
    assert found.mean == pytest.approx(0.51)
    assert -1 < found.low < 0 < found.mean < found.high < 2


def test_equal_differences_are_no_certainty() -> None:
    """A difference of -1 at one further item in twenty is possible."""
    found = paired([[0.4]] * 20, [[0.5]] * 20)
    assert found.low < 0.1 - 1 / 20 < 0.1 + 1 / 20 < found.high
    few = paired([[0.4]] * 10, [[0.5]] * 10)
    assert few.low < 0 and few.p < 0.05 and "the interval also allows for items that were not played" in str(few)
    many = paired([[0.4]] * 200, [[0.5]] * 200)
    assert many.low > 0.08 and "not played" not in str(many)


def test_with_fewer_than_6_items_that_differ_the_comparison_says_that_p_says_nothing() -> None:
    for differ in range(8):
        found = paired([[0.0]] * 20, [[1.0]] * differ + [[0.0]] * (20 - differ))
        assert (found.p < 0.05) == (differ >= 6)
        assert ("p cannot be below 0.05 with fewer than 6" in str(found)) == (differ < 6)
        assert (f"items that differ: {differ};" in str(found)) == (differ < 6)


def test_any_finite_scores_can_be_compared() -> None:
    found = paired([[1.7e308], [1e200]] * 4, [[-1.7e308], [0.0]] * 4)
    assert math.isfinite(found.low) and math.isfinite(found.high)
    assert found.low < found.mean < found.high
    assert found.p == 2 / 2**4, "by the four that differ by more than is lost in rounding"


def test_runs_that_agree_on_every_item_are_not_known_to_be_the_same() -> None:
    found = paired([[1.0], [0.0], [1.0]] * 4, [[1.0], [0.0], [1.0]] * 4)
    assert (found.mean, found.p) == (0.0, 1.0)
    assert found.low == -found.high
    assert 0.1 < found.high < 0.3


def test_without_a_common_item_there_is_no_difference() -> None:
    assert str(paired([[None], [1.0]], [[1.0], [None]])) == "undefined: no common item"
    with pytest.raises(ValueError, match="shorter"):
        paired([[1.0]], [])


def test_one_run_against_the_other_is_the_opposite() -> None:
    a, b = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
    there, back = paired(a, b), paired(b, a)
    assert (there.mean, there.low, there.high, there.p) == pytest.approx((-back.mean, -back.high, -back.low, back.p))
    assert (there.better, there.worse) == (back.worse, back.better)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("effect", [0.0, 0.2])
def test_the_interval_holds_the_difference_and_p_keeps_its_level(samples: int, effect: float) -> None:
    """Two runs over the same hard and easy items, with a fifth of the samples lost."""
    random = numpy.random.default_rng(4)
    inside = small = 0
    runs = 200
    for _ in range(runs):
        chances = random.beta(1, 1, 80) * 0.8
        passed = [random.random((80, samples)) < each[:, None] for each in (chances, chances + effect)]
        a, b = (numpy.where(random.random(of.shape) < 0.2, None, of.astype(float)).tolist() for of in passed)
        found = paired(a, b)
        inside += found.low <= effect <= found.high
        small += found.p <= 0.05
    assert inside / runs >= 0.93
    assert small / runs > 0.25 if effect else small / runs <= 0.08


@pytest.mark.parametrize("items", [4, 5, 6, 8, 10, 12, 15, 20])
def test_the_interval_holds_the_difference_whatever_share_of_the_items_is_better_or_worse(items: int) -> None:
    """Enumerated: how many items go from 0 to 1 and from 1 to 0, where up to 95 % do either."""
    ends, ways, counts = [], [], []
    for up in range(items + 1):
        for down in range(items + 1 - up):
            equal = items - up - down
            before, after = [[0.0]] * up + [[1.0]] * down, [[1.0]] * up + [[0.0]] * down
            found = paired(before + [[0.0]] * equal, after + [[0.0]] * equal)
            ends.append((found.low - 1e-9, found.high + 1e-9))
            ways.append(math.comb(items, up) * math.comb(items - up, down))
            counts.append((up, down, equal))
    low, high = numpy.array(ends).T
    each, (ups, downs, equals) = numpy.array(ways, dtype=float), numpy.array(counts).T
    for differ, of_them in product((0.3, 0.5, 0.8, 0.9, 0.95), numpy.arange(0.0, 1.001, 0.01)):
        better, worse = differ * of_them, differ * (1 - of_them)
        likely = each * better**ups * worse**downs * (1 - differ) ** equals
        inside = likely[(low <= better - worse) & (better - worse <= high)].sum()
        assert inside >= 0.93, (better, worse)
