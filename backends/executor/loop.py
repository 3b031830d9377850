"""One thread, one epoll: descriptors that are ready and timers that are due call their handlers."""

from __future__ import annotations

import heapq
import math
import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    Timer: TypeAlias = list[Any]


class Loop:
    """Runs until there is a reason to end."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why it is to end."""
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[int], Any]] = {}
        self.timers: list[Timer] = []
        self.counter = 0

    def watch(self, fd: int, events: int, handler: Callable[[int], Any]) -> None:
        if fd in self.handlers:
            self.poll.modify(fd, events)
        else:
            self.poll.register(fd, events)
        self.handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None):
            self.poll.unregister(fd)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` later; the timer is off once its third item is None."""
        self.counter += 1
        if self.counter % 1000 == 0:  # commands end long before their time limits: most timers are off
            self.timers = [timer for timer in self.timers if timer[2] is not None]
            heapq.heapify(self.timers)
        timer: Timer = [time.monotonic() + seconds, self.counter, callback]
        if seconds < math.inf:
            heapq.heappush(self.timers, timer)
        return timer

    def end(self, reason: str) -> None:
        """The first reason counts."""
        self.reason = self.reason or reason

    def run(self) -> None:
        while self.reason is None:
            wait = -1.0
            while self.timers and self.timers[0][2] is None:
                heapq.heappop(self.timers)
            if self.timers:
                wait = min(max(0.0, self.timers[0][0] - time.monotonic()), 3600.0)
            for fd, _ in self.poll.poll(wait):
                if fd in self.handlers:  # an earlier handler of this round may have closed it
                    self.handlers[fd](fd)
            now = time.monotonic()
            while self.timers and self.timers[0][0] <= now:
                callback = heapq.heappop(self.timers)[2]
                if callback is not None:
                    callback()
