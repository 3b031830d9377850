"""The session with the owner: frames arrive exactly once, over one stream or over several that break.

PROTOCOL.md describes the handshake and the numbering of frames.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from .framing import (
    CHUNK,
    PROTOCOL,
    UNVERIFIED_LIMIT,
    Delivery,
    Frames,
    encode,
    failure,
    is_equal,
    log_error,
    token_proof,
)
from .processes import kill_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .framing import Header
    from .loop import Loop, Timer

START, HANDSHAKE, SILENCE, GOODBYE_WAIT = 120.0, 10.0, 300.0, 2.0
"""Seconds: until the first attachment; for a handshake; of silence until a stream counts as dead; to tell an owner that
is not attached why the executor ends."""
WINDOW = 1 << 22
"""Unacknowledged bytes above which files wait."""
MAX_UNVERIFIED = 32
"""Connections at once whose handshake has not succeeded."""


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


class OwnerSession:
    """Passes requests to `serve`, and sends answers to the owner of the token, now or after the next attachment."""

    def __init__(self, loop: Loop, serve: Callable[[Header, bytes], None]) -> None:
        self.loop = loop
        self.serve = serve
        self.goodbye: str | None = None
        """Why it ends, as soon as the owner knows."""
        self.stream: FramedStream | None = None
        self.resumable = False
        self.dial: Callable[[], None] | None = None
        self.redial_after = 0.05
        self.unverified: list[FramedStream] = []
        self.token = b""
        self.grace = START
        self.grace_timer: Timer = []
        self.delivery = Delivery()
        self.heard = time.monotonic()
        self.files: deque[tuple[int, Iterator[bytes]]] = deque()

    # start and end

    def use_stream(self, stream_in: int, stream_out: int) -> None:
        """Use one stream. Its end is the end of the executor."""
        self.stream = FramedStream(self, stream_in, stream_out, attached=True)
        self.greet(self.stream)

    def use_listener(self, address: str) -> None:
        """Take streams from a listening Unix socket: `@NAME`, a path, or `fd:N`."""
        import socket  # here, as loading it takes time

        if address.startswith("fd:"):
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, int(address[3:]))
            server.set_inheritable(False)
        else:
            server = socket.socket(socket.AF_UNIX)
            server.bind("\0" + address[1:] if address.startswith("@") else address)
        server.listen(128)
        server.setblocking(False)
        self.begin()

        def on_connection(fd: int) -> None:
            try:
                self.add_unverified(server.accept()[0].detach())
            except BlockingIOError:
                pass
            except OSError:  # no descriptors are left, and epoll would report it again at once
                self.loop.unwatch(fd)
                self.loop.after(0.1, lambda: self.loop.watch(fd, select.EPOLLIN, on_connection))

        self.loop.watch(server.fileno(), select.EPOLLIN, on_connection)

    def use_dial(self, path: str) -> None:
        """Connect to a Unix socket whenever there is no stream."""
        import socket

        self.begin()

        def dial() -> None:
            if self.stream is not None or self.unverified:
                return
            try:
                with socket.socket(socket.AF_UNIX) as stream:
                    stream.setblocking(False)
                    stream.connect(path)
                    self.add_unverified(stream.detach())
            except OSError:
                self.redial()

        self.dial = dial
        dial()

    def redial(self) -> None:
        if self.dial is not None and self.stream is None and not self.unverified:
            self.loop.after(self.redial_after, self.dial)
            self.redial_after = min(1.0, 2 * self.redial_after)

    def begin(self) -> None:
        self.resumable = True
        self.grace_timer = self.loop.after(self.grace, lambda: self.loop.end("its owner never connected"))
        self.on_silence()

    def on_silence(self) -> None:
        if self.stream is not None and time.monotonic() > self.heard + SILENCE:
            self.on_cut(self.stream, "its owner is silent")
        self.loop.after(SILENCE / 5, self.on_silence)

    def stop(self, reason: str) -> None:
        """End. An owner that is about to attach again learns why, if it does so within GOODBYE_WAIT."""
        if self.token and self.stream is None and self.goodbye is None:
            self.goodbye = reason
            kill_tree(os.getpid())
            self.loop.after(GOODBYE_WAIT, lambda: self.stop(reason))
        else:
            self.loop.end(reason)

    def say_goodbye(self) -> None:
        """Tell an attached owner why the executor ends."""
        if self.stream is not None:
            with contextlib.suppress(OSError):
                self.stream.write(encode({"id": 0, "bye": self.loop.reason}))
                self.stream.flush()

    # streams

    def greet(self, stream: FramedStream) -> None:
        hello: Header = {"id": 0, "hello": PROTOCOL, "pid": os.getpid(), "python": list(sys.version_info[:3])}
        if not stream.attached:
            hello.update(nonce=stream.nonce, fresh=not self.token)
        stream.write(encode(hello))
        stream.flush()

    def add_unverified(self, fd: int) -> None:
        if len(self.unverified) >= MAX_UNVERIFIED:  # a random one, so that a crowd cannot keep the owner out
            other = self.unverified[os.urandom(1)[0] % len(self.unverified)]
            self.on_cut(other, "too many")
        try:
            other_fd = os.dup(fd)
        except OSError:
            os.close(fd)
            raise
        stream = FramedStream(self, fd, other_fd, attached=False)
        self.unverified.append(stream)
        stream.timer = self.loop.after(HANDSHAKE, lambda: self.on_cut(stream, "it said nothing"))
        self.greet(stream)

    def shake_hands(self, stream: FramedStream, header: Header) -> None:
        """Verify the first message of a peer. Raises any exception when it is wrong."""
        near, received, sealed = header["nonce"], header["received"], header["sealed"]
        facts = (stream.nonce, near, received, sealed)
        token = self.token
        if not token:
            token = bytes.fromhex(header["token"])
            if len(token) != 32:
                raise ValueError("the token has a wrong length")
        elif not is_equal(token_proof(token, "near", *facts), header["proof"]):
            raise ValueError("the peer does not know the token")
        self.delivery.forget(received)
        self.token = token
        self.unverified.remove(stream)
        if self.stream is not None:
            self.stream.close()
        taken = self.delivery.received
        proof = token_proof(token, "far", *facts, taken)
        stream.write(encode({"id": 0, "attached": PROTOCOL, "received": taken, "proof": proof}))
        if sealed:
            stream.frames.seal(token, stream.nonce, near, b"far", b"near")
        stream.attached = True
        stream.timer[2] = None
        self.stream = stream
        self.heard = time.monotonic()
        self.redial_after = 0.05
        self.grace_timer[2] = None
        for frame in self.delivery.retained:
            stream.write(frame)
        stream.flush()
        if self.goodbye is not None:
            self.stop(self.goodbye)

    def on_cut(self, stream: FramedStream, reason: str) -> None:
        stream.close()
        if stream is self.stream:
            self.stream = None
            if not self.resumable:
                self.stop(reason)
                return
            message = "%s, and its owner did not come back within %g s" % (reason, self.grace)
            self.grace_timer = self.loop.after(self.grace, lambda: self.loop.end(message))
        elif stream in self.unverified:
            self.unverified.remove(stream)
        self.redial()

    def on_frame(self, stream: FramedStream, header: Header, payload: bytes, size: int) -> None:
        self.heard = time.monotonic()
        if header.get("id") == 0:
            if "ack" in header:
                self.delivery.forget(header["ack"])
                stream.flush()
            due = "ping" in header
        else:
            self.delivery.receive(size)
            self.serve(header, payload)
            due = self.delivery.is_due()
        if due and self.resumable and not stream.closed:
            stream.write(self.delivery.acknowledgement())
            stream.flush()

    # sending

    def send(self, header: Header, payload: bytes = b"") -> None:
        self.post(encode(header, payload))
        self.flush()

    def post(self, frame: bytes) -> None:
        if self.resumable:
            self.delivery.retain(frame)
        if self.stream is not None:
            self.stream.write(frame)

    def flush(self) -> None:
        if self.stream is not None:
            self.stream.flush()

    def send_file(self, request: int, chunks: Iterator[bytes]) -> None:
        """Answer a request with these chunks, as there is room. An exception of the iterator becomes the answer."""
        self.files.append((request, chunks))
        self.flush()

    def cancel_file(self, request: int) -> None:
        self.files = deque(file for file in self.files if file[0] != request)

    def next_chunk(self) -> bool:
        """Send a chunk of a file, each file in turn, when nothing else waits. False when none can be sent now."""
        if not self.files or self.delivery.retained_bytes > WINDOW:
            return False
        request, chunks = self.files.popleft()
        header: Header = {"id": request}
        data = b""
        try:
            data = next(chunks)
            header["more"] = True
            self.files.append((request, chunks))
        except StopIteration:
            pass
        except Exception as error:  # the request may hold an invalid path or offset
            header = failure(request, error)
        self.post(encode(header, data))
        return True
