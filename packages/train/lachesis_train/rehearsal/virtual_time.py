"""An event loop whose clock does not wait: when nothing is ready, it jumps to the next timer."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("every task waits, and no timer is left: virtual time cannot go on")
        if not events and timeout:
            # A timer is due only once the clock is past it, which rounding prevents after some months.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is in virtual seconds from 0. Functions for threads run at once, in the loop, so that no clock jumps
    over them and runs with the same seed are equal."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine whose sleeps and timeouts take no real time.

    Raises:
        RuntimeError: it waits for something that nothing in the loop will do.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
