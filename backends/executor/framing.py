"""Frames, error answers, and proofs of the token."""

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
"""The lengths of a header and a payload."""
CHUNK = 1 << 18
"""Bytes per read, and per part of a file."""


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
