"""The pace of the requests to one service, shared by all rollouts: a service that asks for a pause gets it from all."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from backends.retry_after import retry_delay
from lachesis_tools.tool_session import waiting

PATIENCE: Final = 300.0
"""Seconds after which one request is no longer made to wait for a service that is overloaded."""
_FIRST_SPACE, _MOST_SPACE, _NO_SPACE = 0.1, 5.0, 0.05


class Gate:
    """Lets requests pass at once while the service takes them. After a refusal all wait for the pause that it asked
    for, and pass one after the other, further apart after each new refusal and nearer after each answer: all at once
    would be refused again.

    It belongs to no event loop.
    """

    def __init__(self, pause: float = 1.0) -> None:
        """`pause` is the first one, in seconds, where the service asks for none; each further one in a row is twice as
        long."""
        self._pause = pause
        self._refused_at = self._opens_at = self._next = float("-inf")
        self._space = 0.0
        self._refusals = 0

    @property
    def opens_in(self) -> float:
        """Seconds until the first request may pass."""
        return max(0.0, self._opens_at - time.monotonic())

    async def passed(self) -> float:
        """Wait for a place. Returns the time at which the request passes, for `refused`."""
        while (wait := self._place() - time.monotonic()) > 0:
            with waiting():
                await asyncio.sleep(wait)
            if not self.opens_in:
                break
        return time.monotonic()

    def _place(self) -> float:
        place = max(time.monotonic(), self._opens_at, self._next)
        self._next = place + self._space
        return place

    def answered(self) -> None:
        """The service took a request."""
        self._refusals = 0
        self._space = 0.0 if self._space < _NO_SPACE else 0.8 * self._space

    def refused(self, passed_at: float, asked: float | None) -> None:
        """The service has too much to do, and asks for a pause of `asked` seconds, if it says how long."""
        if passed_at > self._refused_at:  # requests of one moment are refused together
            self._refused_at = time.monotonic()
            self._refusals += 1
            self._space = min(_MOST_SPACE, max(_FIRST_SPACE, 2 * self._space))
        delay = retry_delay(self._refusals, asked, self._pause)
        self._opens_at = max(self._opens_at, time.monotonic() + delay)
        self._next = self._opens_at
