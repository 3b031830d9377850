"""The statistics that a run shows while it plays, and why some rollouts have no score."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backends.text import counted
from lachesis.figures.figures import Figures
from lachesis.figures.intervals import mean_over_items
from lachesis.figures.rollout_records import counted_record
from lachesis.figures.tool_failures import VARYING
from lachesis.loop.outcome import in_words, listed
from lachesis.loop.rollout import DECLINED, Rollout
from lachesis.settings.setting_facts import with_settings
from lachesis.tracebacks import last_line, lines_of

Row = tuple[str, str]

MOST_CAUSES = 3
FEW = 100
"""Rollouts up to which the figures are taken each time, so that they agree with the count beside them."""
_TITLES = ("title", "name", "instance_id", "task_id", "id", "question", "prompt", "text")
_LABELS = re.compile(r" \(environment=[^)]*\)")
"""Of a sandbox; its name tells as much."""


@dataclass(slots=True)
class UnscoredCause:
    """Why rollouts have no score."""

    kind: str
    """`Rollout.unscored_kind`."""
    example: str
    may_pass: bool
    """Whether another attempt may succeed."""
    of_settings: bool = False
    """Whether other settings are the remedy."""
    line: str = ""
    """The line of code that raised, where the run has printed a traceback with it."""
    count: int = 0

    def __str__(self) -> str:
        return f"{self.count:,} x {in_words(self.kind)}: {self.example}"


class Causes:
    """Counts them. Failures that differ in numbers only have the same cause, and exceptions of the same lines."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], UnscoredCause] = {}

    def add(self, kind: str, why: str, *, may_pass: bool, of_settings: bool = False, trace: str = "") -> None:
        why = _cut(with_settings(_LABELS.sub("", why)), 2_000)
        key = kind, lines_of(trace) or VARYING.sub("#", why)[:300]
        self._found.setdefault(key, UnscoredCause(kind, why, may_pass, of_settings, last_line(trace))).count += 1

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may help in any case."""
        return any(cause.may_pass for cause in self._found.values())

    @property
    def of_settings(self) -> bool:
        """Whether other settings are the remedy for all of it."""
        return bool(self._found) and all(cause.of_settings for cause in self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[UnscoredCause]:
        """The most frequent first."""
        return iter(sorted(self._found.values(), key=lambda cause: -cause.count))

    def lines(self) -> list[str]:
        """The most frequent, a line each."""
        found = list(map(str, self))
        more = f"and {len(found) - MOST_CAUSES} other causes; the report has all"
        return found[:MOST_CAUSES] + ([more] if len(found) > MOST_CAUSES else [])


class RunningFigures:
    """Takes rollouts as they are finished, and the records of those that earlier starts finished.

    Args:
        scores: whether rollouts get scores in this run.
        window: latest items that the mean is of; None for all. Of ten thousand it takes ten milliseconds.
    """

    def __init__(self, *, scores: bool = True, window: int | None = 5_000) -> None:
        self.scores = scores
        self.window = window
        self.figures = Figures(items=window, whole=False)
        self.causes = Causes()
        """Of the rollouts of this start without a score."""
        self.faults = Causes()
        """How agents broke their own sandboxes."""
        self.broken_items: set[str] = set()
        """Keys of items that this start left out as broken."""
        self._last = ""
        self._began = time.monotonic()
        self._rows: list[Row] = []
        self._due = 0.0

    def add(self, item: Any, rollout: Rollout) -> None:
        """A rollout of this start."""
        self.figures.add(counted_record(rollout.item_key, [rollout]))
        score = "no score, "
        if (reward := rollout.reward) is not None:
            score = f"reward {reward:{'.2f' if abs(reward) < 1e9 else '.4g'}}, "
        end = f"{score if self.scores else ''}{in_words(rollout.outcome.value)}, {rollout.seconds:.1f} s"
        self._last = f"{item_title(item, rollout.item_key)}: {end}"
        if rollout.agent_fault:
            self.faults.add("agent_fault", rollout.agent_fault, may_pass=False)
        if rollout.broken_item:
            self.broken_items.add(rollout.item_key)
        kind = rollout.unscored_kind
        if self._asks_for(kind) and not rollout.left_to_agent:
            # A reward may be None for one sample and a number for the next.
            may_pass = rollout.may_pass_later or kind == DECLINED
            of_settings, trace = rollout.of_settings, rollout.traceback or ""
            self.causes.add(kind, rollout.unscored_because, may_pass=may_pass, of_settings=of_settings, trace=trace)

    def add_record(self, record: Mapping[str, Any]) -> None:
        """A group of an earlier start, or one that was broken before it had rollouts."""
        self.figures.add(record, earlier=True)

    def broken_lines(self) -> Iterator[str]:
        """How many items are broken, and which."""
        if broken := sorted(self.broken_items):
            more = f" and {len(broken) - 5} others" if len(broken) > 5 else ""
            yield f"{counted(len(broken), 'item')} left out as broken: {', '.join(broken[:5])}{more}"

    def _asks_for(self, kind: str) -> bool:
        """Whether a score is missing: not where there are none."""
        return bool(kind) and (self.scores or kind != DECLINED)

    def rows(self, *, fresh: bool = False) -> list[Row]:
        """How it goes, as of one moment: unless `fresh`, some seconds ago of more than `FEW` rollouts."""
        if (now := time.monotonic()) >= self._due or fresh or self.figures.outcomes.total() <= FEW:
            self._rows = list(self._rows_now(now)) if self.figures.outcomes else []
            self._due = now + max(1.0, 50 * (time.monotonic() - now)) if self._rows else 0.0
        return self._rows

    def _rows_now(self, now: float) -> Iterator[Row]:
        found = self.figures
        if self.scores:
            of = f" (the latest {self.window:,} items)" if found.forgot else ""
            mean = mean_over_items(list(found.scores.values()))
            yield "mean", "no score yet" if math.isnan(mean.mean) else f"{mean}{of}"
        yield "outcomes", listed(found.outcomes.most_common())
        if unscored := [(kind, count) for kind, count in found.unscored.most_common() if self._asks_for(kind)]:
            of = f"{sum(count for _, count in unscored):,} of {found.outcomes.total():,}"
            yield "no score", f"{of}: {', '.join(f'{kind} {count:,}' for kind, count in unscored)}"
        if (cause := next(iter(self.causes), None)) and not cause.line:
            yield "because", _cut(str(cause), 160)
        if found.rollouts:
            rate = f"{found.sampled:,} in finished rollouts, {found.sampled / max(now - self._began, 1e-9):,.0f}/s"
            yield "tokens", "not counted by the server" if found.counts["uncounted_requests"] else rate
            repaired = f", {found.repaired.repaired:,} repaired by the parser" if found.repaired.repaired else ""
            yield "tool calls", f"{found.counts['tool_calls']:,}, {found.counts['tool_errors']:,} failed{repaired}"
            if found.tool_failures:
                yield "failed", _cut("; ".join(found.tool_failures.lines()), 240)
            yield "last", self._last


def item_title(item: Any, key: str) -> str:
    """A few words of an item; its key where it has none."""
    found = item
    if not isinstance(item, str | int | float):
        values = (item.get(name) if isinstance(item, Mapping) else getattr(item, name, None) for name in _TITLES)
        others = item.values() if isinstance(item, Mapping) else ()
        texts = (value for value in others if isinstance(value, str))
        found = next((value for value in values if isinstance(value, str | int)), None) or next(texts, key)
    return _cut(str(found), 40)


def _cut(text: str, length: int) -> str:
    """The beginning of a text, in one line that any terminal takes: no escapes, no lone surrogates."""
    text = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * length]).split())
    return text if len(text) <= length else text[: length - 1] + "…"
