"""The progress of a training run: a live table on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from backends.text import duration
from lachesis.runs.time_left import TimeLeft

FIGURES = (
    ("reward", "train/reward", "{:.3f}"),
    ("loss", "train/loss", "{:.4g}"),
    ("validation loss", "eval/loss", "{:.4g}"),
    ("KL", "train/sampling/kl_k3", "{:.2g}"),
    ("entropy", "train/entropy", "{:.3f}"),
    ("repaired calls", "train/repaired_call_rate", "{:.1%}"),
    ("clipped", "train/clip_ratio/region_mean", "{:.1%}"),
    ("staleness", "train/staleness/mean", "{:.1f}"),
    ("tokens/s", "train/tokens_per_second", "{:.0f}"),
    ("queue", "train/queue", "{:d}"),
)
SHOWN_STEPS = 8
WIDE = 100
"""Columns from which there is room for a long bar."""


class TrainingProgress:
    """The display of one run: figures that none of the last steps has are no columns."""

    def __init__(
        self, console: Console, title: str, total: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30 if console.width >= WIDE else 10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._bar.add_task(title, total=total, left="")
        self._total = total or 0
        self._left = TimeLeft(clock)
        self._lines: list[Mapping[str, Any]] = []
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._shown(), console=self._console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, line: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""
        seconds = self._left.seconds(line["step"], self._total)
        left = "" if seconds is None else f"about {duration(seconds)} left"
        if self._live is None:
            said = ", ".join(filter(None, [plain(line), left]))
            self._console.print(said, markup=False, highlight=False, soft_wrap=True)
            return
        self._bar.update(self._task, completed=line["step"], left=left)
        self._lines = [*self._lines, line][-SHOWN_STEPS:]
        self._live.update(self._shown())

    def tell(self, line: str) -> None:
        """Say something between the steps."""
        self._console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def _shown(self) -> Group:
        """The latest steps, with the first figures that the terminal has room for."""
        columns = [["step", *(str(line["step"]) for line in self._lines)]]
        for name, key, form in FIGURES:
            if any(key in line for line in self._lines):
                columns.append([name, *(form.format(line[key]) if key in line else "–" for line in self._lines)])
        table, room = Table(box=None, pad_edge=False, header_style="dim"), self._console.width + 2
        for cells in columns:
            if (room := room - max(map(len, cells)) - 2) < 0:
                break
            table.add_column(cells[0], justify="right", no_wrap=True)
        for row in zip(*(cells[1:] for cells in columns[: len(table.columns)]), strict=True):
            table.add_row(*map(Text, row))
        return Group(table, self._bar)


def plain(line: Mapping[str, Any]) -> str:
    """The figures of a step in one line."""
    shown = ", ".join(f"{name} {form.format(line[key])}" for name, key, form in FIGURES if key in line)
    return f"step {line['step']}: {shown or ('nothing to train' if line['step'] else 'before the training')}"
