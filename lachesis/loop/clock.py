"""The time of one rollout, measured separately: the agent's own time, and its waiting.

The agent's own time is the time of its commands as they run, and of completions that were answered. Waiting is all time
spent by the infrastructure: a sandbox that is made, a connection that is restored, a queue for a slot of a server,
failed requests and the pauses after them. A request in flight may be a long completion or a server that hangs. Which of
them is not guessed: it goes on beyond the agent's time, and becomes its own time when it is answered.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable

from backends.errors import LachesisError


class WaitedTooLong(LachesisError):
    """Servers and sandboxes took more time than a rollout may wait."""


def _never() -> float:
    return 0.0


class Standstill:
    """For how long this process was stopped: by a signal, or paused with its container.

    A thread looks at the time each second. Code that keeps the event loop does not stop it, and what keeps all threads
    computes. Stops of less than about three seconds are not noticed.
    """

    _EVERY, _LEAST = 1.0, 3.0

    def __init__(self) -> None:
        self._seen, self._process = (0.0, 0.0, 0.0), 0

    def watch(self) -> None:
        """From now on, as long as this process lives."""
        if self._process != os.getpid():  # threads do not survive a fork
            self._seen, self._process = (0.0, time.monotonic(), time.process_time()), os.getpid()
            threading.Thread(target=self._look, name="standstill", daemon=True).start()

    def seconds(self) -> float:
        """So far, also before the thread has seen it."""
        before, since, computed = self._seen
        more = time.monotonic() - since
        if more > self._EVERY + self._LEAST:  # otherwise the processor time, which takes a system call, does not matter
            more -= time.process_time() - computed
        return before + more if more > self._EVERY + self._LEAST else before

    def _look(self) -> None:
        while True:
            time.sleep(self._EVERY)
            self._seen = self.seconds(), time.monotonic(), time.process_time()


standstill = Standstill()


class RolloutClock:
    """Measures one rollout, and ends it at its limits.

    Args:
        limit: seconds of the agent's own time; None means no limit.
        patience: seconds of waiting, and as many for the request in flight; None means no limit.
        waited: seconds so far that commands spent waiting for the infrastructure.
    """

    def __init__(self, limit: float | None, patience: float | None, waited: Callable[[], float] | None = None) -> None:
        self.own = 0.0
        """Seconds of the agent's own, settled."""
        self.waiting = 0.0
        self._limit, self._patience, self._waited = limit, patience, waited or _never
        self._since: float | None = None
        """When the request or the commands in flight began."""
        self._commands = False
        self._waited_before = 0.0
        self._timeout: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        standstill.watch()
        self._stood_before = standstill.seconds()

    def _stood(self) -> float:
        """Seconds for which this process was stopped. Limits are so much longer, whatever was measured meanwhile."""
        return standstill.seconds() - self._stood_before

    def wait_for(self, others: Callable[[], float]) -> None:
        """Count the seconds of `others` as waiting too, of which there are none so far."""
        before = self._waited
        self._waited = lambda: before() + others()

    def ask(self) -> None:
        """A request begins."""
        self._since, self._commands = time.monotonic(), False

    def answered(self, latency: float) -> None:
        """It was answered; the attempt that succeeded took `latency` seconds."""
        assert self._since is not None
        spent = time.monotonic() - self._since
        own = min(max(0.0, latency), spent)
        self.own += own
        self.waiting += spent - own
        self._since = None

    def run(self) -> None:
        """Commands begin."""
        self._waited_before = self._waited()
        self._since, self._commands = time.monotonic(), True

    def settle(self) -> None:
        """What is in flight has ended: commands, or a request without an answer."""
        self.own, self.waiting = self.now()
        self._since, self._commands = None, False

    def now(self) -> tuple[float, float]:
        """The agent's own time and its waiting, with what is in flight."""
        if self._since is None:
            return self.own, self.waiting
        spent = time.monotonic() - self._since
        own = max(0.0, spent - (self._waited() - self._waited_before)) if self._commands else 0.0
        return self.own + own, self.waiting + spent - own

    @property
    def used_up(self) -> bool:
        """Whether the agent's own time is over."""
        return self._limit is not None and self.own >= self._limit + self._stood()

    @property
    def waited_too_long(self) -> str:
        """The message when the rollout waited for too long; empty if it did not."""
        if self._patience is None or self.waiting < self._patience + self._stood():
            return ""
        return (
            f"servers and sandboxes took {self.waiting:.1f} s of {self.own + self.waiting:.1f} s, and a rollout waits "
            f"for {self._patience:g} s"
        )

    def start(self, timeout: asyncio.Timeout) -> None:
        """Let `timeout` expire when a limit is reached."""
        self._timeout = timeout
        self._look()

    def stop(self) -> None:
        """End the watch, and settle what is in flight."""
        if self._timer is not None:
            self._timer.cancel()
        self._timeout = None
        self.settle()

    def _look(self) -> None:
        """Now, and again at the first moment at which a limit can be reached."""
        if self._timeout is None:
            return
        own, waiting = self.now()
        stood = self._stood()
        left = math.inf if self._limit is None else self._limit + stood - own
        if self._patience is not None:  # a request in flight may yet become the agent's own time
            asking = waiting - self.waiting if not self._commands else 0.0
            left = min(left, self._patience + stood - max(asking, waiting - asking))
        if left == math.inf:
            return
        loop = asyncio.get_running_loop()
        if left <= 0:
            self._timeout.reschedule(loop.time())
        else:
            self._timer = loop.call_later(left + 0.001, self._look)
