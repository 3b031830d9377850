"""The session: one near side after the other over streams that break, and frames that arrive once nevertheless.

The handshake and the numbering of frames are described at the top of the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from .link import Link
from .processes import kill_tree
from .wire import PROTOCOL, encode, failure, is_same, keyed, prove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .loop import Loop, Timer
    from .wire import Header

START, HANDSHAKE, SILENCE, FAREWELL = 120.0, 10.0, 300.0, 2.0
"""Seconds: until somebody has attached; for a handshake; without a word until a stream counts as dead; for saying why
it ends to somebody who is not attached just then."""
WINDOW = 1 << 22
"""Bytes that nobody has acknowledged at which files wait."""
ACK_FRAMES, ACK_BYTES = 16, 1 << 18
STRANGERS = 32
"""Who may be connected without having shown who they are."""


class Session:
    """Takes requests to `serve`, and brings what is sent to whoever holds the token, now or after the next cut."""

    def __init__(self, loop: Loop, serve: Callable[[Header, bytes], None]) -> None:
        self.loop = loop
        self.serve = serve
        self.farewell: str | None = None
        """Why it ends as soon as somebody has been told."""
        self.link: Link | None = None
        self.resumable = False
        self.dial: Callable[[], None] | None = None
        self.redial_after = 0.05
        self.strangers: list[Link] = []
        self.token = b""
        self.grace = START
        self.grace_timer: Timer = []
        self.retained: deque[bytes] = deque()  # sent, not acknowledged
        self.retained_bytes = 0
        self.acknowledged = 0  # frames, counted from the first
        self.taken = 0  # frames received
        self.due_frames = self.due_bytes = 0  # of these, since the last acknowledgement
        self.heard = time.monotonic()
        self.files: deque[tuple[int, Iterator[bytes]]] = deque()

    # its beginning and its end

    def use_stream(self, stream_in: int, stream_out: int) -> None:
        """One stream, the end of which is the end."""
        self.link = Link(self, stream_in, stream_out, attached=True)
        self.greet(self.link)

    def use_listener(self, listening: int, accept: Callable[[], int]) -> None:
        """Streams come by `accept`, which raises `BlockingIOError` when there is none."""
        self.begin()

        def on_connection(fd: int) -> None:
            try:
                self.add_stranger(accept())
            except BlockingIOError:
                pass
            except OSError:  # no more descriptors: it would be reported again at once
                self.loop.unwatch(fd)
                self.loop.after(0.1, lambda: self.loop.watch(fd, select.EPOLLIN, on_connection))

        self.loop.watch(listening, select.EPOLLIN, on_connection)

    def use_dial(self, connect: Callable[[], int]) -> None:
        """Streams are made by `connect`, whenever there is none."""
        self.begin()

        def dial() -> None:
            if self.link is not None or self.strangers:
                return
            try:
                self.add_stranger(connect())
            except OSError:
                self.redial()

        self.dial = dial
        dial()

    def redial(self) -> None:
        if self.dial is not None and self.link is None and not self.strangers:
            self.loop.after(self.redial_after, self.dial)
            self.redial_after = min(1.0, 2 * self.redial_after)

    def begin(self) -> None:
        self.resumable = True
        self.grace_timer = self.loop.after(self.grace, lambda: self.loop.end("nobody came"))
        self.on_silence()

    def on_silence(self) -> None:
        if self.link is not None and time.monotonic() > self.heard + SILENCE:
            self.on_cut(self.link, "nobody speaks to it")
        self.loop.after(SILENCE / 5, self.on_silence)

    def stop(self, reason: str) -> None:
        """End; one who is about to come back is told why, if that takes no longer than a moment."""
        if self.token and self.link is None and self.farewell is None:
            self.farewell = reason
            kill_tree(os.getpid())
            self.loop.after(FAREWELL, lambda: self.stop(reason))
        else:
            self.loop.end(reason)

    def say_goodbye(self) -> None:
        """The last word, to somebody who is attached."""
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.write(encode({"id": 0, "bye": self.loop.reason}))
                self.link.flush()

    # streams

    def greet(self, link: Link) -> None:
        hello: Header = {"id": 0, "hello": PROTOCOL, "pid": os.getpid(), "python": list(sys.version_info[:3])}
        if not link.attached:
            hello.update(nonce=link.nonce, fresh=not self.token)
        link.write(encode(hello))
        link.flush()

    def add_stranger(self, fd: int) -> None:
        if len(self.strangers) >= STRANGERS:  # whom it hits is chance: a crowd cannot keep the right one out for long
            other = self.strangers[os.urandom(1)[0] % len(self.strangers)]
            self.on_cut(other, "too many")
        try:
            other_fd = os.dup(fd)
        except OSError:
            os.close(fd)
            raise
        link = Link(self, fd, other_fd, attached=False)
        self.strangers.append(link)
        link.timer = self.loop.after(HANDSHAKE, lambda: self.on_cut(link, "it said nothing"))
        self.greet(link)

    def shake_hands(self, link: Link, header: Header) -> None:
        """The first message of a stranger; raises whatever it likes when that is not as it should be."""
        near, received, sealed = header["nonce"], header["received"], header["sealed"]
        facts = (link.nonce, near, received, sealed)
        token = self.token
        if not token:
            token = bytes.fromhex(header["token"])
            if len(token) != 32:
                raise ValueError("no token")
        elif not is_same(prove(token, "near", *facts), header["proof"]):
            raise ValueError("a stranger")
        if not self.acknowledged <= received <= self.acknowledged + len(self.retained):
            raise ValueError("it has received what was never sent")
        self.token = token
        self.strangers.remove(link)
        if self.link is not None:
            self.link.close()
        proof = prove(token, "far", *facts, self.taken)
        link.write(encode({"id": 0, "attached": PROTOCOL, "received": self.taken, "proof": proof}))
        if sealed:
            link.key = keyed(token, ("frames %s %s" % (link.nonce, near)).encode(), 32)
        link.attached = True
        link.timer[2] = None
        self.link = link
        self.heard = time.monotonic()
        self.due_frames = self.due_bytes = 0
        self.redial_after = 0.05
        self.grace_timer[2] = None
        self.forget(received)
        for frame in self.retained:
            link.write(frame)
        link.flush()
        if self.farewell is not None:
            self.stop(self.farewell)

    def on_cut(self, link: Link, reason: str) -> None:
        link.close()
        if link is self.link:
            self.link = None
            if not self.resumable:
                self.stop(reason)
                return
            message = "%s, and nobody came back within %g s" % (reason, self.grace)
            self.grace_timer = self.loop.after(self.grace, lambda: self.loop.end(message))
        elif link in self.strangers:
            self.strangers.remove(link)
        self.redial()

    def forget(self, acknowledged: int) -> None:
        if not self.acknowledged <= acknowledged <= self.acknowledged + len(self.retained):
            raise ValueError("an acknowledgement of what was never sent")
        while self.acknowledged < acknowledged:
            self.retained_bytes -= len(self.retained.popleft())
            self.acknowledged += 1

    def on_frame(self, link: Link, header: Header, payload: bytes, size: int) -> None:
        self.heard = time.monotonic()
        due = False
        if header.get("id") == 0:
            if "ack" in header:
                self.forget(header["ack"])
                link.flush()
            due = "ping" in header
        else:
            self.taken += 1
            self.due_frames += 1
            self.due_bytes += size
            self.serve(header, payload)
            due = self.due_frames >= ACK_FRAMES or self.due_bytes >= ACK_BYTES
        if due and self.resumable and not link.closed:
            self.due_frames = self.due_bytes = 0
            link.write(encode({"id": 0, "ack": self.taken}))
            link.flush()

    # sending

    def send(self, header: Header, payload: bytes = b"") -> None:
        self.post(encode(header, payload))
        self.flush()

    def post(self, frame: bytes) -> None:
        if self.resumable:
            self.retained.append(frame)
            self.retained_bytes += len(frame)
        if self.link is not None:
            self.link.write(frame)

    def flush(self) -> None:
        if self.link is not None:
            self.link.flush()

    def send_file(self, request: int, chunks: Iterator[bytes]) -> None:
        """Answer a request with these, now and as there is room. Their first may raise what the answer is then."""
        self.files.append((request, chunks))
        self.flush()

    def cancel_file(self, request: int) -> None:
        self.files = deque(file for file in self.files if file[0] != request)

    def next_chunk(self) -> bool:
        """Files go out when nothing else has to, a chunk of each in turn. False when there is nothing to send now."""
        if not self.files or self.retained_bytes > WINDOW:
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
        except Exception as error:  # it may have been asked for what is no path, or no offset
            header = failure(request, error)
        self.post(encode(header, data))
        return True
