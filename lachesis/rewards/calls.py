"""Calls of coroutine functions, in coroutines and in threads.

On the event loop a call gives what is to be awaited; in another thread it blocks that thread.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

from lachesis.rewards.call_scope import CallScope, RewardIsOver, Runs, ScopedCall, as_it_is, loop_threads

T = TypeVar("T")

_LOOK = 0.25
"""Seconds between looks at whether the event loop can still answer a thread."""


async def in_call_scope(
    coroutine: Coroutine[Any, Any, T], *, name: str = "the environment", runs: Runs = as_it_is
) -> T:
    """The result of a coroutine of the environment, which may use contexts.

    Args:
        name: what runs, for messages: "my-env: evaluate".
        runs: of the class of these contexts.

    Raises:
        BackendError: a sandbox failed in one of its calls, even if the coroutine caught that.
        RewardError: a call was never awaited, or has not ended.
    """
    scope = CallScope(name, runs=runs)
    try:
        with scope.entered():
            result: T = await scope.wrapped(coroutine)
    except Exception as error:
        if scope.failure is not None and error is not scope.failure:
            raise scope.failure from error
        raise
    if (wrong := scope.failure or scope.problem()) is not None:
        raise wrong
    return result


def called(method: str) -> str:
    """A call for messages, with the file and the line of the caller's caller."""
    frame = sys._getframe(2)
    return f"{method}() at {frame.f_code.co_filename}:{frame.f_lineno}"


def result_of(
    what: str,
    make: Callable[[], Coroutine[Any, Any, T]],
    loop: asyncio.AbstractEventLoop | None,
    scope: CallScope | None,
) -> T | ScopedCall[T]:
    """What is to be awaited for the result of `make()`; in another thread than that of `loop`, the result.

    Args:
        what: the call, as `called` gives it.
        loop: where it has to run; None is the running one.
        scope: what the call belongs to.

    Raises:
        RewardIsOver: the scope has ended.
    """
    if scope is not None and scope.over:
        raise RewardIsOver(f"{scope.name} is over; its result is no longer needed ({what})")
    running = running_loop()
    if running is not None and (loop is None or running is loop):
        return ScopedCall(make, what, scope)
    if loop is None:
        raise RuntimeError(f"{what}: no event loop has used this context yet; use it in one first")
    return _wait_in_thread(what, make, loop, scope)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wait_in_thread(
    what: str,
    make: Callable[[], Coroutine[Any, Any, T]],
    loop: asyncio.AbstractEventLoop,
    scope: CallScope | None,
) -> T:
    over = f"{scope.name if scope else 'the run'} is over; its result is no longer needed ({what})"
    coroutine = make()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError as error:  # the loop is closed
        coroutine.close()
        raise RewardIsOver(over) from error
    waiting = scope.waiting if scope is not None else set()
    waiting.add(future)
    if scope is not None and scope.over:  # in between
        future.cancel()
    try:
        if not futures.wait([future], _LOOK).done:
            _watch_loop(what, future, loop, scope, over)
        result: T = future.result()
        return result
    except futures.CancelledError:
        raise RewardIsOver(over) from None
    finally:
        waiting.discard(future)


def _watch_loop(
    what: str, future: futures.Future[Any], loop: asyncio.AbstractEventLoop, scope: CallScope | None, over: str
) -> None:
    """Wait for the end of a call, unless its event loop waits for this thread."""
    from lachesis.rewards.blocked_loop import BlockedLoop, LoopWatch  # late: most calls end at once

    blocked = LoopWatch(loop_threads.get(loop))
    while not future.done():
        if loop.is_closed():
            raise RewardIsOver(over)
        if (place := blocked.look()) is not None:
            problem = BlockedLoop(
                f"{what} waits in a thread for the event loop, and the event loop waits for that "
                f"thread at {place}; await the thread there: `await asyncio.to_thread(...)`, or "
                "`await loop.run_in_executor(...)`"
            )
            if scope is not None:
                scope.stuck = problem
            future.cancel()
            raise problem
        futures.wait([future], _LOOK)
