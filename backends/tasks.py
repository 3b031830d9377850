"""Awaiting work that must be completed even when its caller is cancelled, and work in threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Awaitable[T]) -> T:
    """The result of `work`. If the caller is cancelled, `work` is completed first."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        seen(task)
        raise cancelled
    return task.result()


def has_failed(task: asyncio.Future[Any]) -> bool:
    """Whether the task has ended with an exception or by cancellation."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def seen(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a task as retrieved, so that asyncio does not report it."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()


def in_own_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `call`, which runs in a new thread, and goes on if the caller is cancelled.

    It is no thread of a pool: `call` may wait for an event loop that waits for a pool, or take minutes, and the
    interpreter waits for pools at its end.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=work, name="lachesis", daemon=True).start()
    return asyncio.wrap_future(outcome)
