"""The owner's end of a byte stream as frames, with tags where others could interfere."""

from __future__ import annotations

import contextlib
import hmac
import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from .executor.framing import CHUNK, FRAME

_SMALL = 1 << 16  # payloads up to this size are sent in one write with their header
_SHOWN = 80  # bytes of a damaged stream in the error: usually the words of another program
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


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded frame. `head` holds the lengths, the header and a small payload."""

    head: bytes
    payload: bytes

    @classmethod
    def of(cls, header: dict[str, Any], payload: bytes = b"") -> Frame:
        encoded = json.dumps(header).encode()
        head = FRAME.pack(len(encoded), len(payload)) + encoded
        return cls(head + payload, b"") if len(payload) <= _SMALL else cls(head, payload)

    @property
    def size(self) -> int:
        return len(self.head) + len(self.payload)


class Seal:
    """Tags for the frames of one attachment in one direction. They prevent adding, changing and replaying frames."""

    SIZE = 16

    def __init__(self, key: bytes, sender: bytes) -> None:
        self._key, self._sender, self._count = key, sender, 0

    def tag(self, *parts: bytes | memoryview) -> bytes:
        mac = blake2b(self._count.to_bytes(8, "big"), key=self._key, digest_size=self.SIZE, person=self._sender)
        self._count += 1
        for part in parts:
            mac.update(part)
        return mac.digest()


class Attachment:
    """One stream of frames."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._buffer = bytearray()
        self._begun = False
        self._sealing: Seal | None = None
        self._opening: Seal | None = None

    def seal(self, key: bytes) -> None:
        """Tag the frames of both directions from now on."""
        self._sealing, self._opening = Seal(key, b"near"), Seal(key, b"far")

    def write(self, frame: Frame) -> None:
        with contextlib.suppress(Exception):  # the reader finds out that it is broken
            if self._sealing is not None:
                tag = self._sealing.tag(frame.head, frame.payload)
                frame = Frame(frame.head, frame.payload + tag) if frame.payload else Frame(frame.head + tag, b"")
            self.stream.write(frame.head)
            if frame.payload:
                self.stream.write(frame.payload)

    async def next(self, limit: int | None = None) -> tuple[dict[str, Any], bytes, int]:
        """The next frame: header, payload, and size in bytes.

        Raises:
            EOFError: the stream has ended.
            ValueError: the bytes are no frame, its tag is wrong, or it has more than `limit` bytes.
        """
        buffer = self._buffer
        await self._fill(FRAME.size)
        header_size, payload_size = FRAME.unpack_from(buffer)
        header_end = FRAME.size + header_size
        size = header_end + payload_size
        if header_size > _HEADER or (limit is not None and size > limit):
            raise ValueError(f"it is damaged: a frame is too large, and begins with {bytes(buffer[:_SHOWN])!r}")
        tag_size = Seal.SIZE if self._opening is not None else 0
        await self._fill(size + tag_size)
        with memoryview(buffer) as view:
            if self._opening is not None and not hmac.compare_digest(
                self._opening.tag(view[:size]), view[size : size + tag_size]
            ):
                raise ValueError("a frame has a wrong tag")
            header = json.loads(bytes(view[FRAME.size : header_end]))
            payload = bytes(view[header_end:size])
        del buffer[: size + tag_size]
        self._begun = True
        return header, payload, size

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            data = await self.stream.read(max(CHUNK, size - len(self._buffer)))
            if not data:
                if self._buffer and not self._begun:
                    raise ValueError(f"it ended after {bytes(self._buffer[:_SHOWN])!r}")
                raise EOFError("it was closed by the other side")
            self._buffer += data
