"""Calls of coroutine functions without `await`, in coroutines and in threads.

The interface of the removed Hermes stack is synchronous, and its environments call it inside `async def`. Such a call
stops the coroutine (see `driven`): everything else continues, and time limits and cancellation reach the
coroutine at the call. In another thread a call blocks that thread.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from concurrent import futures
from types import FrameType
from typing import Any, TypeVar

from lachesis.agent.blocked_loop import BlockedLoop, LoopWatch
from lachesis.agent.call_scope import CallScope, RewardIsOver, ScopedCall, loop_threads
from lachesis.agent.call_sites import is_awaited
from lachesis.agent.driven import Driven, current_runner, stop_for

T = TypeVar("T")

_LOOK = 0.25
"""Seconds between looks at whether the event loop can still answer a thread."""


async def with_blocking_calls(coroutine: Coroutine[Any, Any, T], *, name: str = "the environment") -> T:
    """The result of a coroutine of the environment, which may call `ToolContext` with and without `await`.

    Args:
        name: what runs, for messages: "my-env: evaluate".

    Raises:
        BackendError: a sandbox failed in one of its calls, even if the coroutine caught that.
        RewardError: a call was never awaited, or is left to itself.
    """
    scope = CallScope(name)
    try:
        with scope.entered():
            result: T = await Driven(coroutine)
    except Exception as error:
        if scope.failure is not None and error is not scope.failure:
            raise scope.failure from error
        raise
    if (wrong := scope.failure or scope.problem()) is not None:
        raise wrong
    return result


def result_of(
    method: str,
    make: Callable[[], Coroutine[Any, Any, T]],
    loop: asyncio.AbstractEventLoop | None,
    scope: CallScope | None,
) -> T | ScopedCall[T]:
    """The result of `make()`, or what the caller's caller awaits for it.

    Args:
        method: the called method, for example `ctx.terminal`.
        loop: where it has to run; None is the running one.
        scope: what the call belongs to.

    Raises:
        RewardIsOver: the scope has ended.
    """
    frame = sys._getframe(2)
    if scope is not None and scope.over:
        raise RewardIsOver(f"{scope.name} is over; its result is no longer needed ({_where(method, frame)})")
    running = running_loop()
    if running is None or (loop is not None and running is not loop):
        if loop is None:
            raise RuntimeError(f"{_where(method, frame)}: no event loop has used this context yet; use it in one first")
        return _wait_in_thread(method, make, loop, scope, frame)
    runner = current_runner()
    if runner is None or is_awaited(sys._getframe(1)):
        return ScopedCall(make, _where(method, frame), scope)
    return stop_for(make(), runner)


def _where(method: str, frame: FrameType) -> str:
    return f"{method}() at {frame.f_code.co_filename}:{frame.f_lineno}"


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wait_in_thread(
    method: str,
    make: Callable[[], Coroutine[Any, Any, T]],
    loop: asyncio.AbstractEventLoop,
    scope: CallScope | None,
    frame: FrameType,
) -> T:
    over = f"{scope.name if scope else 'the run'} is over; its result is no longer needed ({_where(method, frame)})"
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
    blocked = LoopWatch(loop_threads.get(loop))
    try:
        while not futures.wait([future], _LOOK).done:
            if loop.is_closed():
                raise RewardIsOver(over)
            if (place := blocked.look()) is not None:
                problem = BlockedLoop(
                    f"{_where(method, frame)} waits in a thread for the event loop, and the event loop waits for that "
                    f"thread at {place}; await the thread there: `await asyncio.to_thread(...)`, or "
                    "`await loop.run_in_executor(...)`"
                )
                if scope is not None:
                    scope.stuck = problem
                future.cancel()
                raise problem
        result: T = future.result()
        return result
    except futures.CancelledError:
        raise RewardIsOver(over) from None
    finally:
        waiting.discard(future)
