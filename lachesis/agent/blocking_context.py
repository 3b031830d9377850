"""`ToolContext` for rewards that are plain functions: every method waits for its result."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from lachesis.agent.tool_context import ToolContext


class RewardIsOver(RuntimeError):
    """A reward that ran out of time, or whose rollout was cancelled, still uses its context."""


class BlockingToolContext:
    """`ToolContext` for a plain `def`: every method blocks its thread until the result is there.

    On the event loop's own thread, where blocking would stop everything, a method returns its awaitable instead: a
    plain function that hands over to a coroutine works, too.
    """

    def __init__(self, context: ToolContext, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._pending: set[Future[Any]] = set()
        self._verifiers: list[BlockingToolContext] = []
        self._over = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = getattr(self._context, name)
        if not inspect.iscoroutinefunction(method):  # `failure`, for example
            return method

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._loop_thread:
                return method(*args, **kwargs)
            return self._wait(method, args, kwargs)

        return call

    def _wait(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ended():
            raise RewardIsOver(f"the reward of {self.task_id} is over; its result is no longer wanted")
        future = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop)
        self._pending.add(future)
        if self._ended():  # in between
            future.cancel()
        try:
            result = future.result()
        except CancelledError:
            raise RewardIsOver(f"the reward of {self.task_id} is over; its result is no longer wanted") from None
        finally:
            self._pending.discard(future)
        return self._verifier(result) if isinstance(result, ToolContext) else result

    def _verifier(self, context: ToolContext) -> BlockingToolContext:
        blocking = BlockingToolContext(context, self._loop)
        blocking._loop_thread = self._loop_thread
        self._verifiers.append(blocking)
        if self._ended():
            blocking.end()
        return blocking

    def _ended(self) -> bool:
        return self._over

    def end(self) -> None:
        """Make the next use of the context an error, and the current one too: the reward's thread then ends."""
        self._over = True
        for future in tuple(self._pending):
            future.cancel()
        for verifier in self._verifiers:
            verifier.end()
