"""Rewards that still compute when their time is over: where they are, and an end to it.

An agent can leave text for which a regular expression backtracks for hours, or a number up to which a loop counts. The
position of the code then tells who is responsible, as for an exception. Code that only waits, for example for a
service, is left alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

from lachesis.rewards.reward import RewardError
from lachesis.rewards.statements import is_own

T = TypeVar("T")
log = logging.getLogger(__name__)

_PART = 4.0
"""One of so many parts of the limit is what the code must have had of a processor."""
_SOON, _AGAIN = 0.05, 1.0
"""Seconds after which it is looked again, and after which code that went on is ended again."""


class OutOfTime(BaseException):
    """Ends the environment's code. No `except Exception` of its author may take it for an error of the agent's."""


class RewardTooSlow(RewardError):
    """The time of a reward was over while it computed. The traceback is the place."""


class Stepped(Coroutine[Any, Any, T]):
    """A coroutine of which each step runs inside a function.

    Args:
        run: calls the function that it is given with the other argument.
    """

    __slots__ = ("_coroutine", "_run")

    def __init__(self, coroutine: Coroutine[Any, Any, T], run: Callable[..., Any]) -> None:
        self._coroutine = coroutine
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # `cr_frame` and others, for those who print tasks

    def __repr__(self) -> str:
        return repr(self._coroutine)

    def __await__(self) -> Generator[Any, Any, T]:
        return self  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        return self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()


class OwnWork:
    """Processor time of the environment's code in one call, on all threads that are known to run it."""

    __slots__ = ("_leaving", "_running", "_seconds", "kept_loop")

    def __init__(self) -> None:
        self._seconds = 0.0
        self.kept_loop = 0.0
        """Seconds for which it kept the event loop: nothing else went on."""
        self._leaving = threading.Lock()
        self._running: dict[int, float] = {}
        """By the threads in which it runs now, the processor time that they had taken before."""

    def over(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """A coroutine that is a part of the work."""
        return Stepped(coroutine, self.run)

    def run(self, function: Callable[..., T], *args: object) -> T:
        """The value of a function that is a part of the work."""
        thread = threading.get_ident()
        if thread in self._running:
            return function(*args)
        since = time.monotonic()
        begun = self._running[thread] = time.thread_time()
        try:
            return function(*args)
        finally:
            self._seconds += time.thread_time() - begun
            if asyncio._get_running_loop() is not None:
                self.kept_loop += time.monotonic() - since
            try:
                self._leave(thread)
            except OutOfTime:
                self._leave(thread)
                raise

    def _leave(self, thread: int) -> None:
        with self._leaving:
            self._running.pop(thread, None)

    def end(self, thread: int) -> None:
        """Raise `OutOfTime` in a thread that works. Nothing but the work meets it."""
        with self._leaving:  # so it cannot leave meanwhile
            if thread in self._running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))

    def busiest(self, limit: float) -> int | None:
        """The thread that works now and took the most, where all together took enough of `limit`, in seconds."""
        taken = {}
        for thread, begun in list(self._running.items()):
            if thread in self._running:  # so it is alive: the clock of another one is none
                taken[thread] = time.clock_gettime(time.pthread_getcpuclockid(thread)) - begun
        enough = self._seconds + sum(taken.values()) >= limit / _PART
        return max(taken, key=lambda thread: taken[thread]) if taken and enough else None

    def place(self, thread: int, task: asyncio.Task[Any]) -> TracebackType | None:
        """Where a thread is in it: a traceback down to the author's innermost function, from where `task`, in which the
        work began, waits for it."""
        frames: list[tuple[FrameType, int, int]] = []
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code is not OwnWork.run.__code__:
            if frames or is_own(frame.f_code.co_filename):
                frames.append((frame, frame.f_lasti, frame.f_lineno or 0))
            frame = frame.f_back
        trace = None
        for frame, at, line in [*frames, *(reversed(list(_waiting(task))) if frames else ())]:
            trace = TracebackType(trace, frame, at, line)
        return trace


def _waiting(task: asyncio.Task[Any]) -> Iterator[tuple[FrameType, int, int]]:
    """The frames of its coroutines, from the outside; none where it is what runs."""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None and not coroutine.cr_running:
        if is_own(frame.f_code.co_filename):
            yield frame, frame.f_lasti, frame.f_lineno or 0
        coroutine = coroutine.cr_await


class Overtime:
    """Looks at the work of one call when its time is over, and ends it.

    Args:
        task: in which the work began.
        ends: on the clock of the running event loop.
        limit: seconds of the whole time.
        said: what the error says.
    """

    def __init__(self, work: OwnWork, task: asyncio.Task[Any], ends: float, limit: float, said: str) -> None:
        self._work, self._task, self._ends, self._limit, self._said = work, task, ends, limit, said
        self._open = True
        self._ended = -_AGAIN
        self.found: RewardTooSlow | None = None
        """Set where the code worked."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # The loop looks before it cancels the call. It cannot where the code keeps it busy: another thread does then.
        timer = loop.call_at(self._ends - 0.0001, self._look)
        entry = _lookout.at(time.monotonic() + max(0.0, self._ends - loop.time()), self._look)
        try:
            yield
        finally:
            timer.cancel()
            _lookout.forget(entry)
            self._open = False

    def _look(self) -> None:
        thread = self._work.busiest(self._limit)
        if self.found is None and self._open:  # it may be between two parts of its work
            _lookout.at(time.monotonic() + _SOON, self._look)
        if thread is None:
            return
        if self.found is None and self._open:
            trace = self._work.place(thread, self._task)
            self.found = RewardTooSlow(self._said).with_traceback(trace) if trace is not None else None
        now = time.monotonic()
        if self.found is not None and now - self._ended > _AGAIN * 0.9:
            self._ended = now
            self._work.end(thread)
            _lookout.at(now + _AGAIN, self._look)


class _Lookout:
    """Calls functions at given times, in its own thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: list[tuple[float, int, list[Callable[[], None]]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def at(self, when: float, call: Callable[[], None]) -> list[Callable[[], None]]:
        """`when`: on the monotonic clock."""
        entry = [call]
        with self._changed:
            heapq.heappush(self._entries, (when, next(self._numbers), entry))
            if self._thread is None or not self._thread.is_alive():  # as after a fork
                self._thread = threading.Thread(target=self._run, name="overtime", daemon=True)
                self._thread.start()
            elif self._entries[0][2] is entry:
                self._changed.notify()
        return entry

    def forget(self, entry: list[Callable[[], None]]) -> None:
        entry.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._entries or self._entries[0][0] > time.monotonic():
                    rest = self._entries[0][0] - time.monotonic() if self._entries else None
                    self._changed.wait(rest)
                entry = heapq.heappop(self._entries)[2]
            for call in tuple(entry):
                try:
                    call()
                except Exception:
                    log.exception("a reward that is late could not be looked at")


_lookout = _Lookout()
