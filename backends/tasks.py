"""Waiting for work: to its end, all at once, and without mistaking who was cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from types import FrameType, TracebackType
from typing import Any, TypeVar

from backends.errors import ExitCode

T = TypeVar("T")

GIVE_UP = 10.0
"""Seconds that a cancelled call has to end."""
LEAVE = 20.0
"""Seconds that a program has to end after a second signal."""


class IgnoresCancellation(Exception):
    """A call of somebody's own code was cancelled, and goes on. The traceback is where it stood."""


async def cancel(task: asyncio.Task[Any], what: str, patience: float = 0.0) -> None:
    """Cancel a task, and wait until it has released what it holds. Its outcome is not raised.

    Raises:
        IgnoresCancellation: it goes on after `GIVE_UP` seconds, and `patience` for what itself gives up a task.
    """
    task.cancel()
    for _ in range(6):
        await asyncio.wait({task}, timeout=GIVE_UP + patience)
        frames = [*frames_of(task)]
        if not (frames and frames[-1].f_globals["__name__"].startswith("backends.")):  # else a sandbox is slow
            break
    if not task.done():
        trace = None
        for frame in reversed(frames):
            trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        forget(task)
        said = f"{what} ignores cancellation: let asyncio.CancelledError out of every `except`"
        raise IgnoresCancellation(said).with_traceback(trace) from None


async def finish_or_cancel(task: asyncio.Task[T], what: str, patience: float = 0.0) -> T:
    """The result of a task that is cancelled with the caller. Raises as `cancel` does."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await cancel(task, what, patience)
        raise
    return task.result()


def forget(task: asyncio.Task[Any]) -> None:
    """Let a task go on that nobody waits for: `asyncio.Runner` would, for ever."""
    import ctypes  # late: hardly ever

    asyncio._unregister_task(task)
    task.add_done_callback(seen)
    # Destroyed, it would be resumed where no loop runs, and a bare `except:` around an `await` would go round for ever.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def frames_of(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of its coroutines, from the outside; none where it is what runs."""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None and not coroutine.cr_running:
        yield frame
        coroutine = coroutine.cr_await


def leave_soon(loop: asyncio.AbstractEventLoop) -> None:
    """End this process in `LEAVE` seconds, unless its event loop is closed by then: somebody asked for that twice."""

    def leave() -> None:
        if not loop.is_closed():
            os.write(2, b"stopped without its clean-up: something does not end; finished work is saved\n")
            os._exit(ExitCode.STOPPED)

    timer = threading.Timer(LEAVE, leave)
    timer.daemon = True
    timer.start()


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
    asked = list[str]()

    def handle(stop: Callable[[str], None], name: str) -> None:
        if asked:
            leave_soon(loop)
        asked.append(name)
        stop(name)

    for number in (signal.SIGTERM, signal.SIGINT):
        if stop is None:
            break
        earlier = signal.getsignal(number)
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, handle, stop, number.name)
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
