"""What is written to the stream: frames, failures, and the proofs that both sides know the token."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # on Python 3.8 these could not be evaluated
    from typing import Any, TypeAlias

    Header: TypeAlias = dict[str, Any]

PROTOCOL = 2
FRAME = struct.Struct("!II")
"""The lengths of a frame's header and payload."""
CHUNK = 1 << 18
"""Bytes that are read at once, and of a part of a file."""


def encode(header: Header, payload: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return b"".join((FRAME.pack(len(encoded), len(payload)), encoded, payload))


def failure(request: int, error: BaseException) -> Header:
    if isinstance(error, OSError):
        detail = {"errno": error.errno, "message": error.strerror or str(error), "path": error.filename}
    else:
        detail = {"errno": None, "message": "%s: %s" % (type(error).__name__, error)}
    return {"id": request, "error": detail}


def complain(error: BaseException) -> None:
    """Without the lines of a traceback, which would be looked for in files that others can have made."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    place = "%s, line %d" % (at.tb_frame.f_code.co_name, at.tb_lineno) if at is not None else "?"
    with contextlib.suppress(OSError):
        os.write(2, os.fsencode("executor: %s in %s: %s\n" % (type(error).__name__, place, error)))


def keyed(key: bytes, message: bytes, size: int, sender: bytes = b"") -> bytes:
    try:
        from _blake2 import blake2b  # without the rest of hashlib, which would load OpenSSL
    except ImportError:
        from hashlib import blake2b
    return blake2b(message, key=key, digest_size=size, person=sender).digest()


def prove(token: bytes, *words: object) -> str:
    """Shows that one knows the token, by words that are said once only."""
    return keyed(token, " ".join(str(word) for word in words).encode(), 32).hex()


def is_same(one: str, other: str) -> bool:
    """Takes as long wherever they differ."""
    from _operator import _compare_digest

    return bool(_compare_digest(one.encode(), other.encode()))
