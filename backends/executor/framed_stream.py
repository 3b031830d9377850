"""One byte stream as frames: sending, receiving, and tags where others could interfere."""

from __future__ import annotations

import json
import os
import select
from collections import deque
from typing import TYPE_CHECKING

from .framing import CHUNK, FRAME, is_equal, keyed_hash, log_error

if TYPE_CHECKING:
    from .loop import Timer
    from .owner_session import OwnerSession

UNVERIFIED_LIMIT = 4096
"""Bytes that a peer may send before the handshake has succeeded."""


class FramedStream:
    """One byte stream, until it breaks or is replaced."""

    def __init__(self, session: OwnerSession, stream_in: int, stream_out: int, attached: bool) -> None:
        self.session = session
        self.stream_in, self.stream_out = stream_in, stream_out
        self.attached = attached
        self.closed = False
        self.timer: Timer = [0.0, 0, None]
        self.nonce = os.urandom(16).hex()
        self.key = b""
        self.sealed = self.opened = 0  # frames of this attachment in either direction
        self.received = bytearray()
        self.sending: deque[memoryview] = deque()
        for fd in (stream_in, stream_out):
            os.set_blocking(fd, False)
        session.loop.watch(stream_in, select.EPOLLIN, self.on_readable)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.timer[2] = None
            for fd in (self.stream_in, self.stream_out):
                self.session.loop.unwatch(fd)
                os.close(fd)

    def write(self, frame: bytes) -> None:
        if self.key:
            frame += keyed_hash(self.key, self.sealed.to_bytes(8, "big") + frame, 16, b"far")
            self.sealed += 1
        self.sending.append(memoryview(frame))

    def flush(self) -> None:
        if not self.closed:
            self.on_sendable(self.stream_out)

    def on_sendable(self, fd: int) -> None:
        try:
            while self.sending or (self.attached and self.session.next_chunk()):
                written = os.write(fd, self.sending[0])
                if written == len(self.sending[0]):
                    self.sending.popleft()
                else:
                    self.sending[0] = self.sending[0][written:]
            self.session.loop.unwatch(fd)
        except BlockingIOError:
            self.session.loop.watch(fd, select.EPOLLOUT, self.on_sendable)
        except OSError:
            self.session.on_cut(self, "its answers are not read")

    def on_readable(self, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK if self.attached else UNVERIFIED_LIMIT)
        except BlockingIOError:
            return
        except OSError as error:
            self.session.on_cut(self, "its stream broke: %s" % error)
            return
        if not data:
            self.session.on_cut(self, "its stream was closed")
            return
        self.received += data
        try:
            begin = self.parse()
        except Exception as error:
            if self.attached:
                log_error(error)
            self.session.on_cut(self, "its stream is damaged: %s" % error)
            return
        del self.received[:begin]

    def parse(self) -> int:
        """Serve all complete frames; returns the offset of the rest."""
        begin, available = 0, len(self.received)
        while available - begin >= FRAME.size and not self.closed and self.session.loop.reason is None:
            header_size, payload_size = FRAME.unpack_from(self.received, begin)
            payload_at = begin + FRAME.size + header_size
            end = payload_at + payload_size
            if not self.attached and end > UNVERIFIED_LIMIT:
                raise ValueError("an unverified peer sent too large a frame")
            tag_end = end + 16 if self.key else end
            if tag_end > available:
                break
            with memoryview(self.received) as view:
                if self.key:
                    message = self.opened.to_bytes(8, "big") + bytes(view[begin:end])
                    self.opened += 1
                    if not is_equal(keyed_hash(self.key, message, 16, b"near").hex(), bytes(view[end:tag_end]).hex()):
                        raise ValueError("a frame has a wrong tag")
                header = json.loads(bytes(view[begin + FRAME.size : payload_at]).decode())
                payload = bytes(view[payload_at:end])
            if self.attached:
                self.session.on_frame(self, header, payload, end - begin)
            else:
                self.session.shake_hands(self, header)
            begin = tag_end
        return begin
