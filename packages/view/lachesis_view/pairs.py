"""Two runs over the same items, compared item by item."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lachesis.figures.intervals import Scores, mean_of, mean_of_values, score_range, shown, valid

EXACT_ITEMS = 14
"""Items with a difference up to which every assignment of signs is looked at."""
DRAWS = 9999
_AT_ONCE = 250
UNSEEN = 0.3
"""As in `intervals`. Less is enough, as most differences are near the middle of their range: of items that go from 0 to
1, from 1 to 0 or stay equal, the intervals hold the difference in at least 93 % where one in twenty stays equal, and in
90.7 % where none does (by enumeration at 4 to 50 items). With 0.2 it is 89.6 and 87.3 %."""
FEWEST = 6
"""Items with a difference from which on p can be below 0.05: of 32 assignments of signs to five, 2 are the
most extreme."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean over common items of (score in b - score in a), with its 95 % interval; nan where there is none."""

    mean: float
    low: float
    high: float
    p: float
    """Two-sided, of the null hypothesis that it makes no difference which of the runs is which."""
    items: int
    """Common items, with a valid sample in both runs."""
    better: int
    """Items of these at which b has the higher score."""
    worse: int

    def __str__(self) -> str:
        if not self.items:
            return "undefined: no common item"
        mean, low, high = (shown(value, "+") for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}], 95 % interval, p = {self.p:.2g}{self.caveat}"

    @property
    def caveat(self) -> str:
        """What a reader of p has to know where hardly an item differs, or where the interval says less than it."""
        if (differ := self.better + self.worse) < FEWEST:
            return f" (items that differ: {differ}; p cannot be below 0.05 with fewer than {FEWEST})"
        if self.p < 0.05 and self.low <= 0 <= self.high:
            return " (p is about these items; the interval also allows for items that were not played)"
        return ""


def paired(a: Scores, b: Scores, *, others: Iterable[float] = ()) -> Difference:
    """The difference of two runs; `a[i]` and `b[i]` are the samples of one item, or their mean alone where `others` has
    the lowest and the highest of them.

    The interval is that of `mean_of_values`, of the items' differences. p is that of a permutation test over the items,
    which changes the sign of each difference: exact with few differences, otherwise of random assignments that are
    seeded by the data.

    Raises:
        ValueError: the runs have different numbers of items.
    """
    pairs = [(one, other) for x, y in zip(a, b, strict=True) if (one := valid(x)) and (other := valid(y))]
    if not pairs:
        return Difference(math.nan, math.nan, math.nan, math.nan, 0, 0, 0)
    most = sys.float_info.max
    differences = [max(-most, min(most, mean_of(y) - mean_of(x))) for x, y in pairs]
    low, high = score_range([*others, *(score for pair in pairs for samples in pair for score in samples)])
    ends = min(most, high - low)
    found = mean_of_values(differences, -ends, ends, unseen=UNSEEN)
    better, worse = (sum(sign * value > 0 for value in differences) for sign in (1, -1))
    return Difference(found.mean, found.low, found.high, permutation_p(differences), len(pairs), better, worse)


def permutation_p(differences: Sequence[float]) -> float:
    """Two-sided p of a sum of differences, each of which could as well have the other sign."""
    import numpy

    values = numpy.array(sorted((value for value in differences if value), key=lambda value: (abs(value), value)))
    values /= max(1.0, abs(values).max(initial=0.0))  # their sum may be too large for a float
    observed = abs(math.fsum(values)) * (1 - 1e-9)  # sums that are equal but for rounding count as equal
    count = len(values)
    if count <= EXACT_ITEMS:
        signs = 1.0 - 2.0 * (numpy.arange(2**count)[:, None] >> numpy.arange(count) & 1)
        return float((abs(signs @ values) >= observed).mean())
    random = numpy.random.default_rng(zlib.crc32(values.tobytes()))
    as_far = 1
    for begin in range(0, DRAWS, _AT_ONCE):
        signs = 1.0 - 2.0 * random.integers(0, 2, (min(_AT_ONCE, DRAWS - begin), count), dtype=numpy.int8)
        as_far += int((abs(signs @ values) >= observed).sum())
    return as_far / (DRAWS + 1)
