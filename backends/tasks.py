"""Awaiting work that must be completed even when its caller is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
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
