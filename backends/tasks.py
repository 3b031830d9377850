"""Work that has to be done to its end, whoever waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Awaitable[T]) -> T:
    """The result of `work`, which is completed even if whoever waits is cancelled: then that is raised afterwards."""
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
    """Whether it has ended without doing what it was for: it may be tried again."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def seen(task: asyncio.Future[Any]) -> None:
    """Nobody may be waiting for it: asyncio then complains about an exception that was never looked at."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
