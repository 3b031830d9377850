"""Means of scores with their 95 % intervals.

Scores are `scores[i][j]`, sample j of item i; None is an invalid sample, which has no score. Items are the clusters:
samples of one item are not independent, so an interval is of the items' own means.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964

_LARGE = 1e9
"""From here on a figure is shown with an exponent."""
DISAGREEMENT = 0.03
"""Squares that are added to those between the items, and to those between all samples. By simulation: without them an
interval of 10 to 50 items that nearly all pass each of 16 samples holds the mean in 88 to 91 %."""

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
        form = ".3f" if abs(self.mean) < _LARGE else ".4g"
        if math.isnan(self.low):  # one item, with a reward other than 0 and 1
            return format(self.mean, form)
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}], 95 % interval"


UNDEFINED = Mean(math.nan, math.nan, math.nan, 0)


def mean_of(values: Sequence[float]) -> float:
    """The mean of any finite values: their sum may be beyond the largest number."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def deviations(values: Sequence[float], mean: float) -> float:
    """The root of the sum of squared deviations, without squares that overflow or vanish."""
    return math.hypot(*(value - mean for value in values))


def valid(samples: Sequence[float | None]) -> list[float]:
    """The scores of the samples that have one."""
    return [score for score in samples if score is not None]


def is_binary(scores: Scores) -> bool:
    return all(score in (0.0, 1.0) for samples in scores for score in samples if score is not None)


def mean_over_items(scores: Scores) -> Mean:
    """Mean of the items' own means; an item without a valid sample is in none of it.

    Where every score is 0 or 1 the interval is Wilson's, otherwise it is Student's t of the items' means, which is the
    clustered standard error with the items as clusters. The sums do not depend on the order of the items.
    """
    found = [samples for each in scores if (samples := valid(each))]
    means = [mean_of(samples) for samples in found]
    return mean_of_items(means, samples=sum(map(len, found)), binary=is_binary(found))


def mean_of_items(means: Sequence[float], *, samples: int, binary: bool) -> Mean:
    """`mean_over_items` of the items' means. `samples`: their number in all; `binary`: each is 0 or 1."""
    if binary:
        return mean_of_shares(means, most=samples)
    return mean_of_values(means, bounded=all(0.0 <= value <= 1.0 for value in means))


def mean_of_values(values: Sequence[float], *, bounded: bool = False) -> Mean:
    """Student's t interval of independent values; `bounded`: they are in 0..1, and so is their mean."""
    count = len(values)
    if not count:
        return UNDEFINED
    mean = mean_of(values)
    if count == 1:
        return Mean(mean, math.nan, math.nan, 1)
    half = t95(count - 1) * deviations(values, mean) / math.sqrt((count - 1) * count)
    low, high = mean - half, mean + half
    return Mean(mean, max(0.0, low), min(1.0, high), count) if bounded else Mean(mean, low, high, count)


def mean_of_shares(shares: Sequence[float], *, most: int) -> Mean:
    """Wilson's interval of independent shares in 0..1, `most` being the observations in all of them.

    Its number of observations is `effective_count`. Near 0 and 1 a t interval is far too short.
    """
    count = len(shares)
    if not count:
        return UNDEFINED
    mean = min(1.0, math.fsum(shares) / count)
    # The spread of shares between 0 and 1 is estimated, as in a t interval.
    estimated = any(share not in (0.0, 1.0) for share in shares) and count > 1
    quantile = t95(count - 1) if estimated else Z95
    return Mean(mean, *wilson(mean, effective_count(shares, mean, most), quantile), count)


def effective_count(shares: Sequence[float], mean: float, most: int) -> float:
    """Observations that prove as much as these shares: mean * (1 - mean) / variance of the mean (Franco et al., Journal
    of Survey Statistics and Methodology 2019).

    That is the number of items where each share is 0 or 1, and up to `most` where the samples of an item tell no more
    about each other than about other items. Where hardly an item differs from the others the variance is hardly known:
    `DISAGREEMENT` keeps it from being too small.
    """
    spread = len(shares) * mean * (1 - mean)
    return min(float(most), len(shares) * (spread + DISAGREEMENT) / (_squares(shares, mean) + DISAGREEMENT))


def wilson(share: float, count: float, quantile: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share of `count` observations."""
    squared = quantile * quantile
    centre = (share + squared / (2 * count)) / (1 + squared / count)
    half = quantile / (1 + squared / count) * math.sqrt(share * (1 - share) / count + squared / (4 * count * count))
    # At a share of 0 or 1 the interval ends there exactly, but for rounding.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


@functools.cache
def t95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with so many degrees of freedom, to six digits.

    The distribution is the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4; from 100 degrees of freedom on,
    the quantile is their expansion 26.7.5.
    """
    if freedom >= 100:
        z = Z95
        return (
            z
            + (z**3 + z) / (4 * freedom)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        )
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < 0.95 else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _t_within(angle: float, freedom: int) -> float:
    """The probability that |t| is below tan(angle) * sqrt(freedom)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for number in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (number + 1) / (number + 2)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def _squares(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values)
