"""The owner's end of a byte stream as frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, Protocol

from .executor.framing import CHUNK, FRAME, SHOWN, UNVERIFIED_LIMIT, Frames

_PART = 1 << 20  # the most bytes that are sent by one call
_HEADER = 1 << 24  # a longer header means a damaged stream


class ByteStream(Protocol):
    """Bytes in two directions. Any exception means that the stream is broken."""

    async def read(self, n: int) -> bytes:
        """At least one byte and at most `n`; empty at the end."""
        ...

    def write(self, data: bytes) -> None:
        """Send, or buffer. Never blocks."""
        ...

    def abort(self) -> None:
        """Close at once and discard what is buffered. May be called more than once."""
        ...


class Unreachable(Exception):
    """No stream could be had in time. The message says why."""


class _StreamPair:
    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, n: int) -> bytes:
        return bytes(await self._reader.read(n))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def abort(self) -> None:
        if not self._writer.is_closing():  # asyncio's pipes cannot be aborted twice
            transport = getattr(self._writer, "transport", None) or self._writer.channel
            transport.abort()


def asyncio_stream(reader: Any, writer: Any) -> ByteStream:
    """A reader and a writer of asyncio, or of asyncssh (in binary mode), as one stream."""
    return _StreamPair(reader, writer)


class PumpedStream:
    """The bytes of `received`, and `send`, which is called for one part at a time, as one stream.

    Each direction has a task. When one of them ends, the stream does.
    """

    def __init__(self, received: AsyncIterable[bytes], send: Callable[[bytes], Awaitable[None]]) -> None:
        self._reader = asyncio.StreamReader()
        self._outgoing = bytearray()
        self._writable = asyncio.Event()
        self._aborted = False
        self._error: Exception | None = None
        self._tasks = [asyncio.create_task(self._receive(received)), asyncio.create_task(self._send(send))]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    async def read(self, n: int) -> bytes:
        data = await self._reader.read(n)
        if not data and self._error is not None:  # after all that was received
            raise self._error
        return data

    def write(self, data: bytes) -> None:
        self._outgoing += data
        self._writable.set()

    def abort(self) -> None:
        if not self._aborted:  # a second cancellation would interrupt what they do at their end
            self._aborted = True
            for task in self._tasks:
                task.cancel()

    async def _receive(self, received: AsyncIterable[bytes]) -> None:
        async for data in received:
            self._reader.feed_data(data)

    async def _send(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        while await self._writable.wait():
            self._writable.clear()
            while self._outgoing:
                part = bytes(self._outgoing[:_PART])
                del self._outgoing[: len(part)]
                await send(part)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._error = self._error or error
        self._reader.feed_eof()
        self.abort()


class Attachment:
    """One stream of frames."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.frames = Frames()
        self.room: int | None = None
        """Bytes that a frame may have besides its header; None before the handshake has succeeded."""
        self._begun = False

    def write(self, frame: bytes) -> None:
        with contextlib.suppress(Exception):  # the reader finds out that it is broken
            self.stream.write(self.frames.outgoing(frame))

    async def next(self) -> tuple[dict[str, Any], bytes, int]:
        """The next frame: header, payload, and size in bytes.

        Raises:
            EOFError: the stream has ended.
            ValueError: the bytes are not a frame, its tag is wrong, or it is too large.
        """
        arrived = self.frames.arrived
        while (frame := self.frames.next(*self._limits())) is None:
            data = await self.stream.read(CHUNK)
            if not data:
                if arrived and not self._begun:
                    raise ValueError(f"it ended after {bytes(arrived[:SHOWN])!r}")
                raise EOFError("it was closed by the other side")
            arrived += data
        self._begun = True
        return frame

    def _limits(self) -> tuple[int, int]:
        if self.room is None:
            return UNVERIFIED_LIMIT, UNVERIFIED_LIMIT
        return FRAME.size + _HEADER + self.room, _HEADER
