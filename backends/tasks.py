"""Waiting for work: to its end, all at once, and without mistaking who was cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)
GOES_ON = 30.0
"""Seconds after a cancellation at which a call that still runs is named."""


def name_if_it_goes_on(task: asyncio.Task[Any], what: str, cancelled: float) -> asyncio.TimerHandle:
    """Log which call a run waits for, if it still runs `GOES_ON` seconds after it is `cancelled` (on the clock of the
    event loop). Cancel what this returns when it has ended."""

    def name() -> None:
        if not task.done():
            log.warning(
                "%s still runs %g s after it was cancelled, and the run waits for it: an `except` in it may swallow "
                "asyncio.CancelledError",
                what,
                GOES_ON,
            )

    return asyncio.get_running_loop().call_at(cancelled + GOES_ON, name)


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


async def run_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of concurrent `calls`, in their order. When one fails, the others are cancelled and awaited.

    `asyncio.TaskGroup` does the same, but before Python 3.13 a group whose child failed may leave a request to cancel
    with the task, which then looks like a cancelled one to `asyncio.timeout` and to `cancel_requests`.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    ended: set[asyncio.Task[T]] = set()
    try:
        if tasks:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        if left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()
            await finish(asyncio.wait(left))
        for task in tasks:
            seen(task)
    for task in sorted(tasks, key=lambda task: task not in ended):  # an error before those that it caused
        task.result()
    return [task.result() for task in tasks]


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until each has released what it holds. What they raise is not raised or reported."""
    for task in tasks:
        task.cancel()
    if tasks:
        ended, _ = await asyncio.wait(tasks)
        for task in ended:
            seen(task)


def stop_event() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set from now on, instead of their earlier handlers. In the main thread only."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    return stopped


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[str], None] | None) -> Iterator[None]:
    """SIGTERM and Ctrl-C call `stop` inside, in the main thread only; after it, what they did before.

    A handler that the loop had before is replaced by the cancellation of this task: asyncio does not tell what it was,
    and the commands install that one.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    restore: list[Callable[[], Any]] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        if stop is None:
            break
        earlier = signal.getsignal(number)
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, stop, number.name)
            if earlier == signal.getsignal(number):  # the function that asyncio registers for each of its signals
                restore.append(functools.partial(loop.add_signal_handler, number, task.cancel))
            else:
                restore.append(functools.partial(loop.remove_signal_handler, number))
                restore.append(functools.partial(signal.signal, number, earlier))
    try:
        yield
    finally:
        for call in restore:
            call()


def cancel_requests() -> int:
    """How often somebody asked to cancel this task; more than at an earlier call means that it was this very task.

    A CancelledError without that comes from a task that this one awaited.
    """
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def has_failed(task: asyncio.Future[Any]) -> bool:
    """Whether the task has ended with an exception or by cancellation."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def seen(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a task as retrieved, so that asyncio does not report it."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()


def in_own_thread(call: Callable[..., T], *args: Any, name: str = "lachesis", **options: Any) -> asyncio.Future[T]:
    """The result of `call(*args, **options)`, which runs in a new thread, and goes on if the caller is cancelled.

    It is no thread of a pool: `call` may wait for an event loop that waits for a pool, or take minutes, and the
    interpreter waits for pools at its end.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call(*args, **options))
        except BaseException as error:
            outcome.set_exception(error)

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=work, name=name, daemon=True).start()
    return asyncio.wrap_future(outcome)
