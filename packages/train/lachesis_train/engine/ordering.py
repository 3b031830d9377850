"""Requests of a training model in the order of their `seq_id`, whatever the order in which they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from lachesis_train.engine.errors import RequestError

GAP_SECONDS: Final = 5.0
"""How long a request waits for one with a lower number: a client that failed in between never sends it."""


class Ordering:
    """Starts requests one after another. Used on the event loop only."""

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._held: dict[int, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, seq_id: int | None, start: Callable[[], None]) -> None:
        """Start a request now, or when its turn comes. Raises RequestError where its turn is over."""
        if seq_id is None:  # a client that does not number its requests
            start()
            return
        if seq_id < self._next:
            raise RequestError(f"seq_id {seq_id} came after {self._next - 1} was started: the order cannot be kept")
        self._held[seq_id] = start
        self._start_ready()

    def _start_ready(self) -> None:
        while self._next in self._held:
            self._held.pop(self._next)()
            self._next += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            self._timer = asyncio.get_running_loop().call_later(GAP_SECONDS, self._skip)

    def _skip(self) -> None:
        self._timer = None
        self._next = min(self._held)
        self._start_ready()
