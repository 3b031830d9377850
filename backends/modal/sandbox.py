"""A sandbox at Modal, from its first connection to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.connection import Connection
from backends.errors import SandboxLost
from backends.remote import RemoteSandbox

from .calls import retried, terminate

if TYPE_CHECKING:
    import modal


class ModalSandbox(RemoteSandbox):
    """A Modal sandbox whose entrypoint is the executor."""

    def __init__(
        self, connection: Connection, sandbox: modal.Sandbox, *, id: str, name: str, workdir: str, python: str | None
    ) -> None:
        super().__init__(connection, id=id, name=name, workdir=workdir, python=python)
        self._sandbox = sandbox

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

    async def _remove(self) -> None:
        await terminate(self._sandbox, self._name)
