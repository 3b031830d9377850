"""The JSON of a request, as aiohttp sends it.

Most of it is the prompt, and thousands of requests may wait. So the text of the ids stays in the pieces that the
rollout keeps anyway, and is joined when it is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

from lachesis.utf8 import without_lone_surrogates

_GAP: Final = b"\0"
"""Marks the position of a shared text. JSON escapes control characters, so it never contains this byte."""


class JsonBody(aiohttp.Payload):
    """A body in pieces, joined only while it is written. It can be sent again."""

    _autoclose = True

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(pieces, content_type="application/json")
        self._size = sum(map(len, pieces))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The whole text."""
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """All of it."""
        await writer.write(b"".join(self._value))

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Its first `content_length` bytes."""
        whole = b"".join(self._value)
        await writer.write(whole if content_length is None or content_length >= len(whole) else whole[:content_length])


def json_body(payload: Mapping[str, Any]) -> JsonBody:
    """The JSON of `payload`. An object with `json_pieces()`, the ids of a prompt, provides its own text."""
    shared: list[Sequence[bytes]] = []

    def own_text(value: object) -> orjson.Fragment:
        pieces = getattr(value, "json_pieces", None)
        if pieces is None:
            raise TypeError(f"{type(value).__name__} is not JSON")
        shared.append(pieces())
        return orjson.Fragment(_GAP)

    try:
        written = orjson.dumps(payload, default=own_text)
    except (TypeError, orjson.JSONEncodeError):  # lone surrogates and huge integers: models write them
        text = json.dumps(payload, default=_plain, ensure_ascii=False)
        return JsonBody([without_lone_surrogates(text).encode()])
    first, *others = written.split(_GAP)
    body = [first]
    for pieces, other in zip(shared, others, strict=True):
        body += (*pieces, other)
    return JsonBody(body)


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
