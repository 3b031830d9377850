"""When a server that was asked too much wants to be asked again."""

from __future__ import annotations

import email.utils
import time
from datetime import UTC

_LONGEST_PAUSE, _AN_EPOCH = 86_400.0, 1e9


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
