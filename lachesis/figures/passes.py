"""pass@k and pass^k, what invalid samples could change, and how many samples a shorter interval takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lachesis.figures.intervals import (
    Mean,
    Scores,
    mean_of,
    mean_of_values,
    mean_over_items,
    score_range,
    valid,
)

PASS = 1.0
"""The score from which on a sample passes."""
MOST_ITEMS = 10**9


def pass_at_k(scores: Scores, k: int, *, threshold: float = PASS) -> Mean:
    """The probability that at least one of k samples of an item passes, as a mean over the items.

    Of an item with n valid samples, c of which pass, it is 1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al.,
    2021, arXiv:2107.03374). Items with n < k are in none of it; without any other, it is undefined (`items` is 0).
    """
    return _over_passes(scores, k, threshold, lambda n, c: 1 - math.comb(n - c, k) / math.comb(n, k))


def pass_hat_k(scores: Scores, k: int, *, threshold: float = PASS) -> Mean:
    """pass^k, the probability that all of k samples of an item pass: C(c, k) / C(n, k) (Yao et al., 2024,
    arXiv:2406.12045), with the items of `pass_at_k`."""
    return _over_passes(scores, k, threshold, lambda n, c: math.comb(c, k) / math.comb(n, k))


def _over_passes(scores: Scores, k: int, threshold: float, share: Callable[[int, int], float]) -> Mean:
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    counts = [(len(samples), sum(score >= threshold for score in samples)) for samples in map(valid, scores)]
    known = [(n, passed) for n, passed in counts if n >= k]
    return mean_of_values([share(n, passed) for n, passed in known])


def ks(samples: int) -> list[int]:
    """The k of which figures are shown for so many samples an item: powers of two, and the number itself."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples} - {0})


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between which values a figure would be if every invalid sample had a score."""

    worst: float
    best: float


def bounds(
    scores: Scores, figure: Callable[[Scores], Mean] = mean_over_items, *, lowest: float = 0.0, highest: float = 1.0
) -> Bounds:
    """`figure` with the lowest score for every invalid sample, and with the highest one.

    Args:
        lowest, highest: possible scores. A score beyond them that was given moves them.
    """
    known = [score for samples in scores for score in valid(samples)]
    ends = min([lowest, *known]), max([highest, *known])
    worst, best = (
        figure([[end if score is None else score for score in samples] for samples in scores]).mean for end in ends
    )
    return Bounds(worst, best)


def samples_needed(scores: Scores, half_width: float = 0.01) -> int | None:
    """Further samples, at new items with as many samples each, until the interval of the mean is about +- `half_width`.

    0 where it is that short already; None where fewer than two items have a score, or no run could have that many.
    """
    found = [samples for each in scores if (samples := valid(each))]
    items = len(found)
    if items < 2:
        return None
    means, ends = [mean_of(samples) for samples in found], score_range(score for each in found for score in each)

    def short(count: int) -> bool:
        mean = mean_of_values(means, *ends, times=count / items)
        return mean.high / 2 - mean.low / 2 <= half_width

    if short(items):
        return 0
    low, high = items, 2 * items
    while not short(high):
        low, high = high, 2 * high
        if high > MOST_ITEMS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if short(middle) else (middle, high)
    a_item = sum(map(len, scores)) / items  # with the invalid ones, which will come again
    return math.ceil((high - items) * a_item)
