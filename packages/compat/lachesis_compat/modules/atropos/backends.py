"""The old package `atropos.backends`: the sandboxes' interface, and tool backends over the pools of today."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from backends import *  # noqa: F403
from backends import __all__ as _OF_SANDBOXES
from lachesis_compat.removed_names import refuse
from lachesis_compat.tool_backends.engines import (  # noqa: F401
    ModalSandboxConfig,
    ModalToolBackend,
    NomadBackendConfig,
    NomadToolBackend,
    create_tool_backend,
)
from lachesis_compat.tool_backends.pool import ExecutionResult, SandboxExecutor, ToolBackend  # noqa: F401
from lachesis_compat.tool_backends.pool import TrajectorySlot as Slot  # noqa: F401

__all__ = [
    *_OF_SANDBOXES,
    *("ExecutionResult", "ModalSandboxConfig", "ModalToolBackend", "NomadBackendConfig", "NomadToolBackend"),
    *("SandboxExecutor", "Slot", "ToolBackend", "create_tool_backend"),
]
_OF_POOLS = {"SlotPool": "lachesis_pools.slots", "NomadClient": "lachesis_pools.engines.nomad"}


def __getattr__(name: str) -> Any:
    """What `lachesis-pools` has under the same name."""
    if name not in _OF_POOLS:
        refuse("atropos.backends", name)
    return getattr(import_module(_OF_POOLS[name]), name)
