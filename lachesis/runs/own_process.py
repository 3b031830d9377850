"""How a command configures its own process, so that a thousand rollouts wait for each other as little as possible.

The event loop, the garbage collector and the switching of threads belong to a process and not to a run. So the commands
call `run`, and nothing changes in a process that awaits `env.process_manager()` itself.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import os
import resource
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from lachesis.tracebacks import headline

log = logging.getLogger(__name__)

T = TypeVar("T")

EVENTS = 8
"""Sockets that are served in one turn of the event loop, at most."""
LONG_TURN = 0.003
"""Seconds of CPU time of a turn after which the next one serves half as many."""
SWITCH_INTERVAL = 0.001
"""Seconds that a thread may compute in Python while the event loop waits for the interpreter, at each system call."""
LOOK_EVERY, FULL_EVERY = 1.0, 600.0
"""Seconds between two looks at the memory, and at most between two full collections."""
AT_ONCE = 1.0
"""Seconds within which Ctrl-C pressed again is the same one."""
GROWTH, LEAST_GROWTH = 0.5, 512 << 20
"""The share and the bytes by which memory must grow before a full collection."""
FILES = 1 << 16
"""Open files and sockets at most, where the system allows as many: a shell's 1,024 are too few for 200 rollouts."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` for a process that has no other work, as the commands do it: `run(env.process_manager())`.

    The event loop serves few sockets at once, garbage is collected when memory has grown, threads give way sooner, and
    more files may be open. All of it is undone at the end. Returns and raises what `main` does.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with (
            rare_collections() as collections,
            _one_ctrl_c() as begins,
            asyncio.Runner(loop_factory=fair_loop) as runner,
        ):
            return runner.run(_watched(main, collections, begins))
    finally:
        sys.setswitchinterval(interval)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def _one_ctrl_c() -> Iterator[Callable[[], None]]:
    """Ctrl-C cancels the task that calls what this yields. Pressed again at once it is the same one; later it raises
    KeyboardInterrupt, for a run that hangs.

    asyncio would raise that at every further one, wherever the program is: in the cleanup too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []
    before, pressed = signal.getsignal(signal.SIGINT), list[float]()

    def begins() -> None:
        tasks.append((asyncio.get_running_loop(), asyncio.current_task()))

    def handle(*_: Any) -> None:
        pressed.append(time.monotonic())
        if len(pressed) > 1 and pressed[-1] - pressed[-2] <= AT_ONCE:
            return
        if len(pressed) > 1 or not tasks or tasks[0][1] is None or tasks[0][1].done():
            raise KeyboardInterrupt
        tasks[0][0].call_soon_threadsafe(tasks[0][1].cancel)

    if before is not signal.default_int_handler:
        yield begins
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield begins
    except asyncio.CancelledError:
        if pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        if not pressed:  # or it is, until the process has ended
            signal.signal(signal.SIGINT, before)


async def _watched(main: Coroutine[Any, Any, T], collections: RareCollections, begins: Callable[[], None]) -> T:
    begins()
    asyncio.get_running_loop().set_exception_handler(_say_once())
    watching = asyncio.create_task(collections.watch())
    try:
        return await main
    finally:
        watching.cancel()


def _say_once() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler of exceptions that nobody awaits. A server at the limit of open files meets one at each connection."""
    said = set[str]()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif (line := f"{context['message']}: {headline(error)}") not in said:
            said.add(line)
            log.warning(line)

    return handle


# The event loop.


def fair_loop() -> asyncio.AbstractEventLoop:
    """An event loop that serves a few sockets before it looks at timers and threads again, however many are ready.

    Answers to a thousand requests come together. asyncio would serve all of them in one turn, in which everything else
    waits. A loop of another kind, which the process has chosen by a policy, stays.
    """
    loop = asyncio.new_event_loop()
    if sys.platform != "linux" or type(loop) is not asyncio.SelectorEventLoop:
        return loop
    loop.close()
    return asyncio.SelectorEventLoop(FewAtOnce())


