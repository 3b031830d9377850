"""Signals that end a run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any


@contextmanager
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
        with suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, stop, number.name)
            if earlier == signal.getsignal(number):  # the function that asyncio registers for each of its signals
                restore.append(partial(loop.add_signal_handler, number, task.cancel))
            else:
                restore.append(partial(loop.remove_signal_handler, number))
                restore.append(partial(signal.signal, number, earlier))
    try:
        yield
    finally:
        for call in restore:
            call()
