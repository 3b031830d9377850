"""What the sandboxes of a backend share: its engine and options, and what is known of images."""

from __future__ import annotations

import asyncio
import json
import platform
import weakref
from collections.abc import Callable
from typing import Any

import aiodocker

from backends.errors import BackendUnavailable
from backends.limits import MissingDefaults
from backends.spec import SandboxInfo

from . import container as containers
from . import hardened as profile
from .client import Engine, EngineInfo, client, engine_info, explained, find_engine, request
from .container import ID, LABEL, Account, Image, Options
from .images import Pull, ensure_image
from .route import remove_stale_folders


class DockerShared:
    """See `DockerBackend`, whose arguments these are."""

    def __init__(
        self,
        url: str | None,
        image: str,
        pull: Pull,
        progress: Callable[[str], None] | None,
        transport: str,
        grace: float,
        parallel: int | None,
        hardened: bool,
        options: Options,
    ) -> None:
        self._url, self._image, self._pull, self._progress = url, image, pull, progress
        self._transport, self._grace, self._parallel = transport, grace, parallel
        self._hardened = hardened
        self._options = options
        self._found: tuple[Engine, EngineInfo] | None = None
        self._missing = MissingDefaults("docker")
        self._quota = True  # until the engine rejects one
        self._accounts: dict[tuple[str, str], Account] = {}  # by image and user
        self._volume: str | None = None  # of the portable runtime, once it exists
        self._parts: dict[tuple[str, str], bool] = {}  # by image and path
        # A backend serves any number of event loops; these objects belong to one loop each.
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    def _options_for(self, found: EngineInfo) -> Options:
        """Raises `BackendUnavailable` if the profile cannot be had."""
        return profile.hardened(self._options, found) if self._hardened else self._options

    async def _engine(self, again: bool = False) -> tuple[Engine, EngineInfo]:
        if self._found is None or again:
            engine = find_engine(self._url)
            async with client(engine) as docker:
                found = await engine_info(docker, engine)
            if found.architecture != platform.machine():
                raise BackendUnavailable(
                    f"the engine at {engine.url} runs {found.architecture} and this machine is {platform.machine()}: "
                    "the executor comes from here, so use an engine of the same architecture"
                )
            await asyncio.to_thread(remove_stale_folders)
            self._found = engine, found
        return self._found

    def _lock(self) -> asyncio.Lock:
        """The lock for work that is done once for all sandboxes."""
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            processors = self._found[1].cpus if self._found is not None else 1
            self._slots[loop] = asyncio.Semaphore(self._parallel or max(4, int(2 * processors)))
        return self._slots[loop]

    async def _ensure_image(self, docker: aiodocker.Docker, engine: Engine, name: str) -> Image:
        # One at a time, so that sandboxes that start together pull a missing image once.
        async with self._lock():
            found = await ensure_image(docker, engine, name, self._pull, self._progress)
            async with explained(engine, f"looking for the image {name}"):
                return Image.of(found)

    async def _remove(self, docker: aiodocker.Docker, engine: Engine, id: str) -> None:
        """Remove a container in any state, and wait until it is gone."""
        container = docker.containers.container(id)
        async with self._slot(), explained(engine, f"removing the container of sandbox {id}"):
            while True:
                try:
                    await container.delete(force=True, v=True)
                except aiodocker.DockerError as error:
                    if error.status == 404:
                        return
                    if error.status not in (409, 500):  # it is being removed, or was just ending
                        raise
                status, _, _ = await request(docker, "GET", f"containers/{id}/json")
                if status == 404:
                    return
                await asyncio.sleep(0.02)


async def listed(docker: aiodocker.Docker, engine: Engine) -> list[SandboxInfo]:
    # A container that a user made from a snapshot has its labels, but not its name.
    found = await rows(docker, engine, "id")
    return [containers.listed(row) for row in found if f"/{row['Labels'][ID]}" in row.get("Names", [])]


async def rows(docker: aiodocker.Docker, engine: Engine, label: str) -> list[dict[str, Any]]:
    filters = json.dumps({"label": [LABEL + label]})
    async with explained(engine, "listing containers"):
        found = await docker.containers.list(all=1, filters=filters)
    return [dict(container._container) for container in found]
