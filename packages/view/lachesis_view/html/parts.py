"""Data in a page: compressed parts of JSON lines, which the page's script unpacks one by one.

A browser reads past megabytes of base64 in an instant; the same text as elements takes it many seconds. And what models
write cannot become markup: the page holds none of it as text.
"""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import orjson

PART_SIZE = 1 << 19
"""Bytes of JSON in a part, about: it is unpacked as a whole to show one line of it."""


class Parts:
    """JSON lines in parts, up to about `limit` characters of page."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.packed: list[str] = []
        self._size = 0
        self._lines: list[bytes] = []
        self._waiting = 0

    @property
    def full(self) -> bool:
        return self._size >= self.limit

    def add(self, value: Any) -> tuple[int, int] | None:
        """The part and the line of it that will hold `value`; None where the page is full."""
        if self.full:
            return None
        line = to_json(value)
        place = len(self.packed), len(self._lines)
        self._lines.append(line)
        self._waiting += len(line)
        if self._waiting >= PART_SIZE:
            self.close()
        return place

    def close(self) -> None:
        """Pack the lines that are left."""
        if self._lines:
            self.packed.append(pack(b"\n".join(self._lines)))
            self._size += len(self.packed[-1])
            self._lines, self._waiting = [], 0


def pack(data: bytes) -> str:
    """Base64 of gzip, the same for the same data."""
    return base64.b64encode(gzip.compress(data, 4, mtime=0)).decode()


def to_json(value: Any) -> bytes:
    """JSON in one line; what orjson refuses (halves of surrogate pairs, numbers over 64 bits) is written by json."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, default=str, ensure_ascii=False).encode("utf-8", "backslashreplace")
