"""Threads for rewards that are plain functions.

An executor of the standard library waits for its threads, at its own end and at the interpreter's. A reward that hangs
would then block the event loop that it itself waits for, and the end of the program. These threads block neither.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class RewardThreads:
    """Runs functions on daemon threads. At most `limit` calls are awaited at once."""

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, or its exception. When this is cancelled, the thread is left to itself."""
        async with self._free:
            outcome: Future[Any] = Future()
            outcome.set_running_or_notify_cancel()  # from now on, only the function ends it

            def work() -> None:
                try:
                    outcome.set_result(function(*args))
                except StopIteration as stop:  # which a coroutine does not raise
                    outcome.set_exception(RuntimeError(f"the function raised {stop!r}"))
                except BaseException as error:
                    outcome.set_exception(error)

            threading.Thread(target=work, name=f"reward {id(outcome):x}", daemon=True).start()
            return await asyncio.wrap_future(outcome)
