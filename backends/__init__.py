"""Sandboxes that tools and rewards work in.

    backend = create_backend("local")
    sandbox = await backend.create(SandboxSpec())
    result = await sandbox.exec("echo hello > note.txt; ls", timeout=10)

A backend that cannot run here says so, and what to do about it: `(await backend.check()).fix`.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # the process that starts sandboxes imports this as well, and typing costs start-up time
if TYPE_CHECKING:
    from typing import Any

    from .base import (
        MAX_DOWNLOAD,
        MAX_MEMBERS,
        MAX_OUTPUT,
        Availability,
        Backend,
        ExecResult,
        FileStatus,
        OutputChunk,
        Process,
        ProcessStatus,
        Sandbox,
        SandboxInfo,
        SupportsForward,
        SupportsPty,
        SupportsSnapshot,
        SupportsWaited,
    )
    from .errors import BackendError, BackendUnavailable, ImageUnavailable, SandboxExhausted, SandboxLost
    from .factory import BACKENDS, BackendOption, backend_names, backend_options, create_backend
    from .forwarding import Forward
    from .lease import Lease, LeaseOver, Lessor, SandboxPerLease
    from .spec import SandboxSpec

__all__ = [
    "BACKENDS",
    "MAX_DOWNLOAD",
    "MAX_MEMBERS",
    "MAX_OUTPUT",
    "Availability",
    "Backend",
    "BackendError",
    "BackendOption",
    "BackendUnavailable",
    "ExecResult",
    "FileStatus",
    "Forward",
    "ImageUnavailable",
    "Lease",
    "LeaseOver",
    "Lessor",
    "OutputChunk",
    "Process",
    "ProcessStatus",
    "Sandbox",
    "SandboxExhausted",
    "SandboxInfo",
    "SandboxLost",
    "SandboxPerLease",
    "SandboxSpec",
    "SupportsForward",
    "SupportsPty",
    "SupportsSnapshot",
    "SupportsWaited",
    "backend_names",
    "backend_options",
    "create_backend",
]


def __getattr__(name: str) -> Any:
    """Imports what is asked for, then: errors and command lines need nothing of sandboxes."""
    if name in __all__:
        for home in ("errors", "spec", "base", "lease", "factory", "forwarding"):
            module = importlib.import_module(f"backends.{home}")
            if hasattr(module, name):
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module 'backends' has no attribute {name!r}")
