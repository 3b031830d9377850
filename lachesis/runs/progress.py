"""Progress of a run: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Self

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from backends.text import duration
from lachesis.runs.prose import print_prose
from lachesis.runs.time_left import TimeLeft

PLAIN_INTERVAL = 60.0
"""Seconds between plain lines."""
_NOT_PLAIN = frozenset({"tokens", "tool calls", "failed", "last"})
"""Rows that would make a plain line long; the result has them."""
_PLAIN_ROW = 80
"""Characters of a row in a plain line."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run goes at one moment."""

    done: int
    total: int
    """-1 where it is not known."""
    unit: str
    """The unit of counting, in the plural."""
    note: str = ""
    rows: Sequence[tuple[str, str]] = ()
    """Figures, which a terminal shows as a table."""
    part: float = 0.0
    """What is played of those that are not done, in their unit."""

    def __str__(self) -> str:
        rows = (f"{name} {text}" for name, text in self.rows if name not in _NOT_PLAIN)
        return "; ".join([self.short, *(shorten(row, _PLAIN_ROW, placeholder=" …") for row in rows)])

    @property
    def short(self) -> str:
        """Without the rows."""
        return " ".join(self.counts)

    @property
    def counts(self) -> tuple[str, str]:
        """The unit, and how much of it is done."""
        count = f"{self.done:,}/{self.total:,}" if self.total >= 0 else f"{self.done:,}"
        return self.unit, count + (f"; {self.note}" if self.note else "")


NARROW = 100
"""Columns below which the counts have a row of their own, since the bar's line would be cut."""


class _Table(Bar):
    """A bar with a table over it, whose rows are wrapped."""

    rows: Sequence[tuple[str, str]] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True, min_width=10)
        table.add_column(overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        if self.rows:
            yield table
        yield from super().get_renderables()


class Progress:
    """The display of one run."""

    def __init__(self, console: Console, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.title = title
        self._next = 0.0
        self._shown = ""
        self._left = TimeLeft(clock)
        self._bar: _Table | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bar = _Table(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TextColumn("{task.fields[standing]}"),
                console=self.console,
                transient=True,  # the run ends with its result
            )
            self._task = self._bar.add_task(escape(self.title), total=None, standing="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, standing: Standing, *, last: bool = False) -> None:
        """Update the display. Elsewhere than on a terminal, lines come at an interval, and the last one always."""
        standing = self._with_time_left(standing)
        line = f"{self.title}: {standing}"
        if self._bar is not None:
            narrow = self.console.width < NARROW
            self._bar.rows = [*standing.rows, *([standing.counts] if narrow else [])]
            total, done = standing.total if standing.total >= 0 else None, standing.done + standing.part
            shown = "" if narrow else escape(standing.short)
            self._bar.update(self._task, completed=done, total=total, standing=shown)
        elif line != self._shown and (last or time.monotonic() >= self._next):
            self._next = time.monotonic() + PLAIN_INTERVAL
            self._shown = line
            print_prose(self.console, line)

    def _with_time_left(self, standing: Standing) -> Standing:
        left = self._left.seconds(standing.done + standing.part, standing.total)
        if left is None:
            return standing
        return replace(standing, note=", ".join(filter(None, [f"about {duration(left)} left", standing.note])))
