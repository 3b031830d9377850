"""Threads for rewards that are plain functions.

An executor of the standard library waits for its threads, at its own end and at the interpreter's. A reward that hangs
would then block the event loop that it itself waits for, and the end of the program. These threads block neither.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from backends.tasks import in_own_thread


class RewardThreads:
    """Runs functions on daemon threads. At most `limit` calls are awaited at once."""

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, or its exception. When this is cancelled, the thread is left to itself."""

        def attempt() -> tuple[Any, BaseException | None]:
            try:
                return function(*args), None
            except BaseException as error:  # a future would change some: StopIteration, a TimeoutError's traceback
                return None, error

        context = contextvars.copy_context()
        async with self._free:
            value, error = await in_own_thread(lambda: context.run(attempt), name="reward")
        if error is not None:
            raise error
        return value
