"""Files that are one JSON array, read item by item: many ShareGPT sets are such files."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import IO, Any

from lachesis_messages.markup import UNIQUE
from lachesis_messages.records.jsonl import JsonlError, StrPath

_CHUNK = 1 << 16
_BLANK = re.compile(r"[ \t\r\n]*")


def array_items(path: StrPath, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """The items of the array in `file` with their numbers, from 1. Memory grows with an item, not with the file.

    Raises JsonlError where it is not an array, with the number of the item.
    """
    text, number, decode = _Text(file), 0, UNIQUE.raw_decode
    try:
        text.skip("[")
        if text.next() == "]":
            text.skip("]")
        else:
            while True:
                number += 1
                yield number, text.value(decode)
                if text.next() == "]":
                    text.skip("]")
                    break
                text.skip(",")
        if text.next():
            raise ValueError("more text after the end of the array")
    except (ValueError, RecursionError) as error:
        raise JsonlError(path, f"not JSON: {error}", line=number or None) from error


class _Text:
    """The text of a file, of which the part that is being read is in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self.text = ""
        self.place = 0
        self.ended = False

    def more(self) -> bool:
        """Read on, as much again as is unread; False at the end."""
        if not self.ended:
            data = self.file.read(max(_CHUNK, len(self.text) - self.place))
            self.ended = not data
            self.text = self.text[self.place :] + self.decode(data, self.ended)
            self.place = 0
        return not self.ended

    def next(self) -> str:
        """The next character that is not blank, unread; empty at the end."""
        while True:
            blank = _BLANK.match(self.text, self.place)
            self.place = blank.end() if blank else self.place
            if self.place < len(self.text) or not self.more():
                return self.text[self.place : self.place + 1]

    def skip(self, character: str) -> None:
        if self.next() != character:
            raise ValueError(f"{character!r} is missing" if self.next() else "it is not closed: the file is cut off")
        self.place += 1

    def value(self, decode: Any) -> Any:
        self.next()
        while True:
            try:
                value, end = decode(self.text, self.place)
            except ValueError:
                if not self.more():
                    raise
                continue
            if end == len(self.text) and self.more():  # a number may go on
                continue
            self.place = end
            return value
