"""Whether the rollouts without a score are a biased selection: their rates, and tests of independence.

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
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lachesis.loop.rollout import MODEL_SERVER

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Numbers = NDArray[numpy.float64]
    Places = NDArray[numpy.int64]

ALARM_P = 0.01
"""An alarm needs an adjusted p below this: at most so many of the runs without a dependence have one."""
LEAST_COUNT = 8
"""Rollouts that were left out, and rollouts that were scored, below which nothing is tested."""
LEAST_SHARE = 0.01
"""Share of rollouts that were left out below which there is no alarm: so few do not move a mean."""
LEAST_CORRELATION = 0.05
"""Between two rollouts of an item, for an alarm."""
LEAST_SHIFT = 0.1
"""For an alarm, of the share of pairs in which the rollout that was left out has more of a quantity, from one half."""
MAX_DRAWS = 1999
_ENOUGH_DRAWS = 20
"""Random choices as uneven as the real one after which p is known well enough."""
QUANTITIES = ("turns", "tool calls", "completion tokens", "seconds")
"""Of the seconds the agent's own: in commands and answered completions."""
WINDOW = 20_000
"""Latest rollouts that the tests of a run in progress are about."""
_FIRST_LOOK = 64


class SeenRollout(NamedTuple):
    """The data of one rollout that the tests use."""

    kind: str
    """Why it has no score (`Rollout.unscored_kind`); empty where it has one."""
    by_rule: str
    """The rule that scored it: `timeout` or `agent_fault`; empty where its own work did."""
    quantities: tuple[float, ...] | None
    """In the order of `QUANTITIES`; None where the model was never asked."""


def of_record(rollout: Mapping[str, Any]) -> SeenRollout:
    """From the record of a rollout; those of earlier versions have no `unscored_kind`."""
    kind, outcome = "", rollout["outcome"]
    if rollout["reward"] is None:
        guess = "environment" if rollout["traceback"] else outcome if outcome in _UNSCORED else "declined"
        kind = rollout.get("unscored_kind") or guess
    quantities = None
    if rollout.get("api_calls", rollout["turns"]):
        seconds = rollout.get("seconds_own", 0.0)
        quantities = (rollout["turns"], rollout["tool_calls"], rollout.get("completion_tokens", 0), seconds)
    by_rule = "agent_fault" if rollout.get("agent_fault") else "timeout" if outcome == "timeout" else ""
    return SeenRollout(kind, by_rule if rollout["reward"] is not None else "", quantities)


_UNSCORED = ("infra_error", "timeout", "agent_fault")


@dataclass(frozen=True, slots=True)
class Test:
    """One test of independence."""

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


@dataclass(slots=True)
class ItemRates:
    """The rollouts of one item."""

    key: str
    rollouts: int = 0
    unscored: Counter[str] = field(default_factory=Counter)
    """By kind."""
    by_rule: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.unscored.most_common())
        return f"{self.unscored.total()} of {self.rollouts} of {self.key} ({kinds})"

    @property
    def share(self) -> float:
        return self.unscored.total() / self.rollouts if self.rollouts else 0.0


