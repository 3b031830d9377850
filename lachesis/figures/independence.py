"""Tests of whether rollouts without a score are a biased selection: of their independence of other things.

Leaving a rollout out is harmless only if it is unrelated to its item and to the model's behaviour. Two null
hypotheses, given how many rollouts each item has and how many of all were left out:

* item: every choice of those that were left out is equally likely. The statistic is Pearson's chi-square over the
  items. With a few rollouts an item it does not have the chi-square distribution: p is that of random choices (a
  permutation test, which stops early as in Besag and Clifford, Biometrika 1991), seeded by the data.
* a quantity (turns, tool calls, completion tokens, seconds): among the rollouts of one item, being left out is
  independent of it. The statistic is van Elteren's, the Wilcoxon rank sums of the items, with the variance of ties
  (Lehmann, Nonparametrics, 3.3). Items of a single rollout are compared with one another.

The p of all tests are adjusted for their number (Holm). Rollouts that a failing model server ended are in no test: an
outage takes the groups of a moment with it and cuts rollouts short, whatever the model did.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Numbers = NDArray[numpy.float64]
Places = NDArray[numpy.int64]

ALARM_P = 0.01
"""An alarm needs an adjusted p below this: at most so many of the runs without a dependence have one."""
LEAST_COUNT = 8
"""Rollouts that were left out, and rollouts that were scored, below which nothing is tested."""
LEAST_CORRELATION = 0.05
"""Between two rollouts of an item, for an alarm."""
LEAST_SHIFT = 0.1
"""For an alarm, of the share of pairs in which the rollout that was left out has more of a quantity, from one half."""
MAX_DRAWS = 1999
_ENOUGH_DRAWS = 20
"""Random choices as uneven as the real one after which p is known well enough."""


@dataclass(frozen=True, slots=True)
class Independence:
    """The result of one test."""

    of: str
    """`item`, or one of `QUANTITIES`."""
    p: float
    adjusted: float
    """For the number of tests."""
    effect: float
    """Of the item: the correlation between two of its rollouts. Of a quantity: the share of pairs of a rollout that was
    left out and a scored one of the same item in which the first has more (equal ones count half)."""

    @property
    def alarms(self) -> bool:
        strength = self.effect - LEAST_CORRELATION if self.of == "item" else abs(self.effect - 0.5) - LEAST_SHIFT
        return self.adjusted < ALARM_P and strength >= 0

    def __str__(self) -> str:
        p = f"p = {self.adjusted:.2g}"
        if self.of == "item":
            return f"the item ({p}, correlation {self.effect:.2f})"
        more = max(self.effect, 1 - self.effect)
        return f"{self.of} ({p}, {'higher' if self.effect > 0.5 else 'lower'} in {100 * more:.0f} % of pairs)"


def tests_of(rows: array[float], quantities: Sequence[str]) -> list[Independence]:
    """The tests of the item and of each quantity, where there is enough to compare.

    Args:
        rows: of each rollout: the number of its item, whether it has no score, whether the model was asked (the
            quantities of the others say nothing), and its quantities.
    """
    columns = numpy.array(rows).reshape(-1, 3 + len(quantities)).T
    of_item, left_out, asked = columns[0].astype(int), columns[1].astype(int), columns[2] > 0
    if min(left_out.sum(), len(left_out) - left_out.sum()) < LEAST_COUNT:
        return []
    found = {"item": _item_test(of_item, left_out)}
    strata = _with_single_ones_together(of_item)[asked]
    for name, values in zip(quantities, columns[3:], strict=True):
        found[name] = _quantity_test(strata, left_out[asked], values[asked])
    return _adjusted({name: test for name, test in found.items() if test is not None})


def _item_test(of_item: Places, left_out: Places) -> tuple[float, float] | None:
    """p and the correlation within items; None where no item has two rollouts."""
    sizes = numpy.bincount(of_item)
    marked = numpy.bincount(of_item, weights=left_out).astype(numpy.int64)[sizes > 0]
    sizes = sizes[sizes > 0]
    total, count = int(sizes.sum()), int(marked.sum())
    pairs = int((sizes * (sizes - 1)).sum())
    if not pairs or len(sizes) < 2:
        return None
    share = count / total
    both = float((marked * (marked - 1)).sum()) / pairs
    correlation = (both - count * (count - 1) / (total * (total - 1))) / (share * (1 - share))
    if 2 * count > total:  # the statistic is that of the others as well, of which there are fewer to draw
        marked, count = sizes - marked, total - count
    order = numpy.lexsort((marked, sizes))  # the seed is not to depend on the order of the groups
    sizes, marked = sizes[order], marked[order]
    random = numpy.random.default_rng(zlib.crc32(sizes.tobytes() + marked.tobytes()))
    owner = numpy.repeat(numpy.arange(len(sizes)), sizes)
    observed = float((marked * marked / sizes).sum())  # grows with chi-square
    as_uneven = 0
    for draws in range(1, MAX_DRAWS + 1):
        chosen = owner[random.choice(total, count, replace=False, shuffle=False)]
        drawn = numpy.bincount(chosen, minlength=len(sizes))
        as_uneven += float((drawn * drawn / sizes).sum()) >= observed - 1e-9
        if as_uneven == _ENOUGH_DRAWS:
            return as_uneven / draws, correlation
    return (as_uneven + 1) / (MAX_DRAWS + 1), correlation


def _with_single_ones_together(of_item: Places) -> Places:
    alone = numpy.bincount(of_item)[of_item] == 1
    return numpy.where(alone, 0, of_item + 1)


def _quantity_test(strata: Places, left_out: Places, values: Numbers) -> tuple[float, float] | None:
    """Two-sided p and the share of pairs; None where there is too little to compare."""
    order = numpy.lexsort((values, strata))
    strata, left_out, values = strata[order], left_out[order].astype(bool), values[order]
    if not len(strata):
        return None
    new_stratum = numpy.append(True, strata[1:] != strata[:-1])
    stratum = numpy.cumsum(new_stratum) - 1
    tie = numpy.cumsum(new_stratum | numpy.append(True, values[1:] != values[:-1])) - 1
    ties = numpy.bincount(tie)
    before = numpy.append(0, numpy.cumsum(ties)[:-1]) - numpy.flatnonzero(new_stratum)[stratum[_firsts(tie)]]
    ranks = (before + (ties + 1) / 2)[tie]
    size = numpy.bincount(stratum).astype(float)
    out = numpy.bincount(stratum, weights=left_out)
    scored = size - out
    mixed = (out > 0) & (scored > 0)
    if min(out[mixed].sum(), scored[mixed].sum()) < LEAST_COUNT:
        return None
    tied = numpy.bincount(stratum[_firsts(tie)], weights=ties.astype(float) ** 3 - ties)[mixed]
    rank_sum = numpy.bincount(stratum, weights=ranks * left_out)[mixed]
    size, out, scored = size[mixed], out[mixed], scored[mixed]
    weight = 1 / (size + 1)
    distance = float((weight * (rank_sum - out * (size + 1) / 2)).sum())
    variance = float((weight**2 * out * scored / 12 * (size + 1 - tied / (size * (size - 1)))).sum())
    if variance < 1e-12:
        return None  # the same value everywhere
    more = float((rank_sum - out * (out + 1) / 2).sum() / (out * scored).sum())
    return math.erfc(abs(distance) / math.sqrt(2 * variance)), more


def _firsts(numbers: Places) -> Places:
    """The places where a rising sequence of numbers has a new one."""
    return numpy.flatnonzero(numpy.append(True, numbers[1:] != numbers[:-1]))


def _adjusted(found: Mapping[str, tuple[float, float]]) -> list[Independence]:
    """The tests with Holm's p."""
    highest = 0.0
    adjusted = {}
    for rank, name in enumerate(sorted(found, key=lambda name: found[name][0])):
        highest = max(highest, min(1.0, (len(found) - rank) * found[name][0]))
        adjusted[name] = highest
    return [Independence(name, p, adjusted[name], effect) for name, (p, effect) in found.items()]