if sys.platform == "linux":

    class FewAtOnce(selectors.EpollSelector):
        """Reports at most `EVENTS` sockets. The kernel puts them at the end of its queue: the others come next.

        A turn with 8 answers takes 3 ms in Phase 1, and 5 times as long where prompts are long. So it reports fewer
        while turns take long.
        """

        def __init__(self) -> None:
            super().__init__()
            self._limit = EVENTS
            self._turn_began: float | None = None
            """CPU time; None for a turn with one socket, which cannot serve fewer: to look at the clock takes a
            system call."""
            self._few = select.epoll.fromfd(os.dup(self.fileno()))  # the same sockets, polled with a limit

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """As `selectors.EpollSelector`."""
            # The kernel counts milliseconds: rounded down, a short wait would be none, again and again.
            seconds = -1.0 if timeout is None else math.ceil(max(timeout, 0.0) * 1e3) * 1e-3
            if self._turn_began is not None:
                long = time.thread_time() - self._turn_began > LONG_TURN
                self._limit = max(1, self._limit // 2) if long else min(EVENTS, self._limit + 1)
                self._turn_began = None
            try:
                found = self._few.poll(seconds, self._limit)
            except InterruptedError:
                return []
            if len(found) > 1 or len(found) == self._limit:
                self._turn_began = time.thread_time()
            ready = []
            for descriptor, event in found:
                with suppress(KeyError):
                    key = self.get_key(descriptor)
                    write = selectors.EVENT_WRITE if event & ~select.EPOLLIN else 0
                    read = selectors.EVENT_READ if event & ~select.EPOLLOUT else 0
                    ready.append((key, (write | read) & key.events))
            return ready

        def close(self) -> None:
            """As `selectors.EpollSelector`."""
            self._few.close()
            super().close()


# The garbage collector.


class RareCollections:
    """Decides when garbage is collected: when memory has grown, and not when there are more objects.

    A full collection looks at every object, also at those of all rollouts in flight, and everything waits: 0.1 to
    0.5 s with a thousand rollouts. A collection of new objects finds all that the requests in flight have made. Both
    free cycles only. Rollouts and their records are in none, and everything else is freed at once anyway.
    """

    def __init__(self) -> None:
        self._note()

    def freeze(self) -> None:
        """Collect now, ignore the surviving objects (modules, the dataset, the tokenizer) from now on, and decide when
        to collect.

        Before that, in `setup`, the collector starts by itself: `watch` has no turn while it blocks the event loop.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(0)  # not `gc.disable`: libraries that time something enable it again
        self._note()

    async def watch(self) -> None:
        """Collect when it is time, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self.look()

    def look(self) -> None:
        """Collect if it is time."""
        if resident_bytes() > self._limit or time.monotonic() > self._due:
            gc.collect()
            self._note()

    def _note(self) -> None:
        now = resident_bytes()
        self._limit = now + max(int(GROWTH * now), LEAST_GROWTH)
        self._due = time.monotonic() + FULL_EVERY


_current: ContextVar[RareCollections | None] = ContextVar("rare_collections", default=None)


@contextmanager
def rare_collections() -> Iterator[RareCollections]:
    """Inside, the collector does not start by itself after `freeze`; in processes that are forked there, it does."""
    before = gc.get_threshold()
    of_children: list[tuple[int, int, int]] = [before]

    def in_child() -> None:
        for thresholds in of_children:
            gc.set_threshold(*thresholds)

    os.register_at_fork(after_in_child=in_child)
    collections = RareCollections()
    token = _current.set(collections)
    try:
        yield collections
    finally:
        _current.reset(token)
        of_children.clear()
        gc.set_threshold(*before)
        gc.unfreeze()


def started() -> None:
    """A run has started everything that lives as long as it does. No effect outside `run`."""
    if (collections := _current.get()) is not None:
        collections.freeze()


def resident_bytes() -> int:
    """The memory of this process without mapped files; 0 where the system does not say (macOS)."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
