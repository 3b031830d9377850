"""Whether an event loop waits for a thread that waits for the event loop."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import _base, thread
from types import FrameType
from typing import Any

from lachesis.rewards.reward import RewardError

_WAITS = frozenset(module.__file__ for module in (threading, queue, _base, thread))
"""Files of the standard library in which a thread waits for others."""
_PATIENCE = 30.0
"""Seconds in one wait without a time limit of which it cannot be seen what for: other code may block the loop too."""


class BlockedLoop(RewardError):
    """A call in a thread can never end, since its event loop waits for the thread."""


class LoopWatch:
    """Looks from a thread that waits for an event loop at what the loop's thread does."""

    def __init__(self, loop_thread: int | None) -> None:
        self._loop_thread = loop_thread
        self._place: tuple[int, int] | None = None
        self._since = 0.0

    def look(self) -> str | None:
        """Where the event loop waits for this thread, if it does: file and line.

        It does where it waits for the end of this thread or of its work item, and where it has been in the same wait of
        unknown purpose for long.
        """
        frame = sys._current_frames().get(self._loop_thread or 0)
        if frame is None or frame.f_code.co_filename not in _WAITS:
            self._place = None
            return None
        mine: set[int] = {id(threading.current_thread()), *_work_items(sys._getframe())}
        place, now = (id(frame), frame.f_lasti), time.monotonic()
        if place != self._place:
            self._place, self._since = place, now
        known, limited = False, False
        outside: FrameType | None = frame
        while outside is not None and outside.f_code.co_filename in _WAITS:
            variables = dict(outside.f_locals)
            known = known or any(_holds(value, mine) for value in variables.values())
            limited = limited or variables.get("timeout") is not None
            outside = outside.f_back
        if outside is None or not (known or (not limited and now - self._since > _PATIENCE)):
            return None
        return f"{outside.f_code.co_filename}:{outside.f_lineno}"


def _work_items(frame: FrameType | None) -> Iterator[int]:
    """The futures that this thread of an executor works on."""
    while frame is not None:
        if frame.f_code.co_filename == thread.__file__ and (item := frame.f_locals.get("self")) is not None:
            yield id(getattr(item, "future", None))
        frame = frame.f_back


def _holds(value: Any, wanted: set[int]) -> bool:
    if id(value) in wanted:
        return True
    return isinstance(value, list | tuple | set | frozenset) and any(id(each) in wanted for each in tuple(value))
