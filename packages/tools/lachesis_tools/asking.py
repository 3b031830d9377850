"""Requests to services beside the model's own server: search engines, models that see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from backends.errors import BackendError

ATTEMPTS = 3


class ServiceUnavailable(BackendError):
    """A service that a tool asks failed: nothing that a model did, and nothing that it reads."""


async def asked(
    method: str,
    url: str,
    *,
    timeout: float,
    pause: float = 1.0,
    final: Callable[[Mapping[str, Any]], bool] = lambda answer: False,
    **request: Any,
) -> tuple[int, Mapping[str, Any]]:
    """Status and JSON object of an answer; an empty object where it is not JSON.

    Args:
        timeout: Seconds of one attempt.
        pause: Seconds before the second attempt; twice as many before the third.
        final: Whether an answer with 429 or 5xx is one that another attempt would not change.
        request: Keyword arguments of `aiohttp.request`.

    Raises:
        ServiceUnavailable: it does not answer, is overloaded or broken, in every attempt.
    """
    import aiohttp

    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(pause * attempt)
        try:
            async with aiohttp.request(method, url, timeout=aiohttp.ClientTimeout(timeout), **request) as response:
                status, answer = response.status, _object(await response.read())
            if (status != 429 and status < 500) or final(answer):
                return status, answer
            problem = f"answers {status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"does not answer: {error or type(error).__name__}"
    raise ServiceUnavailable(f"{url} {problem}, in {ATTEMPTS} attempts; check that it runs and is not overloaded")


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}
