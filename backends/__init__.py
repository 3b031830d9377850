"""Sandboxes that tools and rewards work in.

    backend = create_backend("local")
    sandbox = await backend.create(SandboxSpec())
    result = await sandbox.exec("echo hello > note.txt; ls", timeout=10)

A backend that cannot run here says so, and what to do about it: `(await backend.check()).fix`.
"""

from .base import (
    MAX_OUTPUT,
    Availability,
    Backend,
    BackendError,
    BackendUnavailable,
    ExecResult,
    OutputChunk,
    Process,
    ProcessStatus,
    Sandbox,
    SandboxLost,
    SandboxSpec,
)
from .factory import create_backend

__all__ = [
    "MAX_OUTPUT",
    "Availability",
    "Backend",
    "BackendError",
    "BackendUnavailable",
    "ExecResult",
    "OutputChunk",
    "Process",
    "ProcessStatus",
    "Sandbox",
    "SandboxLost",
    "SandboxSpec",
    "create_backend",
]
