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
        MAX_DOWNLOAD as MAX_DOWNLOAD,
    )
    from .base import (
        MAX_MEMBERS as MAX_MEMBERS,
    )
    from .base import (
        MAX_OUTPUT as MAX_OUTPUT,
    )
    from .base import (
        Availability as Availability,
    )
    from .base import (
        Backend as Backend,
    )
    from .base import (
        ExecResult as ExecResult,
    )
    from .base import (
        FileStatus as FileStatus,
    )
    from .base import (
        OutputChunk as OutputChunk,
    )
    from .base import (
        Process as Process,
    )
    from .base import (
        ProcessStatus as ProcessStatus,
    )
    from .base import (
        Sandbox as Sandbox,
    )
    from .base import (
        SandboxInfo as SandboxInfo,
    )
    from .base import (
        SupportsForward as SupportsForward,
    )
    from .base import (
        SupportsPty as SupportsPty,
    )
    from .base import (
        SupportsSnapshot as SupportsSnapshot,
    )
    from .base import (
        SupportsWaited as SupportsWaited,
    )
    from .connection import (
        ByteStream as ByteStream,
    )
    from .connection import (
        Connection as Connection,
    )
    from .connection import (
        asyncio_stream as asyncio_stream,
    )
    from .errors import (
        INSIDE as INSIDE,
    )
    from .errors import (
        BackendError as BackendError,
    )
    from .errors import (
        BackendUnavailable as BackendUnavailable,
    )
    from .errors import (
        ExitCode as ExitCode,
    )
    from .errors import (
        ImageUnavailable as ImageUnavailable,
    )
    from .errors import (
        LachesisError as LachesisError,
    )
    from .errors import (
        SandboxExhausted as SandboxExhausted,
    )
    from .errors import (
        SandboxLost as SandboxLost,
    )
    from .errors import (
        SettingsError as SettingsError,
    )
    from .executor.trees import (
        remove_tree as remove_tree,
    )
    from .executor.trees import (
        walk as walk,
    )
    from .executor_code import (
        executor_bytecode as executor_bytecode,
    )
    from .executor_code import (
        executor_source as executor_source,
    )
    from .extraction import (
        Room as Room,
    )
    from .factory import (
        BACKENDS as BACKENDS,
    )
    from .factory import (
        BackendOption as BackendOption,
    )
    from .factory import (
        backend_names as backend_names,
    )
    from .factory import (
        backend_options as backend_options,
    )
    from .factory import (
        create_backend as create_backend,
    )
    from .first_use import (
        in_turn as in_turn,
    )
    from .first_use import (
        parse as parse,
    )
    from .forwarding import (
        Forward as Forward,
    )
    from .host.folders import (
        cache_folder as cache_folder,
    )
    from .lease import (
        Lease as Lease,
    )
    from .lease import (
        LeaseOver as LeaseOver,
    )
    from .lease import (
        Lessor as Lessor,
    )
    from .lease import (
        SandboxPerLease as SandboxPerLease,
    )
    from .owner import (
        is_gone as is_gone,
    )
    from .owner import (
        new_id as new_id,
    )
    from .owner import (
        owner_of as owner_of,
    )
    from .owner import (
        this_owner as this_owner,
    )
    from .plugins import (
        PluginBroken as PluginBroken,
    )
    from .plugins import (
        Registry as Registry,
    )
    from .plugins import (
        UnknownPlugin as UnknownPlugin,
    )
    from .sandbox import (
        ExecutorSandbox as ExecutorSandbox,
    )
    from .sandbox import (
        initialise as initialise,
    )
    from .spec import (
        SandboxSpec as SandboxSpec,
    )
    from .spec import (
        reject_fields as reject_fields,
    )
    from .spec import (
        sandbox_title as sandbox_title,
    )
    from .tasks import (
        cancel_requests as cancel_requests,
    )
    from .tasks import (
        finish as finish,
    )
    from .tasks import (
        in_own_thread as in_own_thread,
    )
    from .tasks import (
        run_all as run_all,
    )
    from .tasks import (
        seen as seen,
    )
    from .tasks import (
        stop_event as stop_event,
    )

_HOMES = {
    "errors": "INSIDE BackendError BackendUnavailable ExitCode ImageUnavailable LachesisError SandboxExhausted "
    "SandboxLost SettingsError",
    "spec": "SandboxSpec reject_fields sandbox_title",
    "base": "MAX_DOWNLOAD MAX_MEMBERS MAX_OUTPUT Availability Backend ExecResult FileStatus OutputChunk Process "
    "ProcessStatus Sandbox SandboxInfo SupportsForward SupportsPty SupportsSnapshot SupportsWaited",
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
    "tasks": "cancel_requests finish in_own_thread run_all seen stop_event",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Imports what is asked for, then: errors and command lines need nothing of sandboxes."""
    if name not in _HOME:
        raise AttributeError(f"module 'backends' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"backends.{_HOME[name]}"), name)
    return value
