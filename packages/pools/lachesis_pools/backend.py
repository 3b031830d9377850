"""The backend `pool`: sandboxes of a pool's workers, wherever these run."""

from __future__ import annotations

import asyncio
import weakref
from functools import partial

from backends import Availability, BackendError, BackendUnavailable, SandboxInfo, SandboxSpec
from backends.connection import PATIENCE

from .link import PoolLink
from .own import OwnPool
from .places import known_pool
from .sandbox import PoolSandbox
from .wire import DEFAULT

PROFILE = "profile"
"""The label of a `SandboxSpec` that asks for workers of a profile."""


class PoolBackend:
    """Sandboxes of the workers of a pool; see `lachesis pool`.

    The workers' backend and its options decide what a sandbox is. A sandbox whose worker or connection is gone is lost:
    none is continued elsewhere.
    """

    name = "pool"

    def __init__(
        self, url: str = "", *, up: str = "", token_file: str = "", profile: str = "", start_timeout: float = 600.0
    ) -> None:
        """
        Args:
            url: of the pool. Default: LACHESIS_POOL_URL, or the pool that was started on this machine.
            up: arguments of `lachesis pool up`, for a pool of this run: `--engine slurm --slots 16 --most 4`.
            token_file: a file with its key. Default: LACHESIS_POOL_TOKEN, or that of the pool on this machine.
            profile: of the workers, for sandboxes whose label `profile` names no other one.
            start_timeout: seconds for a free slot and the start of a sandbox in it, together.
        """
        if url and up:
            raise ValueError("a pool has either a url, or is started with the arguments of up")
        self._given, self._profile, self._start_timeout = url or up, profile, start_timeout
        self._own = OwnPool(up) if up else None
        self._find = self._own.find if self._own else partial(asyncio.to_thread, known_pool, url, token_file)
        self._links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, PoolLink] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"PoolBackend({self._given!r})"

    def _link(self) -> PoolLink:
        loop = asyncio.get_running_loop()
        if loop not in self._links:
            self._links[loop] = PoolLink(self._find)
        return self._links[loop]

    async def check(self) -> Availability:
        """Ask the pool what it has."""
        try:
            said = await self._link().ask("GET", "status")
        except BackendError as error:
            return Availability.lacking(error, "start one: lachesis pool up")
        slots = sum(said["slots"].values())
        detail = f"pool {said['pool']}: {len(said['workers'])} workers, {slots} slots, {said['waiting']} leases wait"
        return Availability(True, detail, "", "that of its workers", "those of its workers")

    async def create(self, spec: SandboxSpec) -> PoolSandbox:
        """See `Backend.create`."""
        profile = spec.labels.get(PROFILE) or self._profile
        return await self._link().acquire(spec, self._start_timeout, "" if profile == DEFAULT else profile)

    async def close(self) -> None:
        """End the pool of this run, if it has one."""
        if self._own is not None:
            await self._own.close()

    async def images_of(self) -> str:
        """See `SupportsImagesOf`."""
        said = await self._link().ask("GET", "status")
        kinds = {each["backend"] for each in said["profiles"].values()} | {each["backend"] for each in said["workers"]}
        if len(kinds - {""}) != 1:
            known = ", ".join(sorted(kinds)) or "none yet"
            raise BackendUnavailable(f"a Dockerfile needs a pool whose workers have one backend, and they have {known}")
        return str((kinds - {""}).pop())

    async def sandboxes(self) -> list[SandboxInfo]:
        return [info for _, info in await self._list()]

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. A lease also ends with the connection of its run."""
        found = [(lease, info) for lease, info in await self._list() if everyone or info.orphan]
        ended = {lease: info for lease, info in found if run_id is None or info.run_id == run_id}
        if ended:
            await self._link().ask("POST", "end", [*ended])
            try:
                await asyncio.wait_for(self._until_gone({*ended}), PATIENCE)
            except TimeoutError:
                raise BackendError(f"leases of the pool do not end: {', '.join(ended)}") from None
        return [*ended.values()]

    async def _until_gone(self, leases: set[str]) -> None:
        while leases & {lease for lease, _ in await self._list()}:  # noqa: ASYNC110  (workers do it)
            await asyncio.sleep(0.05)

    async def _list(self) -> list[tuple[str, SandboxInfo]]:
        found = await self._link().ask("GET", "leases")
        described = ((each["lease"], SandboxInfo.of(self.name, each["sandbox"], each, "in a pool")) for each in found)
        return [(lease, info) for lease, info in described if info.id]
