"""Whether the rollouts without a score are a biased selection: their rates, and what they depend on.

The tests are in `independence`, which is loaded where there are enough rollouts to tell.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lachesis.loop.outcome import in_words
from lachesis.loop.rollout import DECLINED, MODEL_SERVER

if TYPE_CHECKING:
    from lachesis.figures.independence import Independence

LEAST_SHARE = 0.01
"""Share of rollouts that were left out below which there is no alarm: so few do not move a mean."""
QUANTITIES = ("turns", "tool calls", "completion tokens", "seconds")
"""Of the seconds the agent's own: in commands and answered completions."""
WINDOW = 20_000
"""Latest rollouts that the tests of a run in progress are about."""
_FIRST_LOOK = 64
_WIDTH = 3 + len(QUANTITIES)
"""Numbers of a rollout that are kept."""


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
        guess = "environment" if rollout["traceback"] else outcome if outcome in _UNSCORED else DECLINED
        kind = rollout.get("unscored_kind") or guess
    quantities = None
    if rollout.get("api_calls", rollout["turns"]):
        seconds = rollout.get("seconds_own", 0.0)
        quantities = (rollout["turns"], rollout["tool_calls"], rollout.get("completion_tokens", 0), seconds)
    by_rule = "agent_fault" if rollout.get("agent_fault") else "timeout" if outcome == "timeout" else ""
    return SeenRollout(kind, by_rule if rollout["reward"] is not None else "", quantities)


_UNSCORED = ("infra_error", "timeout", "agent_fault")


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
    tests: Sequence[Independence] = ()
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
            "trains the wrong thing, see docs/left-out.md"
        )

    def rows(self, *, evaluation: bool = False) -> Iterator[tuple[str, str]]:
        """For the table that a run ends with. That of an evaluation counts what was left out as invalid."""
        if self.unscored:
            if not evaluation:
                yield "left out", _rates(self.unscored, self.rollouts)
            if sum(self.unscored.values()) < self.rollouts:  # otherwise no item is special
                yield "left out most", "; ".join(str(rates) for rates in self.items[:3] if rates.unscored)
        if self.by_rule:
            yield "fixed score", _rates(self.by_rule, self.rollouts)

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
    return ", ".join(f"{in_words(kind)} {count} ({100 * count / rollouts:.1f} %)" for kind, count in counts.items())


class Exclusions:
    """Takes rollouts one at a time, and keeps some sixty bytes of each, and four hundred of each item. Safe for several
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
        self._rows = array("d")
        """As of `independence.tests_of`."""
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
                    quantities = seen.quantities or (0,) * len(QUANTITIES)
                    self._rows.extend((at, bool(seen.kind), seen.quantities is not None, *quantities))
            most = None if self._window is None else _WIDTH * self._window
            if most is not None and len(self._rows) > 1.5 * most:  # not at every group: it copies
                del self._rows[:-most]

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
        with self._lock:
            result, rows = self._without_tests(), self._rows[:]
        tested = int(sum(rows[1::_WIDTH])), len(rows) // _WIDTH
        if tested[0] in (0, tested[1]):
            return replace(result, tested=tested)
        from lachesis.figures.independence import tests_of  # late: in most runs, every rollout has a score

        return replace(result, tests=tests_of(rows, QUANTITIES), tested=tested)

    def latest(self) -> Exclusion:
        """`result` of the last look. The first is at 64 rollouts, the next ones when half as many have come again: each
        look is a chance of a false alarm, and takes time."""
        if self._total >= self._next_look:
            self._next_look = self._total + min(self._total, self._window or self._total) // 2
            self._latest = self.result()
        return self._latest
