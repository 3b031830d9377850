"""Requests to services beside the model's own server: search engines, models that see."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from backends.errors import BackendError
from backends.retry_after import retry_after
from lachesis_tools.gate import PATIENCE, Gate
from lachesis_tools.tool_session import waiting

T = TypeVar("T")
ATTEMPTS: Final = 3
"""Of a request that fails."""
REFUSALS: Final = 6
"""Of a request that a service has no room for, where it does not say when it has."""
MAX_BYTES: Final = 32_000_000
"""Of an answer."""


class ServiceUnavailable(BackendError):
    """A service that a tool asks failed: nothing that a model did, and nothing that it reads."""


class AnswerTooLarge(ServiceUnavailable):
    """A service answers with more than there is room for. What it was asked for may be at fault."""


async def asked(
    method: str,
    url: str,
    read: Callable[[int, Mapping[str, Any]], T],
    *,
    gate: Gate,
    timeout: float,
    pause: float = 1.0,
    final: Callable[[Mapping[str, Any]], bool] = lambda answer: False,
    **request: Any,
) -> T:
    """What `read` makes of an answer.

    Args:
        read: Gets the status and the JSON object, which is empty where the answer is none. An error of Python's own,
            such as `KeyError`, says that the answer has another form than it should, and the service is asked again.
        gate: Of this service.
        timeout: Seconds of one attempt.
        pause: Seconds before the second attempt after a failure; twice as many before the third.
        final: Whether an answer with 429 or 5xx is one that another attempt would not change.
        request: Keyword arguments of `aiohttp.request`.

    Raises:
        ServiceUnavailable: it does not answer, is overloaded or broken, or answers in another form, in every attempt.
        AnswerTooLarge: the answer has more than `MAX_BYTES`.
    """
    import aiohttp

    problem, failures, refusals = "", 0, 0
    deadline = time.monotonic() + PATIENCE
    while failures < ATTEMPTS and refusals < REFUSALS:
        passed_at = await gate.passed()
        try:
            async with aiohttp.request(method, url, timeout=aiohttp.ClientTimeout(timeout), **request) as response:
                status, answer = response.status, _object(await _bounded(url, response.content))
                wanted = retry_after(response.headers.get("Retry-After"), response.headers.get("Date"))
            if (status == 429 or (status >= 500 and wanted)) and not final(answer):
                problem = f"answers {status}" + (f" and wants a pause of {wanted:g} s" if wanted else "")
                refusals += wanted is None
                gate.refused(passed_at, wanted)
                if time.monotonic() + gate.opens_in > deadline:
                    break
                continue
            gate.answered()
            problem = f"answers {status}"
            if status < 500 or final(answer):
                try:
                    return read(status, answer)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                    problem += f" in another form than that of its API ({type(error).__name__}: {error!s:.200})"
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"does not answer: {error or type(error).__name__}"
        failures += 1
        if failures < ATTEMPTS:
            with waiting():
                await asyncio.sleep(pause * failures)
    tried = f"in {failures + refusals} attempts" if failures or refusals else f"and a request waits {PATIENCE:g} s"
    raise ServiceUnavailable(f"{url} {problem}, {tried}; check that it runs and is not overloaded")


async def _bounded(url: str, content: Any) -> bytes:
    data = bytearray()
    async for part in content.iter_any():
        data += part
        if len(data) > MAX_BYTES:
            raise AnswerTooLarge(
                f"{url} answers with more than {MAX_BYTES} bytes, which are not read; check what it is"
            )
    return bytes(data)


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}
