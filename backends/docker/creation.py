"""The creation of a container whose PID 1 is the executor, and the sandbox that it becomes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiodocker

from backends.connection import Connection
from backends.errors import BackendError, BackendUnavailable, SandboxLost
from backends.host import runtime
from backends.owner import ID_PREFIX, this_owner
from backends.remote import RemoteSandbox
from backends.sandbox import initialise
from backends.spec import SandboxSpec
from backends.tasks import finish

from . import container as containers
from . import hardened
from .client import PATIENCE, Engine, EngineError, EngineInfo, client, explained, request, upload
from .container import CHECKPOINT, ID, LABEL, Account, Image, Options
from .images import CHECKPOINTS, SNAPSHOTS
from .route import RelayRoute, Route, SocketRoute, runtime_volume, tar_of
from .saving import SavedImage
from .shared import DockerShared

START_TIMEOUT = 120.0
"""Seconds from the start of a container to the first message of its executor: engines are slow under load."""


@dataclass
class Creation:
    """A sandbox that is being created. `undo` removes what exists of it."""

    backend: DockerShared
    spec: SandboxSpec
    id: str
    name: str
    engine: Engine
    facts: EngineInfo
    docker: aiodocker.Docker
    """Closed once the sandbox exists."""
    options: Options
    another: Callable[[SandboxSpec], Coroutine[Any, Any, DockerSandbox]]
    """Makes more sandboxes of this backend."""
    created: float = field(default_factory=time.time)
    may_exist: bool = False
    """Whether a container of that name may exist."""
    route: Route | None = None
    connection: Connection | None = None
    image: Image | None = None
    asked: SandboxSpec = field(init=False)
    """Without default limits."""

    def __post_init__(self) -> None:
        self.asked = self.spec

    @property
    def labels(self) -> dict[str, str]:
        return containers.labels(self.id, self.spec, this_owner(), self.created)

    async def sandbox(self) -> DockerSandbox:
        backend = self.backend
        image = await backend._ensure_image(self.docker, self.engine, self.spec.image or backend._image)
        self.image = image
        if backend._hardened:
            self.spec, self.options = hardened.in_image(self.spec, self.options, image)
        spec, options = self.spec, self.options
        async with backend._slot():
            user = options.user if options.user is not None else image.user
            account = containers.ROOT if containers.is_root(user) else await self._account(image, user)
            workdir = containers.workdir(spec, image, account)
            in_memory = await self._create(image, workdir, account)
            async with explained(self.engine, f"starting the container of {self.name}"):
                await self.docker.containers.container(self.id).start()
            assert self.route is not None
            try:
                self.connection = await Connection.resumable(
                    self.route.dial,
                    name=self.name,
                    grace=backend._grace,
                    start_timeout=START_TIMEOUT,
                    sealed=self.route.sealed,
                )
            except SandboxLost as error:
                raise BackendError(f"{self.name} could not be started: {error}") from None
        self.connection.throttled = self.throttled
        env = containers.environment(image, account, workdir, read_only=in_memory)
        inside = await initialise(self.connection, self.spec, workdir=workdir, env=env, grace=backend._grace)
        sandbox = DockerSandbox(self, self.connection, workdir=workdir, python=inside.python, in_memory=in_memory)
        if spec.network and options.network.partition(":")[0] in ("host", "container"):
            sandbox.shared_network = "another machine"
        return sandbox

    async def undo(self, strict: bool = False) -> None:
        """Remove the container. Raises `BackendError` with `strict` only; without it, another error is being raised."""
        if self.connection is not None:
            self.connection.fail(f"{self.name} was never ready")
        else:
            self.backend._volume = None  # it may have been removed
        try:
            if self.may_exist:
                async with client(self.engine, self.facts.api) as docker:
                    await self.backend._remove(docker, self.engine, self.id)
        except BackendError:
            if strict:
                raise
        finally:
            if self.route is not None:
                self.route.close()

    async def still_there(self) -> None:
        """Raise `SandboxLost` or `SandboxExhausted` with the reason if the container has ended."""
        try:
            async with asyncio.timeout(5.0), client(self.engine, self.facts.api) as docker:
                status, _, body = await request(docker, "GET", f"containers/{self.id}/json")
                if status == 200 and json.loads(body)["State"].get("Running", True):
                    return
                if status not in (200, 404):
                    return
                filters = json.dumps({"container": [self.id], "event": ["die", "died", "oom", "kill"]})
                span = {"since": f"{self.created - 5:.0f}", "until": f"{time.time():.3f}", "filters": filters}
                _, _, body = await request(docker, "GET", "events", span)
                events = [json.loads(line) for line in body.splitlines() if line.strip()]
        except Exception:  # the engine does not answer
            return
        raise containers.ending(events, self.spec)

    async def throttled(self) -> int:
        """See `Connection.throttled`. 0 where the engine does not tell."""
        try:
            async with asyncio.timeout(5.0), client(self.engine, self.facts.api) as docker:
                shown = {"stream": "false", "one-shot": "true"}
                _, _, body = await request(docker, "GET", f"containers/{self.id}/stats", shown)
                return int(json.loads(body)["cpu_stats"]["throttling_data"]["throttled_periods"])
        except Exception:
            return 0

    # the container

    async def _create(self, image: Image, workdir: str, account: Account) -> bool:
        """Create the container, with the route and the disk limit that this engine supports.

        Returns whether everything writable is in memory.
        """
        backend, asked = self.backend, self.spec
        limited = bool(asked.disk_bytes)
        is_root = account == containers.ROOT
        while True:
            quota = None
            if backend._quota and not self.options.read_only:
                quota = asked.disk_bytes if asked.disk_bytes is not None else containers.default_disk(image, self.facts)
            in_memory = self.options.read_only or (limited and not quota)
            scratch = ["/tmp", "/var/tmp"] if in_memory else []
            missing = (in_memory or not is_root) and not await self._is_in(image, workdir)
            if in_memory:
                if missing:
                    scratch.insert(0, workdir)
                elif limited and workdir not in scratch:
                    raise BackendUnavailable(
                        f"disk_bytes cannot be enforced in {workdir}: it is part of the image, and the engine's "
                        f"storage ({self.facts.storage}) cannot limit it; set workdir to a folder that is not in the "
                        "image, or leave disk_bytes out"
                    )
            if self.route is None:
                self.route = await self._open_route(image)
            self.spec = containers.limited(asked, self.facts, file_systems=1 + len(scratch) if in_memory else 0)
            config = containers.container(
                self.spec,
                image,
                self.facts,
                self.options,
                workdir=workdir if is_root else "/",
                command=runtime.runtime_command(*self.route.arguments),
                mounts=self.route.mounts,
                labels=self.labels,
                scratch=list(dict.fromkeys(scratch)),
                quota=quota,
            )
            try:
                await self._ask(config)
                self._warn(asked, disk=bool(quota or in_memory))
                if missing and not in_memory:
                    await self._make_folder(workdir, account)
                return in_memory
            except EngineError as error:
                if quota and error.status in (400, 500) and containers.is_quota_rejected(str(error)):
                    backend._quota = False
                elif backend._transport == "auto" and containers.is_missing_source(str(error)):
                    self.route.close()
                    backend._transport, self.route = "exec", None
                else:
                    raise

    def _warn(self, asked: SandboxSpec, *, disk: bool) -> None:
        """Say once which limits sandboxes do not have by default."""
        facts, missing = self.facts, self.backend._missing
        lacking = [field for field in containers.LIMITS if field not in containers.enforced(facts)]
        reason, step = containers.why_not(facts)
        if not lacking and not disk:
            lacking, reason = ["disk_bytes"], f"the engine's storage ({facts.storage}) cannot limit what they write"
            step = "keep its data on xfs mounted with pquota, or use the option read_only"
        missing.warn(asked, lacking, reason, step)

    async def _ask(self, config: dict[str, Any]) -> None:
        """Create a container with the sandbox' name. It is awaited even when cancelled, so that `undo` finds it."""
        self.may_exist = True
        async with explained(self.engine, f"creating the container of {self.name}", None):
            await finish(asyncio.wait_for(self.docker.containers.create(config, name=self.id), PATIENCE))

    async def _open_route(self, image: Image) -> Route:
        how = self.backend._transport
        # Another kernel reaches no socket of this machine through a file.
        apart = not self.engine.is_local or self.facts.selinux or hardened.has_own_kernel(self.options.runtime)
        if how == "exec" or (how == "auto" and apart):
            async with self.backend._lock():
                if self.backend._volume is None:
                    self.backend._volume = await runtime_volume(self.docker, self.engine, image.id)
            return RelayRoute(self.engine, self.facts, self.id, self.backend._volume, self.still_there)
        return SocketRoute(self.id, await asyncio.to_thread(runtime.portable_runtime), self.still_there)

    async def _make_folder(self, path: str, account: Account) -> None:
        """Create a folder that the user inside may not create."""
        folder = tarfile.TarInfo(path.lstrip("/"))
        folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o755, account.uid, account.gid
        async with explained(self.engine, f"making {path} in {self.name}"):
            await upload(self.docker, self.id, "/", tar_of(folder))

    # the inside of an image

    async def _account(self, image: Image, user: str) -> Account:
        known = self.backend._accounts.get((image.id, user))
        if known is None:
            lines: list[str] = []
            async with self._unstarted(image) as container:
                with contextlib.suppress(aiodocker.DockerError):  # the image has none
                    archive = await container.get_archive("/etc/passwd")
                    file = archive.extractfile("passwd")
                    lines = file.read().decode(errors="replace").splitlines() if file else []
            known = self.backend._accounts[image.id, user] = containers.account(user, lines)
        return known

    async def _is_in(self, image: Image, path: str) -> bool:
        known = self.backend._parts.get((image.id, path))
        if known is None:
            async with self._unstarted(image) as container:
                status, _, _ = await request(self.docker, "HEAD", f"containers/{container.id}/archive", {"path": path})
            known = self.backend._parts[image.id, path] = status == 200
        return known

    @contextlib.asynccontextmanager
    async def _unstarted(self, image: Image) -> AsyncIterator[aiodocker.docker.DockerContainer]:
        """A container that is never started, for looking into the image. It has the sandbox' name and is removed."""
        await self._ask({"Image": image.id, "Entrypoint": ["/never-started"], "Labels": self.labels})
        async with explained(self.engine, "looking into the image"):
            yield self.docker.containers.container(self.id)
            await self.docker.containers.container(self.id).delete(force=True, v=True)


