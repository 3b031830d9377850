"""Frames, their numbers, error answers, and proofs of the token. The owner uses the same code."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # on Python 3.8 these could not be evaluated
    from typing import Any, TypeAlias

    Header: TypeAlias = dict[str, Any]

PROTOCOL = 2
FRAME = struct.Struct("!II")
"""The lengths of a header and a payload."""
CHUNK = 1 << 18
"""Bytes per read, and per part of a file."""
LONGEST_PATH = 4095
"""Bytes of a path, and of the target of a link: the kernel takes no more."""
WHOLE = 1 << 28
"""Bytes that are read without a `limit`: a sparse file may be larger than the memory of its reader."""
UNVERIFIED_LIMIT = 4096
"""Bytes that a peer may send before the handshake has succeeded."""
ACK_FRAMES, ACK_BYTES = 16, 1 << 18
"""An acknowledgement is due after so many frames or bytes."""
TAG = 16
"""Bytes of a tag."""
SHOWN = 80
"""Bytes of a damaged stream in the error: usually the words of another program."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return b"".join((FRAME.pack(len(encoded), len(payload)), encoded, payload))


def failure(request: int, error: BaseException) -> Header:
    if isinstance(error, OSError):
        detail = {"errno": error.errno, "message": error.strerror or str(error), "path": error.filename}
    else:
        detail = {"errno": None, "message": "%s: %s" % (type(error).__name__, error)}
    return {"id": request, "error": detail}


def log_error(error: BaseException) -> None:
    """Log an error without source lines: Python would look for them in files that commands can write."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = "%s, line %d" % (at.tb_frame.f_code.co_name, at.tb_lineno) if at is not None else "?"
    with contextlib.suppress(OSError):
        os.write(2, os.fsencode("executor: %s in %s: %s\n" % (type(error).__name__, place, error)))


def keyed_hash(key: bytes, message: bytes, size: int, sender: bytes = b"") -> bytes:
    try:
        from _blake2 import blake2b  # hashlib would load OpenSSL
    except ImportError:
        from hashlib import blake2b
    return blake2b(message, key=key, digest_size=size, person=sender).digest()


def token_proof(token: bytes, *words: object) -> str:
    """Prove knowledge of the token, over words that are used only once."""
    return keyed_hash(token, " ".join(str(word) for word in words).encode(), 32).hex()


def is_equal(one: str, other: str) -> bool:
    """Whether two texts are equal, in constant time."""
    from _operator import _compare_digest

    return bool(_compare_digest(one.encode(), other.encode()))


class Frames:
    """The frames of one byte stream in both directions, without its input and output.

    Once sealed, each has a tag: the other side notices frames that were added, changed or replayed.
    """

    def __init__(self) -> None:
        self.arrived = bytearray()
        """Bytes that came in and are no part of a frame that `next` has returned."""
        self.key = b""
        self.sender = self.peer = b""
        self.sent = self.opened = 0

    def seal(self, token: bytes, far: str, near: str, sender: bytes, peer: bytes) -> None:
        """Tag the frames of both directions from now on. `far` and `near` are the nonces of the handshake."""
        self.key = bytes.fromhex(token_proof(token, "frames", far, near))
        self.sender, self.peer = sender, peer

    def outgoing(self, frame: bytes) -> bytes:
        """The next frame as it is sent."""
        if self.key:
            frame += keyed_hash(self.key, self.sent.to_bytes(8, "big") + frame, TAG, self.sender)
            self.sent += 1
        return frame

    def next(self, limit: float = math.inf, header_limit: float = math.inf) -> tuple[Header, bytes, int] | None:
        """The next frame that has arrived: header, payload, and size in bytes. None while there is none.

        Raises:
            ValueError: the bytes are not a frame, its tag is wrong, or it has more bytes than a limit.
        """
        if len(self.arrived) < FRAME.size:
            return None
        header_size, payload_size = FRAME.unpack_from(self.arrived)
        payload_at = FRAME.size + header_size
        size = payload_at + payload_size
        if size > limit or header_size > header_limit:
            raise ValueError("it is damaged: a frame is too large, and begins with %r" % bytes(self.arrived[:SHOWN]))
        end = size + TAG if self.key else size
        if len(self.arrived) < end:
            return None
        with memoryview(self.arrived) as view:
            if self.key:
                tag = keyed_hash(self.key, self.opened.to_bytes(8, "big") + bytes(view[:size]), TAG, self.peer)
                self.opened += 1
                if not is_equal(tag.hex(), bytes(view[size:end]).hex()):
                    raise ValueError("a frame has a wrong tag")
            try:
                header = json.loads(bytes(view[FRAME.size : payload_at]).decode())
            except RecursionError:
                header = None
            if not isinstance(header, dict):
                raise ValueError("a header is not an object")
            payload = bytes(view[payload_at:size])
        del self.arrived[:end]
        return header, payload, size


class Delivery:
    """Counts the frames of a session, so that each arrives once: a side keeps what the other has not acknowledged."""

    def __init__(self) -> None:
        self.retained: deque[bytes] = deque()
        self.retained_bytes = 0
        self.acknowledged = 0  # of the frames that were sent
        self.received = 0
        self.due_frames = self.due_bytes = 0  # received since the last acknowledgement

    def retain(self, frame: bytes) -> None:
        self.retained.append(frame)
        self.retained_bytes += len(frame)

    def forget(self, acknowledged: int) -> None:
        """Drop the frames that the other side has."""
        if not self.acknowledged <= acknowledged <= self.acknowledged + len(self.retained):
            raise ValueError("it acknowledges frames that were never sent")
        while self.acknowledged < acknowledged:
            self.retained_bytes -= len(self.retained.popleft())
            self.acknowledged += 1

    def receive(self, size: int) -> None:
        self.received += 1
        self.due_frames += 1
        self.due_bytes += size

    def is_due(self) -> bool:
        return self.due_frames >= ACK_FRAMES or self.due_bytes >= ACK_BYTES

    def acknowledgement(self, **more: Any) -> bytes:
        self.due_frames = self.due_bytes = 0
        return encode({"id": 0, "ack": self.received, **more})
