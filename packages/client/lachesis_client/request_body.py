"""The JSON of a request, as aiohttp sends it.

Most of it is the prompt, and thousands of requests may wait. So the text of a prompt stays in the one place where the
rollout keeps it anyway, and is written from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

from backends.text import without_lone_surrogates

_GAP: Final = b"\0"
"""Marks the position of a shared text. JSON escapes control characters, so it never contains this byte."""
_AT_ONCE: Final = 1 << 17
"""Bytes of one write."""
_COPIED: Final = 1 << 13
"""Bytes of a body that is not worth sharing."""


class SharedJson(Protocol):
    """A value that provides its own JSON text."""

    def json_pieces(self) -> Sequence[bytes | memoryview]:
        """The same text each time. The pieces may be views that stop the text from growing in place."""
        ...


class JsonBody(aiohttp.Payload):
    """A body in parts. Shared text is read only while it is written, unless all is short. It can be sent again."""

    _autoclose = True

    def __init__(self, parts: Sequence[bytes | SharedJson]) -> None:
        super().__init__(parts, content_type="application/json")
        pieces = self._pieces()
        self._length = self._size = sum(map(len, pieces))
        if self._length <= _COPIED:
            self._value = [b"".join(pieces)]

    def _pieces(self) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = []
        for part in self._value:
            if type(part) is bytes:
                pieces.append(part)
            else:
                pieces += part.json_pieces()
        return pieces

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The whole text."""
        return b"".join(self._pieces()).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """All of it."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Its first `content_length` bytes."""
        left = self._length if content_length is None else min(content_length, self._length)
        if left <= _AT_ONCE:
            await writer.write(b"".join(self._pieces())[:left])
            return
        for piece in self._pieces():
            for start in range(0, min(left, len(piece)), _AT_ONCE):
                # A socket takes no more at once. The transport would copy the rest.
                await writer.write(piece[start : min(left, start + _AT_ONCE)])
            left -= min(left, len(piece))


def json_body(payload: Mapping[str, Any]) -> JsonBody:
    """The JSON of `payload`. Ids of a prompt and recorded messages provide their own text: see `SharedJson`."""
    shared: list[SharedJson] = []

    def own_text(value: Any) -> orjson.Fragment:
        if not hasattr(value, "json_pieces"):
            raise TypeError(f"{type(value).__name__} is not JSON")
        shared.append(value)
        return orjson.Fragment(_GAP)

    try:
        written = orjson.dumps(payload, default=own_text)
    except (TypeError, orjson.JSONEncodeError):  # lone surrogates and huge integers: models write them
        text = json.dumps(payload, default=_plain, ensure_ascii=False)
        return JsonBody([without_lone_surrogates(text).encode()])
    first, *others = written.split(_GAP)
    parts: list[bytes | SharedJson] = [first]
    for value, other in zip(shared, others, strict=True):
        parts += (value, other)
    return JsonBody(parts)


def _plain(value: Any) -> Any:
    if hasattr(value, "json_pieces"):
        return json.loads(b"".join(value.json_pieces()))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
