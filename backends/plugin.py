"""Everything that a backend outside this project is written with; `docs/backend-plugins.md` has an example.

These names and their signatures are stable. Names of other modules of `backends` may change.
"""

from .base import Availability, SandboxInfo
from .connection import ByteStream, Connection, asyncio_stream
from .errors import BackendError, BackendUnavailable, SandboxExhausted, SandboxLost
from .executor.trees import remove_tree
from .executor_code import bytecode as executor_bytecode
from .executor_code import source as executor_source
from .factory import BACKENDS
from .owner import is_gone, new_id, owner_of, this_owner
from .sandbox import ExecutorSandbox, initialise
from .spec import SandboxSpec, reject_fields, sandbox_title

__all__ = [
    "BACKENDS",
    "Availability",
    "BackendError",
    "BackendUnavailable",
    "ByteStream",
    "Connection",
    "ExecutorSandbox",
    "SandboxExhausted",
    "SandboxInfo",
    "SandboxLost",
    "SandboxSpec",
    "asyncio_stream",
    "executor_bytecode",
    "executor_source",
    "initialise",
    "is_gone",
    "new_id",
    "owner_of",
    "reject_fields",
    "remove_tree",
    "sandbox_title",
    "this_owner",
]
