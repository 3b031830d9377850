"""When a server that was asked too much is asked again."""

from __future__ import annotations

import email.utils
import random
import time
from datetime import UTC

_LONGEST_PAUSE, _AN_EPOCH = 86_400.0, 1e9
_LONGEST_DELAY = 30.0
"""Seconds, where the server asks for none."""


def retry_delay(attempt: int, asked: float | None, first: float) -> float:
    """Seconds before the next attempt: exponential, and at least what the server requests; jitter spreads the clients.

    A server that requests too little would use up all attempts before its pause is over.
    """
    own = min(_LONGEST_DELAY, first * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)
    if asked is None:
        return own
    return max(own, asked + random.uniform(0.0, min(1.0, 0.1 * asked)))


def retry_after(header: str | None, date: str | None = None) -> float | None:
    """Seconds from a Retry-After header in either of its forms; None where it names no time to come, or none within a
    day.

    Args:
        date: the Date header, by which a time is counted: the clocks of the two machines may differ.
    """
    if header is None:
        return None
    now = _time(date) or time.time()
    try:
        seconds = float(header)
        if seconds > _AN_EPOCH:  # some servers send the time itself
            seconds -= now
    except ValueError:
        then = _time(header)
        if then is None:
            return None
        seconds = then - now
    return seconds if 0 < seconds <= _LONGEST_PAUSE else None


def _time(date: str | None) -> float | None:
    try:
        read = email.utils.parsedate_to_datetime(date or "")
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
