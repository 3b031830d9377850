"""The wire's promises: a request is answered with an id at once, and its result is fetched by this id."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final

Result = bytes | dict[str, Any]
"""Protobuf, or an object of JSON."""
KEPT_SECONDS: Final = 120.0
"""How long a result stays after it was fetched: the answer may have been lost on its way."""
KEPT_BYTES: Final = 256 << 20
"""Bytes of results that wait; beyond it the oldest are dropped, and asking for one is answered with 410."""


@dataclass
class Promise:
    """A result that will be there."""

    id: str
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    fetched: float | None = None

    @property
    def size(self) -> int:
        """Approximate bytes of the result."""
        return len(self.result) if isinstance(self.result, bytes) else 500


class Promises:
    """Promises by id. Used on the event loop only."""

    def __init__(self) -> None:
        self._promises: dict[str, Promise] = {}
        self._bytes = 0
        self._cleaned = 0.0

    def get(self, promise_id: str) -> Promise | None:
        """The promise, unless it is unknown or was dropped."""
        return self._promises.get(promise_id)

    def create(self, promise_id: str) -> Promise:
        """A new promise."""
        self._drop_old()
        promise = self._promises[promise_id] = Promise(promise_id)
        return promise

    def fulfil(self, promise: Promise, result: Result) -> None:
        """Give the promise its result."""
        promise.result = result
        self._bytes += promise.size
        promise.ready.set()
        self._drop_old()

    async def fetch(self, promise: Promise, timeout: float) -> Result | None:
        """The result, or None if it is not there in time."""
        try:
            await asyncio.wait_for(promise.ready.wait(), timeout)
        except TimeoutError:
            return None
        promise.fetched = promise.fetched or time.monotonic()
        return promise.result

    def _drop_old(self) -> None:
        now = time.monotonic()
        if self._bytes <= KEPT_BYTES and now - self._cleaned < KEPT_SECONDS / 10:
            return
        self._cleaned = now
        for promise in list(self._promises.values()):  # in the order in which they were made
            old = promise.fetched is not None and now - promise.fetched > KEPT_SECONDS
            if promise.result is not None and (old or self._bytes > KEPT_BYTES):
                del self._promises[promise.id]
                self._bytes -= promise.size
