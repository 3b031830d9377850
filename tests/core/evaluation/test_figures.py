"""pass@k, pass^k, bounds and sample sizes."""

from __future__ import annotations

from itertools import combinations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.figures.intervals import Scores, mean_over_items
from lachesis.figures.passes import bounds, ks, pass_at_k, pass_hat_k, samples_needed

BINARY = st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), max_size=6), min_size=1, max_size=8)


@given(BINARY, st.integers(1, 6))
def test_pass_at_k_is_the_share_of_choices_of_k_samples_that_hold_a_pass(scores: list[list[float]], k: int) -> None:
    """And pass^k the share of those that hold passes only: every choice is looked at."""
    valid = [[score for score in item if score is not None] for item in scores]
    choices = [list(combinations(item, k)) for item in valid if len(item) >= k]
    for figure, of in ((pass_at_k, any), (pass_hat_k, all)):
        mean = figure(scores, k)
        assert mean.items == len(choices)
        if choices:
            assert mean.mean == pytest.approx(
                sum(sum(map(of, chosen)) / len(chosen) for chosen in choices) / len(choices)
            )
            assert 0 <= mean.low <= mean.mean <= mean.high <= 1


def test_with_fewer_than_k_samples_it_is_undefined() -> None:
    assert str(pass_at_k([[1.0, None], [0.0]], 2)) == "undefined"
    assert pass_at_k([[1.0, None], [0.0, 1.0]], 2).items == 1
    with pytest.raises(ValueError, match="at least 1"):
        pass_at_k([[1.0]], 0)


def test_pass_at_1_of_binary_scores_is_their_mean_with_its_interval() -> None:
    scores: Scores = [[1.0, 0.0], [1.0, 1.0], [0.0, None], [1.0, 0.0], [0.0, 0.0]]
    assert pass_at_k(scores, 1) == pass_hat_k(scores, 1) == mean_over_items(scores)


def test_partial_credit_is_no_pass() -> None:
    assert pass_at_k([[0.9], [1.0], [1.2]], 1).mean == pytest.approx(2 / 3)
    assert pass_at_k([[0.9], [1.0], [1.2]], 1, threshold=0.5).mean == 1.0


def test_pass_at_k_is_unbiased_and_covered_with_lost_samples() -> None:
    random = numpy.random.default_rng(5)
    chances = [0.1, 0.3, 0.6, 0.95]
    expected = {pass_at_k: sum(1 - (1 - p) ** 4 for p in chances) / 4, pass_hat_k: sum(p**4 for p in chances) / 4}
    for figure, truth in expected.items():
        means, inside = [], 0
        for _ in range(500):
            passed = random.random((40, 8)) < random.choice(chances, 40)[:, None]
            lost = random.random((40, 8)) < 0.2
            mean = figure(
                [[None if b else float(a) for a, b in zip(*r, strict=True)] for r in zip(passed, lost, strict=True)], 4
            )
            means.append(mean.mean)
            inside += mean.low <= truth <= mean.high
        assert float(numpy.mean(means)) == pytest.approx(truth, abs=3.5 * float(numpy.std(means)) / 500**0.5)
        assert 0.92 <= inside / 500 <= 0.98


@given(BINARY, st.integers(1, 3), st.data())
def test_whatever_the_invalid_samples_would_have_scored_the_figure_is_within_the_bounds(
    scores: list[list[float | None]], k: int, data: st.DataObject
) -> None:
    filled = [[data.draw(st.sampled_from([0.0, 1.0])) if score is None else score for score in item] for item in scores]
    for figure in (mean_over_items, lambda of: pass_at_k(of, k), lambda of: pass_hat_k(of, k)):
        found = bounds(scores, figure)
        inside = [figure(filled)]
        if figure(scores).items == inside[0].items:  # otherwise items that are known in part are in one of them only
            inside.append(figure(scores))
        for mean in inside:
            assert not mean.items or found.worst - 1e-9 <= mean.mean <= found.best + 1e-9


def test_bounds_by_hand() -> None:
    found = bounds([[1.0, None], [None, None], [0.0, 1.0]])
    assert (found.worst, found.best) == (pytest.approx(1 / 3), pytest.approx(2.5 / 3))
    assert bounds([[1.0], [-0.5], [None]]).worst == pytest.approx(0.0), "a score of -0.5 is possible"
    assert bounds([[1.0]]).best == 1.0


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("chance", [0.5, 0.9, 0.99])
def test_that_many_more_samples_make_the_interval_that_short(chance: float, samples: int) -> None:
    random = numpy.random.default_rng(2)

    def play(items: int) -> Scores:
        chances = random.beta(2 * chance, 2 * (1 - chance), items)
        return (random.random((items, samples)) < chances[:, None]).astype(float).tolist()

    scores = play(400)
    more = samples_needed(scores, 0.01)
    assert more is not None
    assert more % samples == 0
    mean = mean_over_items([*scores, *play(more // samples)])
    assert (mean.high - mean.low) / 2 == pytest.approx(0.01, rel=0.15 if more else 1)


def test_sample_sizes_by_hand() -> None:
    even = [[1.0], [0.0]] * 50
    assert samples_needed(even, 0.01) == pytest.approx(9604 - 100, rel=0.01), "1.96² * 0.25 / 0.01²"
    graded = [[0.0], [0.5]] * 50
    assert samples_needed(graded, 0.01) == pytest.approx(9604 / 4 - 100, rel=0.05)
    assert samples_needed([[1e200], [0.0]]) is None, "no run could have that many"
    assert samples_needed(even, 0.2) == 0
    assert samples_needed([[1.0]]) is None
    assert samples_needed([[None, 1.0], [0.0, None]] * 50) == 2 * (samples_needed(even) or 0), "half of them are lost"


def test_the_ks_of_a_table() -> None:
    assert [ks(samples) for samples in (0, 1, 2, 6, 8)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
