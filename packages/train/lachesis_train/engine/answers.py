"""Bodies of requests and answers to them, as all handlers of the engine use them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from lachesis_train.engine.errors import RequestError

log = logging.getLogger(__name__)
Body = Mapping[str, Any]


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body, an object of JSON. Raises RequestError."""
    try:
        body = await request.json()
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


def named(error: Exception) -> Exception:
    """An error of the body's form as one that says so."""
    if isinstance(error, KeyError):
        return RequestError(f"the request has no {error}")
    return error if isinstance(error, RequestError) else RequestError(f"the request has a wrong value: {error}")


def failed_result(error: BaseException) -> dict[str, Any]:
    """A failed result. Category `user`: the request has to change; `server`: the engine is at fault."""
    if isinstance(error, RequestError):
        return {"error": str(error), "category": "user"}
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}


def failure(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer that is an error."""
    return web.json_response({"detail": message}, status=status, headers=headers)


@web.middleware
async def errors(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    """Turns an error of a request into an answer."""
    try:
        answer: web.StreamResponse = await handler(request)
    except RequestError as error:
        return failure(404 if "unknown" in str(error) else 422, str(error))
    except (KeyError, TypeError, ValueError) as error:
        if not isinstance(error, KeyError):
            log.exception("%s %s", request.method, request.path)
        return failure(422, str(named(error)))
    return answer
