"""Sandboxes that a service keeps, an engine or a provider: who has made one asks it for the removal."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from backends.base import SandboxCheckpoint
from backends.tasks import finish, has_failed, seen

from .connection import Connection
from .errors import BackendUnavailable, SandboxLost
from .holding import held
from .sandbox import ExecutorSandbox


@dataclass(frozen=True, slots=True, eq=False)
class SavedCheckpoint(SandboxCheckpoint):
    """A checkpoint whose files are an image."""

    service: object
    """The backend that has the image."""
    image: str
    state: bytes
    """The folder and the variables of the shell, as the executor has given them."""
    kept: object
    """What removes the image when nothing refers to it any more."""


class RemoteSandbox(ExecutorSandbox):
    """It is removed when its connection ends, even if it is never closed."""

    def __init__(
        self, connection: Connection, service: object, *, id: str, name: str, workdir: str, python: str | None
    ) -> None:
        """
        Args:
            service: the backend; checkpoints of its other sandboxes can be used.
        """
        super().__init__(connection, id=id, workdir=workdir, python=python)
        self._name, self._raw, self._service = name, connection, service
        self._saving = asyncio.Lock()
        self._begun: SavedCheckpoint | None = None
        """Where it went on from: the image stays for as long."""
        self._end = self._ending()

    async def _remove(self) -> None:
        """Remove it, wherever it is kept. Raises `BackendError`."""
        raise NotImplementedError

    async def _saved(self) -> tuple[str, object]:
        """An image of its files, and what removes that image once it is garbage. Raises `BackendError`."""
        raise NotImplementedError

    async def _another(self, image: str, labels: Mapping[str, str] | None) -> Self:
        """A sandbox with the same settings and such files. Raises `BackendError`."""
        raise NotImplementedError

    async def checkpoint(self, *, running: Literal["error", "left out"] = "error") -> SavedCheckpoint:
        """See `SupportsCheckpoint`. The times of files are those that images have: often whole seconds.

        Raises:
            BackendUnavailable: files are in no image: in /dev/shm, in memory, or in a volume.
        """
        stopped = running == "left out"

        async def save() -> SavedCheckpoint:
            if self._connection.lost is not None:
                raise SandboxLost(self._connection.lost)
            async with self._saving, held(self._raw, self.id, stop=stopped) as now:
                if now.shared:
                    names = ", ".join(now.shared[:5])
                    raise BackendUnavailable(
                        f"{self._name} has files in /dev/shm ({names}), and images have none. Next step: move them"
                    )
                image, kept = await self._saved()
                return SavedCheckpoint(self.id, now.folder, tuple(now.running), self._service, image, now.state, kept)

        return await self._connection.guard(finish(save()))

    async def fork(
        self, checkpoint: SandboxCheckpoint | None = None, *, labels: Mapping[str, str] | None = None
    ) -> Self:
        """See `SupportsCheckpoint.fork`."""
        taken = checkpoint or await self.checkpoint()
        if not isinstance(taken, SavedCheckpoint) or taken.service is not self._service:
            raise BackendUnavailable(f"{self._name} cannot use a checkpoint of another backend")
        child = await self._connection.guard(self._another(taken.image, labels))
        child._begun = taken
        try:
            await child._raw.request("go_on", taken.state)
        except BaseException:
            await finish(child.close())
            raise
        return child

    def _ending(self) -> asyncio.Task[None]:
        async def watch() -> None:
            await asyncio.wait([self._connection.ended])
            await self._remove()
            self._begun = None

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
