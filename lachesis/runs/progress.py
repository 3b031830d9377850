"""Progress of a run: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

PLAIN_INTERVAL = 10.0
"""Seconds between plain lines, unless a run has its own."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run goes at one moment."""

    done: int
    total: int
    """-1 where it is not known."""
    unit: str
    """What is counted, in the plural."""
    note: str = ""
    rows: Sequence[tuple[str, str]] = ()
    """Figures, which a terminal shows as a table."""
    interval: float = PLAIN_INTERVAL
    """Seconds between plain lines."""

    def __str__(self) -> str:
        return "; ".join([self.short, *(f"{name} {text}" for name, text in self.rows)])

    @property
    def short(self) -> str:
        """Without the rows."""
        count = f"{self.done}/{self.total}" if self.total >= 0 else f"{self.done}"
        return f"{self.unit} {count}" + (f"; {self.note}" if self.note else "")


class _Table(Bar):
    """A bar with a table over it."""

    rows: Sequence[tuple[str, str]] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, text in self.rows:
            table.add_row(f"[bold]{escape(name)}[/bold]", escape(text))
        if self.rows:
            yield table
        yield from super().get_renderables()


class Progress:
    """The display of one run."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self._next = 0.0
        self._shown = ""
        self._bar: _Table | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bar = _Table(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[standing]}"),  # last: a narrow terminal cuts it
                console=self.console,
            )
            self._task = self._bar.add_task(escape(self.title), total=None, standing="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, standing: Standing, *, last: bool = False) -> None:
        """Update the display. Elsewhere than on a terminal, lines come at an interval, and the last one always."""
        line = f"{self.title}: {standing}"
        if self._bar is not None:
            self._bar.rows = standing.rows
            total = standing.total if standing.total >= 0 else None
            self._bar.update(self._task, completed=standing.done, total=total, standing=escape(standing.short))
        elif line != self._shown and (last or time.monotonic() >= self._next):
            self._next = time.monotonic() + standing.interval
            self._shown = line
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
