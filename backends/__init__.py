"""Sandboxes that tools and rewards work in.

    backend = create_backend("local")
    sandbox = await backend.create(SandboxSpec())
    result = await sandbox.exec("echo hello > note.txt; ls", timeout=10)

A backend that cannot run here says so, and what to do about it: `(await backend.check()).fix`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import (
        MAX_DOWNLOAD,
        MAX_MEMBERS,
        MAX_OUTPUT,
        Availability,
        Backend,
        BackendError,
        BackendUnavailable,
        ExecResult,
        FileStatus,
        ImageUnavailable,
        OutputChunk,
        Process,
        ProcessStatus,
        Sandbox,
        SandboxExhausted,
        SandboxInfo,
        SandboxLost,
        SandboxSpec,
        SupportsForward,
        SupportsPty,
        SupportsSnapshot,
        SupportsWaited,
    )
    from .factory import BACKENDS, BackendOption, backend_names, backend_options, create_backend
    from .forwarding import Forward
    from .lease import Lease, LeaseOver, Lessor, SandboxPerLease

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
    """Imports each name on first use: errors and command lines do not need the sandbox modules."""
    if name in __all__:
        for home in ("base", "lease", "forwarding", "factory"):
            module = importlib.import_module(f"backends.{home}")
            if hasattr(module, name):
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module 'backends' has no attribute {name!r}")
