"""What makes the tokens of a server's completion trustworthy, whichever way they came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from lachesis_client.errors import BadResponse

ROUNDING: Final = 1e-5
"""How far above zero a logprob may be: float32 rounds probabilities of almost one to slightly more than one."""
FLOOR: Final = -9000.0
"""vLLM and its relatives write -9999 for minus infinity, which no sampled token has."""


def checked_completion(server: str, ids: object, logprobs: object, next_step: str) -> tuple[list[int], Sequence[float]]:
    """The sampled ids of a completion and their logprobs.

    Raises:
        BadResponse: one of them is missing or impossible. `server` and `next_step` are for its message.
    """
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        raise BadResponse(server, "a completion has no token ids or no logprobs", next_step)
    if len(ids) != len(logprobs):
        reason = f"a completion has {len(ids)} token ids, but {len(logprobs)} logprobs"
        raise BadResponse(server, reason, next_step)
    checked_ids(server, ids, next_step)
    if set(map(type, logprobs)) - {float} or not math.isfinite(sum(logprobs)) or _out_of_range(logprobs):
        logprobs = [_logprob(server, value, position) for position, value in enumerate(logprobs)]
    return ids, logprobs


def checked_ids(server: str, ids: list[Any], next_step: str) -> list[int]:
    """Raises BadResponse for what is not a token id."""
    # Whole lists at a time: a loop over 32k tokens would block the event loop for milliseconds.
    if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) < 1 << 32):
        wrong = next(token for token in ids if type(token) is not int or not 0 <= token < 1 << 32)
        raise BadResponse(server, f"{wrong!r} is not a token id", next_step)
    return ids


def _logprob(server: str, value: object, position: int) -> float:
    if isinstance(value, (int, float)) and type(value) is not bool:
        if FLOOR < value <= 0:
            return float(value)
        if 0 < value <= ROUNDING:
            return 0.0
    raise BadResponse(
        server,
        f"the logprob of sampled token {position} is {value!r}, which no sampled token has",
        "such a completion cannot be trained on; if it repeats, look at the server's log for NaN",
    )


def _out_of_range(logprobs: Sequence[float]) -> bool:
    return bool(logprobs) and not FLOOR < min(logprobs) <= max(logprobs) <= 0
