"""Progress of a long run: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_INTERVAL = 10.0
"""Seconds between plain lines."""


class RunProgress:
    """Counts finished groups. `done` are those that an earlier start left behind."""

    def __init__(self, console: Console, title: str, total: int, done: int = 0) -> None:
        self.console = console
        self.title = title
        self.total = total
        self.done = done
        self._last = time.monotonic()
        self._live: Progress | None = None

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._live.add_task(self.title, total=self.total, completed=self.done, note="")
            self._live.start()
        else:
            self.console.print(f"{self.title}: {self.done}/{self.total}", highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def advance(self, note: str) -> None:
        """One more is finished; `note` is a few words on how the run goes."""
        self.done += 1
        if self._live is not None:
            self._live.update(self._task, completed=self.done, note=note)
            return
        now = time.monotonic()
        if now - self._last >= PLAIN_INTERVAL or self.done == self.total:
            self._last = now
            self.console.print(f"{self.title}: {self.done}/{self.total}  {note}", highlight=False)
