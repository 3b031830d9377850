"""Whether an exception of a reward is the agent's doing, judged by the rewards of other rollouts.

A reward reads the agent's files, and an agent may leave anything. Where the statement that raised was passed by the
reward of another rollout, the agent is at fault, unless nothing of the agent's is in the expression that failed, or the
answer of a service is. Where something else is in it besides, and only rollouts of other items passed it, the reward is
called with the item of one and what the agent of the other left: that tells the two apart. Where nobody has passed the
statement yet, nothing is decided: that all rollouts of an item, or of a run, fail alike shows nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lachesis.loop.broken_items import item_of
from lachesis.rewards.statements import Span, Statement, add_home
from lachesis.rewards.watching import Watch, passed_by

if TYPE_CHECKING:
    from lachesis.rewards.doubt import Doubt

MOST_TIME = 0.1
"""Of the time of the run, what watched calls may take of a processor before only some are watched."""
WATCHED_FIRST = 64
"""Calls that are watched in any case."""
WATCHED_LATER = 8
"""Then one of so many."""
_ITEMS = 4096
"""Latest items of which is known what their rollouts passed."""
_OPEN = 64
"""Doubts that ask for evidence at once."""


@dataclass(slots=True)
class _Passed:
    """The rollouts that passed one statement."""

    rollouts: set[str] = field(default_factory=set)
    """The first two."""
    row: Any = None
    """The item of the last one."""


class Evidence:
    """The statements that the rewards of one environment passed in a run."""

    def __init__(self, rewards: Mapping[str, Callable[..., Any] | None]) -> None:
        self._rewards = {name: inspect.unwrap(each) for name, each in rewards.items() if each is not None}
        self._names = {getattr(each, "__name__", name) for name, each in self._rewards.items()}
        for function in self._rewards.values():
            add_home(function)
        self._calls = 0
        self._passed: dict[tuple[Statement, bool], _Passed] = {}
        self._of_items: OrderedDict[str, dict[tuple[Statement, bool], set[str]]] = OrderedDict()
        self._wanted_until = WATCHED_FIRST
        self._begun = time.monotonic()
        self._seconds = 0.0
        """Of processor time in watched calls."""
        self._services: set[tuple[str, Span]] = set()
        self._open: OrderedDict[tuple[Statement, str], Doubt] = OrderedDict()
        self._causes: dict[tuple[Statement, str], bool] = {}
        """Whether an item is the cause of the exception at a statement."""
        self.has_reference: bool | None = None
        """Whether a reference policy can show that a right solution meets the same; None while nobody has looked."""
        self.asking = asyncio.Lock()
        self.reference_met: dict[tuple[Statement, str], bool] = {}
        """By kinds of doubts: whether the reference policy met the same itself. Then the environment is at fault."""
        self.asked: set[Statement] = set()
        """Those that were looked at more closely already."""
        self.shown: set[str] = set()
        """Lines of which a first exception was printed."""

    def watch(self) -> Watch | None:
        """For the next call of a reward."""
        self._calls += 1
        has_time = self._seconds <= MOST_TIME * (time.monotonic() - self._begun)
        wanted = has_time or self._calls <= self._wanted_until or not self._calls % WATCHED_LATER
        return Watch() if wanted else None

    def want(self, doubt: Doubt) -> None:
        """A doubt waits: the next calls are all watched."""
        self._wanted_until = self._calls + WATCHED_FIRST
        self._open[doubt.statement, item_of(doubt.item)] = doubt
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)

    def learn(
        self,
        watch: Watch | None,
        item: Any,
        item_key: str,
        rollout: str,
        source: str = "",
        doubt: Doubt | None = None,
    ) -> None:
        """What the call of a rollout's reward passed.

        Args:
            source: the reward that returned a score.
            doubt: about what it raised. A statement that was passed before it raised, in a loop, is not passed.
        """
        if watch is not None:
            self._services |= watch.asked
            self._seconds += watch.seconds
        if not rollout:
            return
        found = passed_by(watch, source)
        if doubt is not None:
            found -= {*doubt.places, (doubt.statement, True)}
        if not found:
            return
        of_item = self._of_items.setdefault(item_of(item_key), {})
        self._of_items.move_to_end(item_of(item_key))
        if len(self._of_items) > _ITEMS:
            self._of_items.popitem(last=False)
        for each in found:
            passed = self._passed.setdefault(each, _Passed())
            passed.row = item
            for rollouts in (passed.rollouts, of_item.setdefault(each, set())):
                if len(rollouts) < 2:
                    rollouts.add(rollout)

    def waits_for_reference(self, doubt: Doubt) -> bool:
        """Whether nothing is decided before the reference policy has played."""
        return bool(self.has_reference) and doubt.kind not in self.reference_met

    def is_agents(self, doubt: Doubt) -> bool:
        """Whether the agent is at fault; False while nothing shows it."""
        if self.waits_for_reference(doubt):
            return False
        if self._passed_for_item(doubt):
            return True
        if not any(self._passed_by_others(doubt, place) for place in doubt.places):
            return False
        of_item = doubt.of_item
        if of_item is None:
            of_item = self._causes.get((doubt.statement, item_of(doubt.item)), True)
        return not (doubt.mixed and of_item)

    def _passed_for_item(self, doubt: Doubt) -> bool:
        of_item = self._of_items.get(item_of(doubt.item), {})
        return any(of_item.get(place, set()) - {doubt.rollout} for place in doubt.places)

    def _passed_by_others(self, doubt: Doubt, place: tuple[Statement, bool]) -> bool:
        passed = self._passed.get(place)
        return passed is not None and bool(passed.rollouts - {doubt.rollout})

    def items_to_try(self, doubt: Doubt) -> list[Any]:
        """Items with which the reward passed what it raises for this one, where one would tell whose fault it is."""
        if not doubt.mixed or self._passed_for_item(doubt):
            return []
        return [self._passed[place].row for place in doubt.places if self._passed_by_others(doubt, place)]

    def doubts_to_try(self, passed: Collection[tuple[Statement, bool]], item_key: str) -> list[Doubt]:
        """Those that wait, of other items, of which what was passed now may tell."""
        return [
            doubt
            for (_, item), doubt in self._open.items()
            if doubt.mixed
            and item != item_of(item_key)
            and (doubt.statement, item) not in self._causes
            and any(place in passed for place in doubt.places)
        ]

    def of_exception(
        self, error: BaseException, item: Any, item_key: str, rollout: str, source: str, watch: Watch | None
    ) -> Doubt | None:
        """As `doubt_of`."""
        try:
            from lachesis.rewards.doubt import doubt_of  # late: it reads source code, only for an exception
        except OSError:  # this machine cannot open another file, which is what the reward met
            return None
        reward = self._rewards.get(source.rpartition(": ")[2])
        services = (self._names, self._services)
        return doubt_of(error, (item_key, rollout, item), source, watch, reward, *services)

    def found_out(self, doubt: Doubt, *, of_item: bool) -> None:
        self._causes[doubt.statement, item_of(doubt.item)] = of_item
