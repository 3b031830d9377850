"""One attempt of a request: what its answer says, whether another one may help, and when."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

import orjson

from lachesis_client.errors import BadResponse, InferenceError

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
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


def check_answer(answer: dict[str, Any], check: Callable[[dict[str, Any]], object] | None) -> None:
    """Raises `Failed` for an answer without a completion, which another attempt may have."""
    try:
        if check is not None:
            check(answer)
    except BadResponse as nothing:
        raise Failed(nothing.reason, final=nothing) from None
