"""A sandbox at Modal, from its first connection to its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from backends.connection import Connection
from backends.errors import SandboxLost
from backends.sandbox import ExecutorSandbox
from backends.tasks import finish, has_failed, seen

from .calls import retried, terminate

if TYPE_CHECKING:
    import modal


class ModalSandbox(ExecutorSandbox):
    """A Modal sandbox whose entrypoint is the executor."""

    def __init__(
        self, connection: Connection, sandbox: modal.Sandbox, *, id: str, name: str, workdir: str, python: str | None
    ) -> None:
        super().__init__(connection, id=id, workdir=workdir, python=python)
        self._sandbox, self._name = sandbox, name
        self._end = self._ending()

    @property
    def object_id(self) -> str:
        """Its name at Modal: `sb-...`."""
        return self._sandbox.object_id

    async def snapshot(self) -> str:
        """Save the file system as an image at Modal, for 30 days.

        Raises:
            SandboxLost: the sandbox is gone.
            BackendError: Modal failed.
        """
        if self._connection.lost is not None:
            raise SandboxLost(self._connection.lost)
        what = f"{self._name} could not be saved as an image"
        keeping = retried(lambda: self._sandbox.snapshot_filesystem.aio(timeout=300), what)
        image = await self._connection.guard(keeping)
        return image.object_id

    async def close(self) -> None:
        """See `Sandbox.close`.

        Raises:
            BackendError: Modal could not be reached; calling again retries. The sandbox ends by itself, after its grace
                or its lifetime.
        """
        self._connection.fail(f"{self._name} was closed")
        if has_failed(self._end):
            self._end = self._ending()  # another attempt
        await finish(self._end)

    def _ending(self) -> asyncio.Task[None]:
        ending = asyncio.create_task(self._watch())
        ending.add_done_callback(seen)
        return ending

    async def _watch(self) -> None:
        """End the sandbox when its connection is lost: without one it only costs money."""
        await asyncio.wait([self._connection.ended])
        await terminate(self._sandbox, self._name)
