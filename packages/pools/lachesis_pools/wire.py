"""Messages between a run, the pool and its workers, on connections that runs and workers open.

A message is the 16 bytes of a lease, a byte that says whether the pool reads it, and a frame as of the executor
(`framing.encode`): a header in JSON and a payload. The pool reads what begins or ends a lease, and passes all else on.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from backends import (
    BackendError,
    BackendUnavailable,
    LachesisError,
    ProcessesRunning,
    SandboxExhausted,
    SandboxLost,
    SandboxSpec,
)
from backends.errors import INSIDE, ImageUnavailable
from backends.executor.framing import Frames, encode

CONTROL = bytes(16)
PASSED, READ = 0, 1
"""Of the pool."""
LARGEST = 1 << 29
"""Bytes of a message: the largest answer of an executor, and its header."""
TOKEN = "LACHESIS_POOL_TOKEN"
"""The variable with the pool's key: it is in no argument, which every user of a machine can read."""
URL = "LACHESIS_POOL_URL"
DEFAULT = "default"
"""What people call the profile of rollouts that ask for none; on the wire it is ""."""
_KINDS: Mapping[str, type[LachesisError]] = {
    kind.__name__: kind for kind in (BackendError, BackendUnavailable, ImageUnavailable, SandboxLost, SandboxExhausted)
}


def new_lease() -> bytes:
    return secrets.token_bytes(16)


def message(lease: bytes, header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Raises `ValueError` if it is larger than the other side takes."""
    made = lease + bytes([READ if "do" in header else PASSED]) + encode(header, payload)
    if len(made) > LARGEST:
        raise ValueError(f"{len(made)} bytes are too many for a message of a pool, {LARGEST} are the most")
    return made


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the payload of a message. Raises `ValueError` if it is none."""
    frames = Frames()
    frames.arrived += data[len(CONTROL) + 1 :]
    found = frames.next()
    if found is None or frames.arrived:
        raise ValueError("a message is no frame")
    return found[0], found[1]


def is_read(data: bytes) -> bool:
    """Whether a message is for the pool."""
    return data[len(CONTROL)] == READ


def error_header(error: BaseException) -> dict[str, Any]:
    """An error as it is sent. What is no error of a sandbox is a `BackendError` with its class."""
    if isinstance(error, ProcessesRunning):
        return {"kind": "ProcessesRunning", "message": str(error), "commands": error.commands}
    if isinstance(error, OSError):
        inside = INSIDE in getattr(error, "__notes__", ())
        number = error.errno if error.errno is not None else errno.EIO
        path = error.filename
        shown = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else None
        return {"kind": "OSError", "errno": number, "message": error.strerror or str(error), "path": shown,
                "inside": inside}  # fmt: skip
    kind = next((name for name in reversed([*_KINDS]) if isinstance(error, _KINDS[name])), None)
    text = str(error) if kind is not None else f"{type(error).__name__}: {error}"
    return {"kind": kind or "BackendError", "message": text}


def raised(header: Mapping[str, Any], sandbox: str = "") -> Exception:
    """The error that `error_header` has described."""
    text = str(header.get("message", ""))
    if header["kind"] == "ProcessesRunning":
        return ProcessesRunning(sandbox, [str(each) for each in header["commands"]])
    if header["kind"] == "OSError":
        error = OSError(int(header["errno"]), text, header.get("path"))
        if header.get("inside"):
            error.add_note(INSIDE)
        return error
    return _KINDS.get(header["kind"], BackendError)(text)


def spec_header(spec: SandboxSpec) -> dict[str, Any]:
    return asdict(spec)


def spec_of(header: Mapping[str, Any]) -> SandboxSpec:
    return SandboxSpec(**header)


def token_of(given: str = "") -> str:
    return given or os.environ.get(TOKEN, "")
