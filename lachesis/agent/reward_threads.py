"""Threads for rewards that are plain functions.

An executor of the standard library waits for its threads, at its own end and at the interpreter's. A reward that hangs
would then block the event loop that it itself waits for, and the end of the program. These threads block neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


class RewardThreads:
    """Runs functions on daemon threads. At most `limit` calls are awaited at once."""

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, or its exception. When this is cancelled, the thread is left to itself."""
        async with self._free:
            loop = asyncio.get_running_loop()
            outcome: asyncio.Future[Any] = loop.create_future()

            def settle(result: Any, error: BaseException | None) -> None:
                if outcome.done():
                    return
                if error is None:
                    outcome.set_result(result)
                else:
                    outcome.set_exception(error)

            def work() -> None:
                result: Any = None
                error: BaseException | None = None
                try:
                    result = function(*args)
                except StopIteration as stop:  # which a future does not take
                    error = RuntimeError(f"the function raised {stop!r}")
                except BaseException as raised:
                    error = raised
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(settle, result, error)

            threading.Thread(target=work, name=f"reward {id(outcome):x}", daemon=True).start()
            return await outcome
