"""An environment that runs on its own event loop, in a thread next to the trainer."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from backends.errors import LachesisError

T = TypeVar("T")


class EnvThread:
    """Opens `env.running()` in a new thread, and runs calls inside it.

    Raises:
        LachesisError: what `env.running()` raises.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._stop = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._open: Future[tuple[asyncio.AbstractEventLoop, contextvars.Context]] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"lachesis {env.run_name}", daemon=True)
        self._thread.start()
        try:
            self._loop, self._context = self._open.result()
        except BaseException:
            self._thread.join()
            raise

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Begin `call()` inside the run. Cancelling the future cancels it."""
        if not self.alive:
            raise LachesisError(f"{self._env.run_name} is closed; its rollouts are over")
        return asyncio.run_coroutine_threadsafe(self._inside(call), self._loop)

    def call(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `call()`, which runs inside the run."""
        return self.submit(call).result()

    def close(self) -> None:
        """End the run: sandboxes are removed, calls that still go on are cancelled. Raises what the end raises."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._ended.result()

    async def _inside(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        # Tools and contexts find their run in context variables, which only tasks of the run have.
        task = self._loop.create_task(call(), context=self._context.copy())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await task

    def _run(self) -> None:
        try:
            asyncio.run(self._hold())
            self._ended.set_result(None)
        except BaseException as error:
            if not self._open.done():
                self._open.set_exception(error)
            self._ended.set_exception(error)

    async def _hold(self) -> None:
        async with self._env.running(training=True):
            self._open.set_result((asyncio.get_running_loop(), contextvars.copy_context()))
            await self._stop.wait()
            for task in self._calls:
                task.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
