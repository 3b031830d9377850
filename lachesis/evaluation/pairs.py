"""Two runs over the same items, compared item by item."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from lachesis.evaluation.intervals import Z95, Scores, is_binary, mean_of, mean_of_values, valid

EXACT_ITEMS = 14
"""Items with a difference up to which every assignment of signs is looked at."""
DRAWS = 9999
_AT_ONCE = 250


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
        interval = "" if math.isnan(self.low) else f" [{self.low:+.3f}, {self.high:+.3f}], 95 % interval"
        return f"{self.mean:+.3f}{interval}, p = {self.p:.2g}"


def paired(a: Scores, b: Scores) -> Difference:
    """The difference of two runs; `a[i]` and `b[i]` are the samples of one item.

    The interval is Student's t of the items' differences. Where every score is 0 or 1 it is Agresti and Min's
    (Statistics in Medicine 2005): of the differences with two further items, one that only a passed and one that only b
    passed, of as many samples as the others have. Without them, runs that agree on every item would have an interval
    without any width. p is that of a permutation test over the items, which changes the sign of each difference: exact
    with few differences, otherwise of random assignments that are seeded by the data.

    Raises:
        ValueError: the runs have different numbers of items.
    """
    pairs = [(one, other) for x, y in zip(a, b, strict=True) if (one := valid(x)) and (other := valid(y))]
    if not pairs:
        return Difference(math.nan, math.nan, math.nan, math.nan, 0, 0, 0)
    differences = [mean_of(y) - mean_of(x) for x, y in pairs]
    count = len(differences)
    mean = mean_of(differences)
    if is_binary([*a, *b]):
        samples = sum(len(x) + len(y) for x, y in pairs) / (2 * count)
        centre = math.fsum(differences) / (count + 2)
        square = (math.fsum(value * value for value in differences) + 1 / samples) / (count + 2)
        half = Z95 * math.sqrt(max(0.0, square - centre * centre) / (count + 2))
        low, high = max(-1.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
    else:
        found = mean_of_values(differences)
        low, high = found.low, found.high
    better, worse = (sum(sign * value > 0 for value in differences) for sign in (1, -1))
    return Difference(mean, low, high, permutation_p(differences), count, better, worse)


def permutation_p(differences: Sequence[float]) -> float:
    """Two-sided p of a sum of differences, each of which could as well have the other sign."""
    import numpy

    values = numpy.array(sorted((value for value in differences if value), key=lambda value: (abs(value), value)))
    if (largest := abs(values).max(initial=0.0)) > 1e100:
        values /= largest
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
