"""Shared by the requests of the rollout API: who may ask, bodies, and answers that are errors."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Final

from aiohttp import web

from lachesis_tokens.wire.visitors import Visitors
from lachesis_train.api.settings import MB, ApiSettings
from lachesis_train.group_encoding import GroupError

_SMALL: Final = MB
"""The largest body of a request that carries no group, in bytes."""
_INFLATED: Final = MB
"""Bytes that are unpacked at once."""
_FOR_BROWSERS: Final = ("/", "/metrics")
"""Routes that change nothing."""


class RequestRefused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, detail: str, *, retry_after: float | None = None) -> None:
        self.status = status
        super().__init__(detail)
        self.headers = {} if retry_after is None else {"Retry-After": f"{retry_after:.0f}"}
        if status == 401:
            self.headers["WWW-Authenticate"] = 'Bearer, Basic realm="rollout API: any name, the token as password"'


class TooLarge(RequestRefused):
    def __init__(self, most: int) -> None:
        super().__init__(413, f"the body has more than {most >> 20} MB; --max-body-mb is the limit for groups")


def json_answer(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    # orjson has no integers of 128 bits, as `uuid` is one.
    return web.Response(text=json.dumps(body), status=status, content_type="application/json", headers=headers)


# Who may ask.


def authorise(request: web.Request, visitors: Visitors, token: str) -> None:
    """Refuse strangers, other users, and web pages of others in a browser that may reach the API.

    Raises:
        Refused: with 401 or 403.
    """
    if reason := visitors.refusal(request):
        raise RequestRefused(403, reason)
    if token:
        _check_token(request, token)


def _check_token(request: web.Request, token: str) -> None:
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    # A browser sends a password again with whatever a page of another site makes it ask for.
    if kind.lower() == "basic" and request.method == "GET" and request.path in _FOR_BROWSERS:
        with suppress(ValueError):
            given = base64.b64decode(given).decode("utf-8", "replace").partition(":")[2]
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
        raise RequestRefused(401, "this API asks for its bearer token: Authorization: Bearer TOKEN")


# Bodies.


def batch_number(request: web.Request, name: str) -> int | None:
    """The number of a batch in the query, if it has one.

    Raises:
        GroupError: it is something else.
    """
    given = request.query.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 20):
        raise GroupError(f"{name} is {given[:100]!r}, no number of a batch")
    return int(given)


async def parts(request: web.Request, stalled: float) -> AsyncIterator[bytes]:
    """A body as it comes.

    Raises:
        Refused: nothing came for `stalled` seconds.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(stalled) as limit:
            async for part in request.content.iter_any():
                limit.reschedule(None)
                yield part
                limit.reschedule(loop.time() + stalled)
    except TimeoutError as error:
        raise RequestRefused(408, f"nothing more of the body came within {stalled:g} s") from error


async def read_small(request: web.Request, settings: ApiSettings) -> bytes:
    """The unpacked body of a request that carries no group."""
    body = b""
    async for part in parts(request, settings.stalled):
        body += part
        if len(body) > _SMALL:
            raise TooLarge(_SMALL)
    return unpacked(encoding(request), [body], _SMALL)


def encoding(request: web.Request) -> str:
    return request.headers.get("Content-Encoding", "").lower()


def unpacked(encoding: str, body: Sequence[bytes], most: int) -> bytes:
    """The bytes of a body, after its content encoding. zlib releases the GIL."""
    if "gzip" not in encoding:
        return b"".join(body)
    inflate, pieces, size = zlib.decompressobj(wbits=31), [], 0
    try:
        for part in body:
            while part:
                piece = inflate.decompress(part, _INFLATED)
                size += len(piece)
                if size > most:
                    raise TooLarge(most)
                pieces.append(piece)
                part = inflate.unconsumed_tail
        pieces.append(inflate.flush())
    except zlib.error as error:
        raise RequestRefused(400, f"Invalid gzip payload: {error}") from error
    if not inflate.eof:
        raise RequestRefused(400, "Invalid gzip payload: it ends early")
    if inflate.unused_data:
        raise RequestRefused(400, "Invalid gzip payload: something follows its end")
    return b"".join(pieces)
