"""Text that grows at its end and never changes before it, shared by all who continue it.

A conversation is sent again with every turn. Its text is kept in one piece, so that a turn only costs what it adds.
"""

from __future__ import annotations


class SharedText:
    """Bytes that only grow. A text is such an object and an end: the bytes up to it, after those of `before`."""

    __slots__ = ("_before", "_data")

    def __init__(self, first: bytes, before: tuple[SharedText, int] | None = None) -> None:
        self._data = bytearray(first)
        self._before = before

    def extended(self, end: int, more: bytes) -> tuple[SharedText, int]:
        """The text up to `end`, followed by `more`. Appends in place unless another text already continues there."""
        if end == len(self._data):
            try:
                self._data += more
            except BufferError:  # these bytes are being sent
                pass
            else:
                return self, len(self._data)
        return SharedText(more, (self, end)), len(more)

    def pieces(self, end: int) -> list[memoryview]:
        """The text up to `end`, without a copy. Drop the views soon: nothing is appended in place while they live."""
        found = []
        text: SharedText | None = self
        while text is not None:
            found.append(memoryview(text._data)[:end])
            text, end = text._before or (None, 0)
        return found[::-1]

    def part(self, start: int, end: int) -> bytes:
        """A part of the own bytes."""
        return bytes(self._data[start:end])
