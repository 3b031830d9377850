"""Sandboxes that tools and rewards work in.

    backend = create_backend("local")
    sandbox = await backend.create(SandboxSpec())
    result = await sandbox.exec("echo hello > note.txt; ls", timeout=10)

A backend that cannot run here says so, and what to do about it: `(await backend.check()).fix`.

These names are the package's face. Other packages, and backends of others, import nothing else of it, but
`backends.images`.
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
        SandboxCheckpoint,
        SupportsCheckpoint,
        SupportsClose,
        SupportsForward,
        SupportsImagesOf,
        SupportsPty,
        SupportsReset,
        SupportsRestore,
        SupportsSnapshot,
        SupportsWaited,
    )
    from .connection import ByteStream, Connection, asyncio_stream
    from .errors import (
        INSIDE,
        BackendError,
        BackendUnavailable,
        ExitCode,
        ImageUnavailable,
        LachesisError,
        ProcessesRunning,
        SandboxExhausted,
        SandboxLost,
        SettingsError,
    )
    from .executor.trees import remove_tree, walk
    from .executor_code import executor_bytecode, executor_source
    from .extraction import Room
    from .factory import BACKENDS, BackendOption, backend_names, backend_options, create_backend
    from .first_use import in_turn, parse
    from .forwarding import Forward
    from .host.folders import cache_folder
    from .lease import Lease, LeaseOver, Lessor, SandboxPerLease
    from .owner import is_gone, new_id, owner_of, this_owner
    from .plugins import PluginBroken, Registry, UnknownPlugin
    from .sandbox import ExecutorSandbox, initialise
    from .spec import SandboxInfo, SandboxSpec, reject_fields, sandbox_title
    from .tasks import cancel_requests, finish, in_own_thread, run_all, seen, stop_event
    from .warm import WarmSandboxes

__all__ = [
    "BACKENDS", "INSIDE", "MAX_DOWNLOAD", "MAX_MEMBERS", "MAX_OUTPUT", "Availability", "Backend", "BackendError",
    "BackendOption", "BackendUnavailable", "ByteStream", "Connection", "ExecResult", "ExecutorSandbox", "ExitCode",
    "FileStatus", "Forward", "ImageUnavailable", "LachesisError", "Lease", "LeaseOver", "Lessor", "OutputChunk",
    "PluginBroken", "Process", "ProcessStatus", "ProcessesRunning", "Registry", "Room", "Sandbox",
    "SandboxCheckpoint", "SandboxExhausted", "SandboxInfo", "SandboxLost", "SandboxPerLease", "SandboxSpec",
    "SettingsError", "SupportsCheckpoint", "SupportsClose", "SupportsForward", "SupportsImagesOf", "SupportsPty",
    "SupportsReset", "SupportsRestore", "SupportsSnapshot", "SupportsWaited", "UnknownPlugin", "WarmSandboxes",
    "asyncio_stream", "backend_names", "backend_options", "cache_folder", "cancel_requests", "create_backend",
    "executor_bytecode", "executor_source", "finish", "in_own_thread", "in_turn", "initialise", "is_gone", "new_id",
    "owner_of", "parse", "reject_fields", "remove_tree", "run_all", "sandbox_title", "seen", "stop_event",
    "this_owner", "walk",
]  # fmt: skip
_HOMES = {
    "errors": "INSIDE BackendError BackendUnavailable ExitCode ImageUnavailable LachesisError ProcessesRunning "
    "SandboxExhausted SandboxLost SettingsError",
    "spec": "SandboxInfo SandboxSpec reject_fields sandbox_title",
    "base": "MAX_DOWNLOAD MAX_MEMBERS MAX_OUTPUT Availability Backend ExecResult FileStatus OutputChunk Process "
    "ProcessStatus Sandbox SandboxCheckpoint SupportsCheckpoint SupportsClose SupportsForward "
    "SupportsImagesOf SupportsPty "
    "SupportsReset SupportsRestore SupportsSnapshot SupportsWaited",
    "lease": "Lease LeaseOver Lessor SandboxPerLease",
    "factory": "BACKENDS BackendOption backend_names backend_options create_backend",
    "forwarding": "Forward",
    "connection": "ByteStream Connection asyncio_stream",
    "sandbox": "ExecutorSandbox initialise",
    "executor_code": "executor_bytecode executor_source",
    "executor.trees": "remove_tree walk",
    "extraction": "Room",
    "host.folders": "cache_folder",
    "owner": "is_gone new_id owner_of this_owner",
    "first_use": "in_turn parse",
    "plugins": "PluginBroken Registry UnknownPlugin",
    "warm": "WarmSandboxes",
    "tasks": "cancel_requests finish in_own_thread run_all seen stop_event",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Imports what is asked for, then: errors and command lines need nothing of sandboxes."""
    if name not in _HOME:
        raise AttributeError(f"module 'backends' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"backends.{_HOME[name]}"), name)
    return value
