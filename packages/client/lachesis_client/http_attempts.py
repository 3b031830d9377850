"""One attempt of a request: what its answer says, whether another one may help, and when."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import orjson

from backends import retry_after
from lachesis_client.errors import BadResponse, InferenceError

_FIRST_DELAY = 0.5
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
    """See `backends.retry_after.retry_delay`."""
    return retry_after.retry_delay(attempt, asked, _FIRST_DELAY if first is None else first)


def check_answer(answer: dict[str, Any], check: Callable[[dict[str, Any]], object] | None) -> None:
    """Raises `Failed` for an answer without a completion, which another attempt may have."""
    try:
        if check is not None:
            check(answer)
    except BadResponse as nothing:
        raise Failed(nothing.reason, final=nothing) from None
