"""The old package `atropos.backends`: tool backends over the pools of today."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lachesis_compat.tool_backends.engines import (
    ModalSandboxConfig,
    ModalToolBackend,
    NomadBackendConfig,
    NomadToolBackend,
    create_tool_backend,
)
from lachesis_compat.tool_backends.pool import ExecutionResult, SandboxExecutor, ToolBackend
from lachesis_compat.tool_backends.pool import TrajectorySlot as Slot

__all__ = ["ExecutionResult", "ModalSandboxConfig", "ModalToolBackend", "NomadBackendConfig", "NomadToolBackend"]
__all__ += ["SandboxExecutor", "Slot", "ToolBackend", "create_tool_backend"]
_OF_POOLS = {"SlotPool": "lachesis_pools.slots", "NomadClient": "lachesis_pools.engines.nomad"}


def __getattr__(name: str) -> Any:
    """What `lachesis-pools` has under the same name."""
    if name not in _OF_POOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_OF_POOLS[name]), name)
