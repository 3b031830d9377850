"""Means of scores with their 95 % intervals.

Scores are `scores[i][j]`, sample j of item i; None is an invalid sample, which has no score. Items are the clusters:
samples of one item are not independent, so an interval is of the items' own means.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

Z95 = 1.959964

UNSEEN = 0.6
"""Items at an end of the range, besides those that were seen: a few items that were not may score as low or as high as
possible, also where all others score alike. With this weight the intervals of n passes and failures hold the mean in at
least 93.7 % at every n (by enumeration up to 500) and every chance of a pass; with 0.5, in 92.8 %."""

Scores = Sequence[Sequence[float | None]]
"""Items, and the samples of each."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over items, not samples (which are not independent), with its 95 % interval; nan where there is none."""

    mean: float
    low: float
    high: float
    items: int
    """Items that it is of."""

    def __str__(self) -> str:
        if not self.items:
            return "undefined"
        mean, low, high = map(shown, (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}], 95 % interval"


UNDEFINED = Mean(math.nan, math.nan, math.nan, 0)


def shown(value: float, sign: str = "") -> str:
    """A figure with three decimals, or as a power of ten where that would be a long number."""
    return f"{value:{sign}.{'3f' if abs(value) < 1e6 else '3e'}}"


def valid(samples: Sequence[float | None]) -> list[float]:
    """The scores of the samples that have one."""
    return [score for score in samples if score is not None]


def mean_of(values: Sequence[float]) -> float:
    """The mean of any finite values, whose sum may be too large for a float."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        largest = max(map(abs, values))
        return largest * (math.fsum(value / largest for value in values) / len(values))


def mean_over_items(scores: Scores) -> Mean:
    """Mean of the items' own means; an item without a valid sample is in none of it.

    The interval is that of `mean_of_values`. It does not depend on the order of the items.
    """
    found = [samples for each in scores if (samples := valid(each))]
    ends = score_range(score for samples in found for score in samples)
    return mean_of_values([mean_of(samples) for samples in found], *ends)


def score_range(scores: Iterable[float]) -> tuple[float, float]:
    """Between which values scores can be: 0 and 1, or -1 and 1 where one is negative.

    Where one is further out, it is not known how far out others can be: half of the range of those at hand further.
    """
    known = list(scores)
    low, high = min([0.0, *known]), max([1.0, *known])
    low = min(low, -1.0) if low < 0 else low
    half, most = high / 2 - low / 2, sys.float_info.max
    return max(-most, low - half) if low < -1 else low, min(most, high + half) if high > 1 else high


def mean_of_values(
    values: Sequence[float], low: float = 0.0, high: float = 1.0, *, unseen: float = UNSEEN, times: float = 1.0
) -> Mean:
    """The mean of independent values between `low` and `high`, and the limits of their empirical likelihood (Owen,
    Biometrika 1988): the lowest and the highest mean under weights that are not much less likely than equal ones.

    Further values, `unseen` of them, count for the lower limit as `low` and for the upper one as `high`, so that equal
    values have an interval too (compare Chen, Variyath and Abraham, Journal of Computational and Graphical Statistics
    2008).

    Args:
        times: how often each value counts, for the interval of an evaluation with that many times the items.
    """
    import numpy

    if not values:
        return UNDEFINED
    found, counts = numpy.unique(values, return_counts=True)
    width = high / 2 - low / 2  # half of it: the whole may be too large for a float
    below = _lowest_mean((found / 2 - low / 2) / width, times * counts, unseen)
    above = _lowest_mean((high / 2 - found / 2) / width, times * counts, unseen)
    mean = min(max(mean_of(values), float(found[0])), float(found[-1]))  # but for rounding it is between them
    ends = 2 * (low / 2 + width * below), 2 * (high / 2 - width * above)
    return Mean(mean, min(mean, ends[0]), max(mean, ends[1]), len(values))


def _lowest_mean(values: numpy.ndarray, counts: numpy.ndarray, unseen: float) -> float:
    """The lowest mean of values in 0..1, `counts` of each, with further ones at 0.

    The weights are 1 / (1 + tilt * value) of equal ones. Twice the logarithm of their likelihood ratio has to be the
    square of `Z95`; its root grows with the tilt, ever more slowly, so that each of Newton's steps stays below.
    """
    import numpy

    total = unseen + float(counts.sum())
    mean = float(counts @ values) / total
    variance = float(counts @ (values * values)) / total - mean * mean
    if variance <= 0:  # all are 0, or hardly more
        return 0.0
    tilt = Z95 / math.sqrt(total * variance)
    for _ in range(50):
        weights = 1 / (1 + tilt * values)
        likely = counts * weights
        sums, squares = unseen + float(likely.sum()), unseen + float(likely @ weights)
        root = math.sqrt(max(0.0, 2 * (total * math.log(sums / total) - float(counts @ numpy.log(weights)))))
        mean = (total / sums - 1) / tilt
        slope = total * squares / sums - sums
        step = (Z95 - root) * tilt * root / slope if slope > 0 else 0.0
        if abs(step) <= 1e-9 * tilt:
            break
        tilt += step
    return max(0.0, mean)
