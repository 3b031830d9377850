"""Pausing, resuming and aborting of requests for weight updates.

A request in flight has sampled `tokens_per_second` since its latency ended; without a speed, all of its tokens come at
the end. Whether a token was sampled before an interrupt therefore depends on the time alone, never on what follows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

PauseMode: TypeAlias = Literal["abort", "keep", "wait"]
"""What happens to requests in flight: they are answered with what they have, or frozen, or they end first."""


class Running:
    """A request in flight. `ids` are the names by which its client may abort it."""

    __slots__ = ("_interrupted", "aborted", "begun", "ids")

    def __init__(self, ids: frozenset[str]) -> None:
        self.ids = ids
        self.begun = False
        """It did not arrive during a pause, or the pause is over."""
        self.aborted = False
        self._interrupted = asyncio.Event()

    def interrupt(self, *, abort: bool) -> None:
        """Stop its sampling: for good, or until the server goes on."""
        self.aborted = self.aborted or abort
        self._interrupted.set()

    async def undisturbed(self, seconds: float) -> bool:
        """Sleep. False, and at once, if the request is interrupted."""
        try:
            async with asyncio.timeout(seconds):
                await self._interrupted.wait()
        except TimeoutError:
            return True
        return False

    def take_interrupt(self) -> bool:
        """Whether it was interrupted since the last call."""
        interrupted = self._interrupted.is_set()
        self._interrupted.clear()
        return interrupted


class Flow:
    """Whether the server samples, and its requests in flight."""

    def __init__(self) -> None:
        self.paused = False
        self.running: set[Running] = set()
        self._changed = asyncio.Event()

    @contextmanager
    def request(self, ids: frozenset[str]) -> Iterator[Running]:
        """A request, from its arrival to its answer."""
        running = Running(ids)
        self.running.add(running)
        try:
            yield running
        finally:
            self.running.remove(running)
            self._wake()

    async def begin(self, running: Running) -> None:
        """Wait while the server is paused, unless the request is aborted."""
        while self.paused and not running.aborted:
            await self._changed.wait()
        running.begun = True

    async def unfrozen(self, running: Running) -> None:
        """`begin` again, if the request was interrupted."""
        while running.take_interrupt():
            await self.begin(running)

    async def idle(self) -> None:
        """Wait until all requests that have begun have ended."""
        while any(each.begun for each in self.running):
            await self._changed.wait()

    def pause(self, mode: PauseMode) -> None:
        """Start no request and, except with "wait", sample no further token until `resume`."""
        self.paused = True
        if mode != "wait":
            self.interrupt(abort=mode == "abort")

    def resume(self) -> None:
        self.paused = False
        self._wake()

    def interrupt(self, ids: Collection[str] = (), *, abort: bool) -> int:
        """Interrupt the requests with these ids, or all; how many."""
        chosen = [each for each in self.running if not ids or not each.ids.isdisjoint(ids)]
        for each in chosen:
            each.interrupt(abort=abort)
        self._wake()
        return len(chosen)

    def _wake(self) -> None:
        """All waits look at the state again."""
        self._changed.set()
        self._changed = asyncio.Event()
