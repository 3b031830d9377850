"""A sandbox at Modal, from its first connection to its end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from backends.connection import Connection
from backends.errors import SandboxLost
from backends.remote import RemoteSandbox
from backends.spec import SandboxSpec

from .calls import retried, terminate

if TYPE_CHECKING:
    import modal


class ModalSandbox(RemoteSandbox):
    """A Modal sandbox whose entrypoint is the executor."""

    def __init__(
        self,
        connection: Connection,
        sandbox: modal.Sandbox,
        spec: SandboxSpec,
        service: object,
        create: Callable[[SandboxSpec], Coroutine[Any, Any, ModalSandbox]],
        *,
        id: str,
        name: str,
        workdir: str,
        python: str | None,
    ) -> None:
        """
        Args:
            create: makes more sandboxes of `service`.
        """
        super().__init__(connection, service, id=id, name=name, workdir=workdir, python=python)
        self._sandbox, self._spec, self._create = sandbox, spec, create

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
        return await self._connection.guard(self._image())

    async def _image(self) -> str:
        if self._connection.lost is not None:
            raise SandboxLost(self._connection.lost)
        what = f"{self._name} could not be saved as an image"
        image = await retried(lambda: self._sandbox.snapshot_filesystem.aio(timeout=300), what)
        return image.object_id

    async def _saved(self) -> tuple[str, object]:
        return await self._image(), None  # Modal removes it after 30 days

    async def _another(self, image: str, labels: Mapping[str, str] | None) -> ModalSandbox:
        spec = replace(self._spec, image=image)
        return await self._create(spec if labels is None else replace(spec, labels=labels))

    async def _remove(self) -> None:
        await terminate(self._sandbox, self._name)
