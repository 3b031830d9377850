"""Sandboxes of a pool, on the side of the run."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from backends import BackendUnavailable, Sandbox, SandboxCheckpoint, SandboxSpec
from backends.connection import Connection
from backends.sandbox import ExecutorSandbox
from backends.spec import sandbox_title
from backends.tasks import finish

from .connection import PoolConnection

Fork = Callable[[SandboxSpec, PoolConnection, int], Coroutine[Any, Any, Sandbox]]
"""Makes a child of a checkpoint of a lease."""


@dataclass(frozen=True, slots=True, eq=False)
class _PoolCheckpoint(SandboxCheckpoint):
    connection: PoolConnection
    number: int
    kept: object


class _Kept:
    """What makes the worker let go of a checkpoint, once it is garbage."""

    def __init__(self, connection: PoolConnection, number: int) -> None:
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _forget, loop, connection, number).atexit = False


def _forget(loop: asyncio.AbstractEventLoop, connection: PoolConnection, number: int) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(connection.tell, {"forget": number})


class PoolSandbox(ExecutorSandbox):
    """A sandbox of a worker."""

    shared_network: Literal["none", "this machine", "another machine"] = "none"

    def __init__(self, connection: PoolConnection, spec: SandboxSpec, facts: Mapping[str, Any], fork: Fork) -> None:
        super().__init__(
            cast(Connection, connection), id=facts["sandbox"], workdir=facts["workdir"], python=facts["python"]
        )
        self._own, self._spec, self._fork = connection, spec, fork
        self._closing: asyncio.Task[None] | None = None
        if facts["shared"]:
            self.shared_network = "another machine"

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._own.lost = self._own.lost or f"{sandbox_title(self.id, self._spec.labels)} was closed"
        self._own.fail(self._own.lost)
        if self._closing is None:
            self._closing = asyncio.create_task(self._own.release())
        await asyncio.shield(self._closing)


class ForkablePoolSandbox(PoolSandbox):
    """One whose worker makes checkpoints."""

    async def checkpoint(self, *, running: Literal["error", "left out"] = "error") -> SandboxCheckpoint:
        """See `SupportsCheckpoint`. It is freed with the lease of this sandbox at the latest."""
        found, _ = await self._connection.guard(finish(self._own.ask({"whole": "checkpoint", "running": running})))
        number = found["number"]
        left = tuple(found["left_out"])
        return _PoolCheckpoint(found["sandbox"], found["cwd"], left, self._own, number, _Kept(self._own, number))

    async def fork(
        self, checkpoint: SandboxCheckpoint | None = None, *, labels: Mapping[str, str] | None = None
    ) -> Sandbox:
        """See `SupportsCheckpoint`. The child takes a slot of the same worker; the sandbox of `checkpoint` must not be
        closed yet."""
        taken = self._own_kind(checkpoint or await self.checkpoint())
        spec = self._spec if labels is None else replace(self._spec, labels=labels)
        return await self._connection.guard(self._fork(spec, taken.connection, taken.number))

    def _own_kind(self, checkpoint: SandboxCheckpoint) -> _PoolCheckpoint:
        if not isinstance(checkpoint, _PoolCheckpoint):
            raise BackendUnavailable(f"sandbox {self.id} cannot use a checkpoint of another backend")
        return checkpoint


class RestorablePoolSandbox(ForkablePoolSandbox):
    """One whose worker's sandboxes can go back. They are reset by the worker, between leases."""

    async def restore(self, checkpoint: SandboxCheckpoint) -> None:
        """See `SupportsRestore`: to a checkpoint of this sandbox."""
        taken = self._own_kind(checkpoint)
        if taken.connection is not self._own:
            raise BackendUnavailable(f"sandbox {self.id} goes back to its own checkpoints only")
        await self._connection.guard(finish(self._own.ask({"whole": "restore", "number": taken.number})))
