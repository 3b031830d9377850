"""The figures of `serve`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from backends.errors import ExitCode
from backends.text import counted
from lachesis.figures.exclusion import Exclusion
from lachesis.figures.repaired_calls import NAME, RepairedCalls
from lachesis.runs.results import Row, ShownResult
from lachesis_train.item_pools import POOLS
from lachesis_train.signal_rates import SignalRates


@dataclass(frozen=True, slots=True)
class ServeResult(ShownResult):
    """The figures of `serve` at one moment, earlier starts included except in `groups`, `rollouts` and `reward`."""

    step: int
    """The trainer's."""
    total: int
    """-1 where it is not known."""
    delivered: int
    """Groups that are in batches of the trainer."""
    at_api: int
    """Groups in the API's queue."""
    waiting: int
    """Groups that the API has not acknowledged."""
    refused: Mapping[str, int]
    """Groups that are not sent, by reason."""
    delivered_tokens: int
    undelivered_tokens: int
    """Sampled tokens that are in no group that was or will be sent."""
    ages: Mapping[int, int]
    """Age -> groups of that age that are in batches; see `lachesis_train.staleness`."""
    oldest: str
    """Key of the item whose group was the oldest."""
    max_staleness: int | None
    replayed: Mapping[str, int]
    """Key of an item -> times that this start played it again because its group became too old."""
    held_by: str
    """The group in flight that others wait for, by `max_staleness`."""
    held_seconds: float
    """Time of this start in which no group could begin for that reason."""
    requeued: int
    """Times that a group was posted again because the API may have lost it: the trainer may have it twice."""
    groups: int
    rollouts: int
    reward: float
    """Mean; nan before the first."""
    playing: int
    trouble: str
    reason: str
    """Why the run ended; empty while it continues."""
    exclusion: Exclusion = field(default_factory=Exclusion)
    """Of this start. Empty while it continues."""
    repaired: RepairedCalls = field(default_factory=RepairedCalls)
    """Of this start."""
    of_split: int = 0
    """The undelivered tokens of this start that are in further samples of rollouts that were sent."""
    signals: SignalRates = field(default_factory=SignalRates)
    """Of this start."""
    pools: Mapping[str, int] = field(default_factory=dict)
    """Items by pool, where they are drawn by difficulty."""

    exit_code = ExitCode.DONE

    @property
    def mean_age(self) -> float:
        return sum(age * count for age, count in self.ages.items()) / (sum(self.ages.values()) or math.nan)

    @property
    def over_age(self) -> int:
        """Groups older than `max_staleness` that were sent."""
        cap = self.max_staleness
        return 0 if cap is None else sum(count for age, count in self.ages.items() if age > cap)

    @property
    def sent(self) -> int:
        """Groups that the API has taken."""
        return self.delivered + self.at_api

    def line(self) -> str:
        """All of it in few words."""
        # A narrow terminal cuts the end.
        parts = [f"max_staleness: waiting for {self.held_by}"] if self.held_by else []
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        refused = f", {self._refused()} refused" if self.refused else ""
        parts.append(f"{counted(self.sent, 'group')} sent{waiting}{refused}, {self.playing} playing")
        lost = f", {self.undelivered_tokens:,} not" if self.undelivered_tokens else ""
        parts.append(f"tokens {self.delivered_tokens:,} delivered{lost}")
        if self.signals.last:
            parts.append(str(self.signals))
        if any(self.ages):
            parts.append(f"age {self.mean_age:.1f}, at most {max(self.ages)}")
        return "; ".join(parts + ([f"waiting: {self.trouble}"] if self.trouble else []))

    def rows(self) -> Iterator[Row]:
        yield "ended", self.reason
        yield "step", f"{self.step}" + (f" of {self.total}" if self.total >= 0 else "")
        yield "groups sent", f"{self.sent}, {self.at_api} of them in the API's queue"
        yield "waiting", f"{self.waiting}"
        yield "refused", self._refused()
        if self.requeued:
            doubles = "group_overrides.group_id shows doubles"
            yield "posted again", f"{self.requeued}, which the API may have lost; {doubles}"
        yield "rollouts", f"{self.rollouts} in {counted(self.groups, 'group')} of this start"
        yield from self.exclusion.rows()
        if self.repaired.parsed:
            yield "repaired calls", f"{self.repaired}: {NAME}"
        yield "tokens", f"{self.delivered_tokens:,} delivered, {self.undelivered_tokens:,} undelivered"
        if self.of_split:
            of_split = counted(self.of_split, "token")
            yield (
                "not sent",
                f"{of_split} of this start, in additional samples of rollouts (--env.split_rollouts all sends them)",
            )
        yield "mean reward", "no rollout has a score" if math.isnan(self.reward) else f"{self.reward:.3f}"
        yield from self.signals.rows()
        if self.pools:
            yield "items", ", ".join(f"{name} {self.pools[name]}" for name in POOLS if name in self.pools)
        yield from self._age_rows()

    def _age_rows(self) -> Iterator[Row]:
        if self.ages:
            spread = f"p50 {age_quantile(self.ages, 0.5)}, p99 {age_quantile(self.ages, 0.99)}, most {max(self.ages)}"
            oldest = f" ({self.oldest})" if max(self.ages) else ""
            yield "age", f"{self.mean_age:.2f} batches from a group's first prompt to its own; {spread}{oldest}"
            if over := self.over_age:
                yield "too old, sent", f"{over}, older than max_staleness = {self.max_staleness}"
        if self.replayed:
            key, times = max(self.replayed.items(), key=itemgetter(1))
            total = f"{counted(sum(self.replayed.values()), 'time')}, {counted(len(self.replayed), 'item')}"
            yield "replayed for age", f"{total}; most often {key}: {times}"
        if self.held_seconds >= 1:
            yield "held for age", f"{self.held_seconds:.0f} s in which new groups waited for older ones"

    def warnings(self) -> Iterator[str]:
        if alarm := self.exclusion.alarm:
            yield alarm
        if alarm := self.repaired.alarm:
            yield alarm

    def _refused(self) -> str:
        named = ", ".join(f"{reason} {count}" for reason, count in sorted(self.refused.items()))
        return f"{sum(self.refused.values())}" + (f" ({named})" if named else "")


def age_quantile(ages: Mapping[int, int], share: float) -> int:
    """The smallest age that at least this share of the groups do not exceed."""
    left = share * sum(ages.values())
    for age in sorted(ages):
        left -= ages[age]
        if left <= 0:
            return age
    raise ValueError("there are no groups")
