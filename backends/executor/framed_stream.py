"""One byte stream of the executor: sending and receiving frames."""

from __future__ import annotations

import os
import select
from collections import deque
from typing import TYPE_CHECKING

from .framing import CHUNK, UNVERIFIED_LIMIT, Frames, log_error

if TYPE_CHECKING:
    from .loop import Timer
    from .owner_session import OwnerSession


class FramedStream:
    """One byte stream, until it breaks or is replaced."""

    def __init__(self, session: OwnerSession, stream_in: int, stream_out: int, attached: bool) -> None:
        self.session = session
        self.stream_in, self.stream_out = stream_in, stream_out
        self.attached = attached
        self.closed = False
        self.timer: Timer = [0.0, 0, None]
        self.nonce = os.urandom(16).hex()
        self.frames = Frames()
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
        self.sending.append(memoryview(self.frames.outgoing(frame)))

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
        self.frames.arrived += data
        try:
            while not self.closed and self.session.loop.reason is None and self.serve_next():
                pass
        except Exception as error:
            if self.attached:
                log_error(error)
            self.session.on_cut(self, "its stream is damaged: %s" % error)

    def serve_next(self) -> bool:
        """Serve the next frame. False while there is none."""
        frame = self.frames.next() if self.attached else self.frames.next(UNVERIFIED_LIMIT)
        if frame is None:
            return False
        if self.attached:
            self.session.on_frame(self, *frame)
        else:
            self.session.shake_hands(self, frame[0])
        return True