@dataclass(frozen=True, slots=True)
class Exclusion:
    """How many rollouts have no score, for which reasons, and whether that depends on something."""

    rollouts: int = 0
    unscored: Mapping[str, int] = field(default_factory=dict)
    """Rollouts without a score by kind, the most frequent kind first."""
    by_rule: Mapping[str, int] = field(default_factory=dict)
    """Rollouts whose score a rule gave, by the rule: scores like all others, and in `unscored` not at all."""
    items: Sequence[ItemRates] = ()
    """Items with a rollout that is counted in one of these, the highest share without a score first."""
    tests: Sequence[Test] = ()
    """Empty where too few rollouts were left out, or scored, to tell."""
    tested: tuple[int, int] = (0, 0)
    """Rollouts that were left out, of how many, in the tests."""

    @property
    def alarm(self) -> str:
        """What being left out depends on, in one line; empty where nothing shows that it does."""
        found = " and ".join(str(test) for test in self.tests if test.alarms)
        if not found or self.tested[0] < LEAST_SHARE * self.tested[1]:
            return ""
        return (
            f"being left out depends on {found}: {self.tested[0]} of {self.tested[1]} rollouts; a biased selection "
            "trains the wrong thing, see 'A biased selection' in docs/running.md"
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """For the table that a run ends with."""
        if self.unscored:
            yield "left out", _rates(self.unscored, self.rollouts)
            if sum(self.unscored.values()) < self.rollouts:  # otherwise no item is special
                yield "left out most", "; ".join(str(rates) for rates in self.items[:3] if rates.unscored)
        if self.by_rule:
            yield "scored by rule", _rates(self.by_rule, self.rollouts)

    def shares(self) -> dict[str, float]:
        """Of all rollouts, by name."""
        shares = {f"unscored/{kind}": count / self.rollouts for kind, count in self.unscored.items()}
        return shares | {f"scored_by_rule/{kind}": count / self.rollouts for kind, count in self.by_rule.items()}

    def test_metrics(self) -> dict[str, float]:
        """The p of each test by name, and 1.0 for an alarm; empty where nothing could be tested."""
        found = {f"unscored_p/{test.of.replace(' ', '_')}": test.adjusted for test in self.tests}
        return {**found, "unscored_alarm": float(bool(self.alarm))} if found else {}


def item_of(item_key: str) -> str:
    """The same for further groups of an item, and for the item played again."""
    key = item_key.partition("+")[0]
    return key.rpartition("-")[0] or key


def _rates(counts: Mapping[str, int], rollouts: int) -> str:
    return ", ".join(f"{kind} {count} ({100 * count / rollouts:.1f} %)" for kind, count in counts.items())


class Exclusions:
    """Takes rollouts one at a time, and keeps some forty bytes of each, and four hundred of each item. Safe for several
    threads.

    Args:
        window: the tests are about so many of the latest rollouts; None for all.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._items: dict[str, int] = {}
        self._rates: list[ItemRates] = []
        self._kinds: Counter[str] = Counter()
        self._rules: Counter[str] = Counter()
        self._total = 0
        self._of_item = array("q")
        self._left_out = array("b")
        self._asked = array("b")
        """Whether the model was asked: the quantities of the others say nothing."""
        self._quantities = tuple(array("d") for _ in QUANTITIES)
        self._latest = Exclusion()
        self._next_look = _FIRST_LOOK

    def add_group(self, group: Mapping[str, Any]) -> None:
        """The same from the record of a group."""
        self.add(group["item_key"], map(of_record, group["rollouts"]))

    def add(self, item_key: str, rollouts: Iterable[SeenRollout]) -> None:
        """The rollouts of one group."""
        key = item_of(item_key)
        with self._lock:
            at = self._items.setdefault(key, len(self._items))
            if at == len(self._rates):
                self._rates.append(ItemRates(key))
            for seen in rollouts:
                self._count(self._rates[at], seen)
                if seen.kind != MODEL_SERVER:
                    self._of_item.append(at)
                    self._left_out.append(bool(seen.kind))
                    self._asked.append(seen.quantities is not None)
                    for column, value in zip(self._quantities, seen.quantities or (0,) * len(QUANTITIES), strict=True):
                        column.append(value)
            columns: tuple[array[Any], ...] = (self._of_item, self._left_out, self._asked, *self._quantities)
            if self._window is not None and len(self._of_item) > 1.5 * self._window:  # not at every group: it copies
                for column in columns:
                    del column[: -self._window]

    def _count(self, rates: ItemRates, seen: SeenRollout) -> None:
        self._total += 1
        rates.rollouts += 1
        if seen.kind:
            self._kinds[seen.kind] += 1
            rates.unscored[seen.kind] += 1
        if seen.by_rule:
            self._rules[seen.by_rule] += 1
            rates.by_rule[seen.by_rule] += 1

    def rates(self) -> Exclusion:
        """Without tests."""
        with self._lock:
            return self._without_tests()

    def _without_tests(self) -> Exclusion:
        items = [
            replace(rates, unscored=rates.unscored.copy(), by_rule=rates.by_rule.copy())
            for rates in self._rates
            if rates.unscored or rates.by_rule
        ]
        items.sort(key=lambda rates: (-rates.share, -rates.rollouts, rates.key))
        unscored, by_rule = dict(self._kinds.most_common()), dict(self._rules.most_common())
        return Exclusion(rollouts=self._total, unscored=unscored, by_rule=by_rule, items=items)

    def result(self) -> Exclusion:
        """The rates, and the tests. Takes up to a second for 20,000 rollouts and half a minute for a million: not for
        the event loop."""
        import numpy

        with self._lock:
            arrays = [numpy.array(each) for each in (self._of_item, self._left_out, self._asked, *self._quantities)]
            result = self._without_tests()
        of_item, left_out, asked, *quantities = arrays
        found = {}
        count = int(left_out.sum())
        if min(count, len(left_out) - count) >= LEAST_COUNT:
            found["item"] = _item_test(of_item, left_out)
            strata = _with_single_ones_together(of_item)[asked > 0]
            marked = left_out[asked > 0]
            for name, values in zip(QUANTITIES, quantities, strict=True):
                found[name] = _quantity_test(strata, marked, values[asked > 0])
        tests = _adjusted({name: test for name, test in found.items() if test is not None})
        return replace(result, tests=tests, tested=(count, len(left_out)))

    def latest(self) -> Exclusion:
        """`result` of the last look. The first is at 64 rollouts, the next ones when half as many have come again: each
        look is a chance of a false alarm, and takes time."""
        if self._total >= self._next_look:
            self._next_look = self._total + min(self._total, self._window or self._total) // 2
            self._latest = self.result()
        return self._latest


def _item_test(of_item: Places, left_out: Places) -> tuple[float, float] | None:
    """p and the correlation within items; None where no item has two rollouts."""
    import numpy

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
    import numpy

    alone = numpy.bincount(of_item)[of_item] == 1
    return numpy.where(alone, 0, of_item + 1)


def _quantity_test(strata: Places, left_out: Places, values: Numbers) -> tuple[float, float] | None:
    """Two-sided p and the share of pairs; None where there is too little to compare."""
    import numpy

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
    import numpy

    return numpy.flatnonzero(numpy.append(True, numbers[1:] != numbers[:-1]))


def _adjusted(found: Mapping[str, tuple[float, float]]) -> list[Test]:
    """The tests with Holm's p."""
    highest = 0.0
    adjusted = {}
    for rank, name in enumerate(sorted(found, key=lambda name: found[name][0])):
        highest = max(highest, min(1.0, (len(found) - rank) * found[name][0]))
        adjusted[name] = highest
    return [Test(name, p, adjusted[name], effect) for name, (p, effect) in found.items()]
