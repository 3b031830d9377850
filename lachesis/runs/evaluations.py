"""What `evaluate` shows of its samples while it plays them and at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lachesis.evaluation import mean_over_items, samples_needed
from lachesis.runs.item_keys import plain
from lachesis.runs.progress import Standing
from lachesis.runs.summary import Summariser, Summary

_REFRESH = 1.0
"""Seconds between two computations of the figures: of 10,000 samples they take a hundredth of one."""
MAX_CATEGORIES = 20

Row = tuple[str, str]


class RunningFigures:
    """Takes the records of samples as they are finished.

    Args:
        items: digests of the items.
        category: the field of an item, or of its `metadata`, that is its category.
    """

    def __init__(self, items: Sequence[str], category: str) -> None:
        self.items = items
        self._category = category
        self._finished = Summariser()
        self._earlier = 0
        self._began = self._computed = time.monotonic()
        self._rows: Sequence[Row] = ()

    def add_earlier(self, record: Mapping[str, Any]) -> None:
        self._finished.add(record)
        self._earlier += 1

    def add(self, record: Mapping[str, Any]) -> None:
        self._finished.add(record)

    def about_item(self, item: Any) -> dict[str, str]:
        """What the record of a sample says about its item: the category, if it has one."""
        item = plain(item)
        for holder in (item, item.get("metadata")) if isinstance(item, dict) else ():
            if isinstance(holder, dict) and isinstance(found := holder.get(self._category), str | int | float):
                return {"category": str(found)}
        return {}

    def standing(self, total: int) -> Standing:
        """How it goes; the figures are at most a second old."""
        done, now = self._finished.groups, time.monotonic()
        if done and (now - self._computed >= _REFRESH or done >= total or not self._rows):
            self._computed = now
            self._rows = [*self._figures(), *self._time_left(total - done, now)]
        # An earlier start may have been of more items.
        return Standing(done, max(total, done), "samples", rows=self._rows)

    def _figures(self) -> Iterator[Row]:
        summary = self._finished.summary(tests=False)
        yield "mean", str(summary.reward) if summary.scored else "none was scored"
        yield "outcomes", ", ".join(f"{name} {count}" for name, count in summary.outcomes.items()) or "none"
        if summary.exclusion.unscored:
            yield "invalid", invalid(summary)
        yield "tokens", tokens(summary)

    def _time_left(self, left: int, now: float) -> Iterator[Row]:
        if left > 0 and (played := self._finished.groups - self._earlier):
            minutes, seconds = divmod(round((now - self._began) / played * left), 60)
            yield "left", f"about {minutes}:{seconds:02}"


def invalid(summary: Summary) -> str:
    """How many samples have no score, and why."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(summary.exclusion.unscored.items()))
    without = summary.rollouts - summary.scored
    share = f" ({100 * without / summary.rollouts:.1f} %): {kinds}" if without else ""
    return f"{without} of {summary.rollouts}{share}"


def tokens(summary: Summary) -> str:
    """Completion tokens."""
    return "not counted by the server" if summary.uncounted_requests else f"{summary.completion_tokens}"


def figure_rows(summary: Summary) -> Iterator[Row]:
    """The figures of an evaluation, for the table at its end."""
    without = summary.rollouts - summary.scored
    for name, (mean, worst, best) in summary.figures().items():
        cases = f"; {worst:.3f} to {best:.3f} if the invalid ones had scores" if without else ""
        yield "mean reward" if name == "avg_reward" else name, f"{mean}{cases}"
    yield "invalid", invalid(summary)
    if (more := samples_needed(list(summary.scores.values()))) is not None:
        yield "for ±1 point", f"{more} more samples, of further items" if more else "there are enough samples"
    for name, scores in list(summary.categories.items())[:MAX_CATEGORIES]:
        yield f"mean of {name}", f"{mean_over_items(scores)} ({len(scores)} items)"
    if (hidden := len(summary.categories) - MAX_CATEGORIES) > 0:
        yield "categories", f"{hidden} more; see metrics.json"
