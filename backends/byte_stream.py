"""The owner's end of a byte stream as frames."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Protocol

from .executor.framing import CHUNK, SHOWN, Frames

_HEADER = 1 << 26  # a longer header means a damaged stream


class ByteStream(Protocol):
    """Bytes in two directions. Any exception means that the stream is broken."""

    async def read(self, n: int) -> bytes:
        """At least one byte and at most `n`; empty at the end."""
        ...

    def write(self, data: bytes) -> None:
        """Send, or buffer. Never blocks."""
        ...

    async def drain(self) -> None:
        """Wait until little is buffered."""
        ...

    def abort(self) -> None:
        """Close at once and discard what is buffered. May be called more than once."""
        ...


class _StreamPair:
    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, n: int) -> bytes:
        return bytes(await self._reader.read(n))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def abort(self) -> None:
        if not self._writer.is_closing():  # asyncio's pipes cannot be aborted twice
            transport = getattr(self._writer, "transport", None) or self._writer.channel
            transport.abort()


def asyncio_stream(reader: Any, writer: Any) -> ByteStream:
    """A reader and a writer of asyncio, or of asyncssh (in binary mode), as one stream."""
    return _StreamPair(reader, writer)


class Attachment:
    """One stream of frames."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.frames = Frames()
        self._begun = False

    def write(self, frame: bytes) -> None:
        with contextlib.suppress(Exception):  # the reader finds out that it is broken
            self.stream.write(self.frames.outgoing(frame))

    async def next(self, limit: float = math.inf) -> tuple[dict[str, Any], bytes, int]:
        """The next frame: header, payload, and size in bytes.

        Raises:
            EOFError: the stream has ended.
            ValueError: the bytes are no frame, its tag is wrong, or it has more than `limit` bytes.
        """
        arrived = self.frames.arrived
        while (frame := self.frames.next(limit, _HEADER)) is None:
            data = await self.stream.read(CHUNK)
            if not data:
                if arrived and not self._begun:
                    raise ValueError(f"it ended after {bytes(arrived[:SHOWN])!r}")
                raise EOFError("it was closed by the other side")
            arrived += data
        self._begun = True
        return frame
