"""One attempt of a request: what its answer says, whether another one may help, and when."""

from __future__ import annotations

import email.utils
import json
import random
import time
from collections.abc import Callable
from datetime import UTC
from typing import Any, Final

import orjson

from lachesis_client.errors import BadResponse, InferenceError

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
_LONGEST_PAUSE, _AN_EPOCH = 86_400.0, 1e9
ARRAY: Final = "array"
"""The key under which `HttpAnswer.body` holds an answer that is a JSON array."""


class Failed(Exception):
    """A transient failure of one attempt.

    Args:
        retry_after: the delay in seconds that the server requests.
        final: raised when no further attempt is made; None is `ServerUnavailable`.
    """

    def __init__(self, cause: str, retry_after: float | None = None, *, final: InferenceError | None = None) -> None:
        self.retry_after = retry_after
        self.final = final
        super().__init__(cause)


def decode(raw: bytes) -> dict[str, Any] | None:
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            answer = json.loads(raw)  # NaN logprobs, lone surrogates
        except (ValueError, RecursionError):
            return None
    if isinstance(answer, list):
        return {ARRAY: answer}
    return answer if isinstance(answer, dict) else None


def retry_delay(attempt: int, asked: float | None = None, first: float | None = None) -> float:
    """Seconds before the next attempt: exponential, and at least what the server requests; jitter spreads the clients.

    A server that requests too little would use up all attempts before its pause is over.
    """
    first = _FIRST_DELAY if first is None else first
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


def check_answer(answer: dict[str, Any], check: Callable[[dict[str, Any]], object] | None) -> None:
    """Raises `Failed` for an answer without a completion, which another attempt may have."""
    try:
        if check is not None:
            check(answer)
    except BadResponse as nothing:
        raise Failed(nothing.reason, final=nothing) from None
