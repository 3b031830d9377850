"""Sandboxes that a service keeps, an engine or a provider: who has made one asks it for the removal."""

from __future__ import annotations

import asyncio

from backends.tasks import finish, has_failed, seen

from .connection import Connection
from .sandbox import ExecutorSandbox


class RemoteSandbox(ExecutorSandbox):
    """It is removed when its connection ends, even if it is never closed."""

    def __init__(self, connection: Connection, *, id: str, name: str, workdir: str, python: str | None) -> None:
        super().__init__(connection, id=id, workdir=workdir, python=python)
        self._name = name
        self._end = self._ending()

    async def _remove(self) -> None:
        """Remove it, wherever it is kept. Raises `BackendError`."""
        raise NotImplementedError

    def _ending(self) -> asyncio.Task[None]:
        async def watch() -> None:
            await asyncio.wait([self._connection.ended])
            await self._remove()

        ending = asyncio.create_task(watch())
        ending.add_done_callback(seen)
        return ending

    async def close(self) -> None:
        """See `Sandbox.close`.

        Raises:
            BackendError: it could not be removed; calling again tries again. Without a connection all processes inside
                end, and `reap` removes the rest.
        """
        self._connection.fail(f"{self._name} was closed")
        if has_failed(self._end) or self._end.cancelling():
            self._end = self._ending()
        await finish(self._end)
