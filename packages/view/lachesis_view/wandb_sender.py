"""What a run sends to W&B: from a thread, since W&B's own process may stand still, and no run waits for it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lachesis_view.wandb_run import kill_service, say_gone

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that W&B may take for one line. It writes them into a socket, which takes none only when nobody reads it."""
FINISH_LIMIT = 300.0
"""Seconds that W&B may take to send the rest at the end of a run."""
SAID_AFTER = 10.0
"""Seconds of this after which it is said what is waited for."""
WAITING = 1000
"""Lines that may wait for W&B."""


class Sender:
    """Sends lines in their order, and never waits for W&B. Where W&B fails or stands still, the run goes on without it.

    To be made in the thread of the event loop: an environment may log to W&B by itself, and stand still there.
    """

    def __init__(self, run: Any) -> None:
        self.gone = False
        """W&B failed, or has taken nothing for `PATIENCE` seconds."""
        self.over = threading.Event()
        """Nothing more will be sent: all was, or W&B is gone."""
        self.dropped = 0
        self._run = run
        self._waiting: deque[Callable[[Any], object]] = deque()
        self._changed = threading.Condition()
        self._since: float | None = None
        """When the line in flight began."""
        self._closed: float | None = None
        self._finish: Callable[[Any], object] | None = None
        self._made_in = threading.get_ident()
        threading.Thread(target=self._work, name="wandb", daemon=True).start()
        threading.Thread(target=self._watch, name="wandb-watch", daemon=True).start()

    def send(self, line: Callable[[Any], object]) -> None:
        """Send a line soon. `line` is called with the run of W&B, in another thread."""
        with self._changed:
            if self.gone or self._closed is not None:
                return
            if len(self._waiting) < WAITING:
                self._waiting.append(line)
                self._changed.notify()
                return
            self.dropped += 1
        if self.dropped == 1:
            log.warning(
                "W&B takes lines more slowly than the run has them: %d wait, and further ones are dropped there until "
                "it has caught up; everything is in the run's own files",
                WAITING,
            )

    def close(self, exit_code: int) -> None:
        """Send the rest, and finish the run of W&B: `over` says when."""
        with self._changed:
            self._finish, self._closed = lambda run: run.finish(exit_code=exit_code), time.monotonic()
            self._changed.notify()

    def finish(self, exit_code: int) -> None:
        """Close, and wait for the end, not longer than `FINISH_LIMIT`."""
        self.close(exit_code)
        if not self.over.wait(SAID_AFTER):
            self._say_waiting()
            self.over.wait()

    async def finished(self, exit_code: int) -> None:
        """The same beside an event loop. Cancelled, it gives up: a second Ctrl-C waits for nothing."""
        self.close(exit_code)
        say = asyncio.get_running_loop().call_later(SAID_AFTER, self._say_waiting)
        try:
            while not self.over.is_set():  # noqa: ASYNC110  # of a thread, which may never set it
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.lose(TimeoutError("the run was ended before all was sent"))
            raise
        finally:
            say.cancel()

    def _say_waiting(self) -> None:
        log.warning(
            "W&B has not taken the rest of the run within %g s; it is waited for up to %g s", SAID_AFTER, FINISH_LIMIT
        )

    def lose(self, error: BaseException) -> None:
        """Go on without W&B, which is said once."""
        with self._changed:
            if self.over.is_set():
                return
            self.gone = True
            self._waiting.clear()
            self.over.set()
            self._changed.notify()
        if isinstance(error, TimeoutError):
            kill_service()  # or it keeps the end of this process waiting; its data is in its folder
        say_gone(error)

    def _work(self) -> None:
        try:
            while (line := self._next()) is not None:
                line(self._run)
        except BaseException as error:  # W&B raises SystemExit too
            self.lose(error)
        else:
            self.over.set()

    def _next(self) -> Callable[[Any], object] | None:
        with self._changed:
            self._since = None
            while not self._waiting and self._finish is None and not self.gone:
                self._changed.wait()
            if self.gone:
                return None
            if self._waiting:
                self._since = time.monotonic()
                return self._waiting.popleft()
            finish, self._finish = self._finish, _nothing_more
            return None if finish is _nothing_more else finish

    def _watch(self) -> None:
        """Notice that W&B stands still: here, or where an environment has called it in the thread of the event loop."""
        inside: float | None = None
        while not self.over.wait(min(1.0, PATIENCE / 4)):
            now = time.monotonic()
            inside = (now if inside is None else inside) if self._is_inside() else None
            closed, since = self._closed, [each for each in (self._since, inside) if each is not None]
            if since and now - min(since) > PATIENCE:
                self.lose(TimeoutError(f"it has taken nothing for {PATIENCE:g} s"))
            elif closed is not None and now - closed > FINISH_LIMIT:
                self.lose(TimeoutError(f"it did not finish within {FINISH_LIMIT:g} s"))

    def _is_inside(self) -> bool:
        """Whether the thread of the event loop is in a call of W&B."""
        frame = sys._current_frames().get(self._made_in)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] == "wandb":
                return True
            frame = frame.f_back
        return False


def _nothing_more(run: Any) -> None:
    """After the last line."""