class DockerSandbox(RemoteSandbox):
    """A container whose PID 1 is the executor."""

    def __init__(
        self, creation: Creation, connection: Connection, *, workdir: str, python: str | None, in_memory: bool
    ) -> None:
        super().__init__(
            connection, creation.backend, id=creation.id, name=creation.name, workdir=workdir, python=python
        )
        self._creation, self._in_memory = creation, in_memory

    async def _remove(self) -> None:
        await self._creation.undo(strict=True)

    async def _saved(self) -> tuple[str, object]:
        creation = self._creation
        image = creation.image
        if image is not None and image.volumes:
            raise BackendUnavailable(
                f"{creation.name} cannot be saved: its image declares volumes ({', '.join(image.volumes)}), which are "
                "in no other image. Next step: use an image without VOLUME"
            )
        marks = {CHECKPOINT: this_owner(), f"{CHECKPOINT}.run_id": creation.spec.labels.get("run_id", "")}
        name = await self._commit(CHECKPOINTS, marks)
        return name, SavedImage(creation.engine, creation.facts.api, name)

    async def _another(self, image: str, labels: Mapping[str, str] | None) -> DockerSandbox:
        asked = replace(self._creation.asked, image=image)
        return await self._creation.another(asked if labels is None else replace(asked, labels=labels))

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._connection.shut_down()  # works without the engine
        await super().close()

    async def snapshot(self) -> str:
        """Save the root file system, including /tmp, as an image `lachesis-snapshot:ID-N`.

        Images stay until you remove them: docker image prune --all --filter label=lachesis.snapshot

        Raises:
            BackendUnavailable: written files are in memory, outside the root.
            SandboxLost: the sandbox is gone.
        """
        marks = {f"{LABEL}snapshot.run_id": self._creation.spec.labels.get("run_id", ""), CHECKPOINT: ""}
        return await self._connection.guard(self._commit(SNAPSHOTS, {f"{LABEL}snapshot": self.id, **marks}))

    async def _commit(self, repository: str, marks: Mapping[str, str]) -> str:
        creation = self._creation
        if self._connection.lost is not None:
            raise SandboxLost(self._connection.lost)
        if self._in_memory:
            raise BackendUnavailable(
                f"{creation.name} cannot be saved as an image: with read_only or disk_bytes its files are in memory; "
                "leave these out, or use an engine whose storage driver limits the disk"
            )
        tag = f"{self.id.removeprefix(ID_PREFIX)}-{secrets.token_hex(4)}"
        env = [f"{name}={value}" for name, value in (creation.image.env if creation.image else {}).items()]
        async with explained(creation.engine, f"saving {creation.name} as an image", None):
            config = {"Entrypoint": [], "Cmd": ["/bin/sh"], "Env": env, "Labels": {ID: "", **marks}}
            async with client(creation.engine, creation.facts.api) as docker:
                await docker.containers.container(self.id).commit(repository=repository, tag=tag, config=config)
        return f"{repository}:{tag}"
