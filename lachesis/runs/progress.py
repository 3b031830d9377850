"""Progress of a run: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_INTERVAL = 10.0
"""Seconds between plain lines."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run goes at one moment."""

    done: int
    total: int
    """-1 where it is not known."""
    unit: str
    """What is counted, in the plural."""
    note: str = ""

    def __str__(self) -> str:
        count = f"{self.done}/{self.total}" if self.total >= 0 else f"{self.done}"
        return f"{self.unit} {count}" + (f"; {self.note}" if self.note else "")


class Progress:
    """The display of one run."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self._next = 0.0
        self._shown = ""
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bar = Bar(
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
            total = standing.total if standing.total >= 0 else None
            self._bar.update(self._task, completed=standing.done, total=total, standing=escape(str(standing)))
        elif line != self._shown and (last or time.monotonic() >= self._next):
            self._next = time.monotonic() + PLAIN_INTERVAL
            self._shown = line
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
