"""The connections of a pool: an HTTP request that both sides continue as a stream of messages.

A message on the wire is its length (4 bytes) and its bytes; one of no bytes says that the sender is alive. Any proxy
that passes an upgrade of HTTP/1.1 on will do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode, urlsplit

from .wire import LARGEST

if TYPE_CHECKING:  # the side of a run needs no server
    from aiohttp import web

_LOG = logging.getLogger(__name__)
UPGRADE = "lachesis-pool"
HEARTBEAT = 20.0
"""Seconds between signs of life: proxies close silent connections after a minute. Three times as long without one from
the other side is the end."""
_UNREAD = 1 << 29
"""Bytes that may wait for a peer that does not read."""
_CONNECT = 30.0
_HEAD = 1 << 16
"""Bytes of an answer to the request at most."""


class ConnectionRefused(ConnectionError):
    """The other side speaks HTTP, and does not want this connection."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status


class PoolStream(asyncio.Protocol):
    """One end of a connection. `take` gets each message; the stream is broken off if it raises."""

    def __init__(self, take: Callable[[PoolStream, bytes], None], name: str = "") -> None:
        self.name = name
        self._take = take
        self._arrived = bytearray()
        self._transport: asyncio.Transport | None = None
        self._heard = True
        self._silent = 0
        self._beat: asyncio.TimerHandle | None = None
        self._before: asyncio.BaseProtocol | None = None
        """The protocol of the HTTP server, which has to learn of the end."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, transport: asyncio.Transport) -> None:
        """The request was accepted: what follows are messages."""
        self._transport = transport
        self._pulse()

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._arrived += data
        self._unpack()

    def _unpack(self) -> None:
        arrived, at = self._arrived, 0
        while len(arrived) - at >= 4 and not self.ended.done():
            size = int.from_bytes(arrived[at : at + 4], "big")
            if size > LARGEST:
                _LOG.warning("a connection is broken off: it announces a message of %d bytes", size)
                self.abort()
            if len(arrived) - at - 4 < size:
                break
            if size:
                try:
                    self._take(self, bytes(memoryview(arrived)[at + 4 : at + 4 + size]))
                except (ValueError, LookupError, TypeError) as error:
                    _LOG.warning("a connection is broken off, as a message is none: %r", error)
                    self.abort()
            at += 4 + size
        if at:
            del arrived[:at]

    def _pulse(self) -> None:
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        if self._silent == 3:
            _LOG.info("nothing is heard of %s", self.name or "the other side")
            self.abort()
        else:
            self.post(b"")
            self._beat = asyncio.get_running_loop().call_later(HEARTBEAT, self._pulse)

    def post(self, data: bytes) -> None:
        """Send a message, in order; nothing if the other side is gone. One that does not read loses its connection."""
        transport = self._transport
        if transport is None or self.ended.done():
            return
        transport.write(len(data).to_bytes(4, "big") + data)
        if transport.get_write_buffer_size() > _UNREAD:
            _LOG.warning("%s does not read what it is sent, and loses its connection", self.name or "a run")
            self.abort()

    def close(self) -> None:
        """End it once all is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def _end(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
        if not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._before is not None:
            self._before.connection_lost(error)
        self._end()

    def accept(self, request: web.Request) -> None:
        """Continue a request as this stream."""
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self._before = transport.get_protocol()
        head = ["HTTP/1.1 101 Switching Protocols", f"Upgrade: {UPGRADE}", "Connection: Upgrade", "\r\n"]
        transport.write("\r\n".join(head).encode())
        transport.set_protocol(self)
        self.begin(transport)


class _Client(PoolStream):
    """The end that has asked for the connection."""

    def __init__(self, take: Callable[[PoolStream, bytes], None]) -> None:
        super().__init__(take)
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wire: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.wire = transport

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            super().data_received(data)
            return
        self._arrived += data
        head, ended, rest = bytes(self._arrived).partition(b"\r\n\r\n")
        if (not ended and len(head) < _HEAD) or self.accepted.done():
            return
        status, _, reason = head.partition(b"\r\n")[0].partition(b" ")[2].decode("latin-1").partition(" ")
        if status == "101" and self.wire is not None:
            self._arrived = bytearray(rest)
            self.begin(self.wire)
            self.accepted.set_result(None)
            self._unpack()
        else:
            self.accepted.set_exception(ConnectionRefused(int(status) if status.isdecimal() else 0, reason[:200]))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if not self.accepted.done():
            self.accepted.set_exception(ConnectionError("the connection was closed before an answer"))


async def connect(
    url: str, path: str, token: str, take: Callable[[PoolStream, bytes], None], **query: str
) -> PoolStream:
    """A stream to the pool at `url`.

    Raises:
        ConnectionRefused: with the status of the answer.
        OSError: there is no connection, or no answer.
    """
    loop = asyncio.get_running_loop()
    try:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
    except ValueError as error:
        raise OSError(f"{url!r} is no address of a pool: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OSError(f"{url!r} is no address of a pool: http://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    head = [
        f"GET {quote(parts.path)}/{path}?{urlencode(query)} HTTP/1.1",
        f"Host: {host}:{parts.port}" if parts.port else f"Host: {host}",
        f"Upgrade: {UPGRADE}",
        "Connection: Upgrade",
        f"Authorization: Bearer {token}",
    ]
    stream = _Client(take)
    try:
        async with asyncio.timeout(_CONNECT):
            transport, _ = await loop.create_connection(lambda: stream, parts.hostname, port, ssl=secure or None)
            transport.write("\r\n".join([*head, "\r\n"]).encode())
            await stream.accepted
    except BaseException:
        if stream.wire is not None:
            stream.wire.abort()
        raise
    return stream
