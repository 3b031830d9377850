"""The event loop: one thread and one epoll call the handlers of ready descriptors and due timers."""

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
    """Runs until `end` is called."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why it ends; None while it runs."""
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
        """Call `callback` later. Setting the third item of the timer to None cancels it."""
        self.counter += 1
        if self.counter % 1000 == 0:  # most timers are cancelled: commands end long before their limits
            self.timers = [timer for timer in self.timers if timer[2] is not None]
            heapq.heapify(self.timers)
        timer: Timer = [time.monotonic() + seconds, self.counter, callback]
        if seconds < math.inf:
            heapq.heappush(self.timers, timer)
        return timer

    def end(self, reason: str) -> None:
        """End the loop. The first reason is kept."""
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
