"""Sandboxes that are containers of a Docker engine, or of podman by its Docker-compatible socket.

The executor is the only program of the container and its PID 1. It ends without a connection for `grace` seconds, or
when `lifetime` is over. The engine then removes the container, without any help of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import secrets
import tarfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal

import aiodocker

from backends.base import (
    Availability,
    BackendError,
    BackendUnavailable,
    Profile,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    check_profile,
    reject_fields,
    sandbox_title,
)
from backends.connection import Connection
from backends.failures import typed_failures
from backends.host import runtime
from backends.limits import MissingDefaults
from backends.owner import ID_PREFIX, is_gone, new_id, this_owner
from backends.sandbox import ExecutorSandbox, initialise
from backends.tasks import finish, has_failed, seen

from . import container as containers
from . import hardened
from .client import (
    PATIENCE,
    Engine,
    EngineError,
    EngineInfo,
    advice,
    client,
    description,
    engine_info,
    explained,
    find_engine,
    limit_line,
    request,
    upload,
)
from .container import ID, LABEL, OWNER, Account, Image, Options
from .images import Pull, build, ensure_image
from .route import RelayRoute, Route, SocketRoute, remove_stale_folders, runtime_volume, tar_of

START_TIMEOUT = 120.0
"""Seconds from the start of a container to the first message of its executor: engines are slow under load."""
SNAPSHOTS = "lachesis-snapshot"
"""Repository of the images of `snapshot`, which carry the label `lachesis.snapshot`."""


class DockerBackend:
    """Containers without capabilities, without network by default, and with limited processes.

    Defaults of the spec: `image` is the constructor's; `workdir` is the image's, else /workspace for
    root, else the user's home; `pids` is 1024, `cpus` 2, `memory_bytes` 2 GiB, and `disk_bytes` 1 GiB on top of
    the image where the storage driver can limit it. A default that the engine cannot enforce is dropped with a warning.

    Where the storage driver can (xfs with pquota, btrfs, zfs), it enforces `disk_bytes` for the whole root. Elsewhere
    the root is read-only, and the working directory, /tmp and /var/tmp are in memory, each limited to `disk_bytes`; a
    working directory that is part of the image is then rejected.
    """

    name = "docker"

    def __init__(
        self,
        url: str | None = None,
        *,
        image: str = "python:3.12-slim",
        pull: Pull = "missing",
        progress: Callable[[str], None] | None = None,
        transport: Literal["auto", "socket", "exec"] = "auto",
        user: str | None = None,
        network: str = "bridge",
        read_only: bool = False,
        runtime: str | None = None,
        capabilities: Sequence[str] = (),
        grace: float = 60.0,
        parallel: int | None = None,
        profile: Profile = "standard",
    ) -> None:
        """`progress` gets a line for each step of pulling an image.

        Args:
            url: the engine (`unix://`, `tcp://`, `https://`, `ssh://`). Default: `DOCKER_HOST`, the context of the
                Docker CLI, or the first of the usual sockets, including podman's.
            image: the image of specs without one.
            pull: when images are pulled: "missing", "always" or "never".
            transport: how the executor is reached: "socket" by a socket of this machine, "exec" through the engine's
                exec, "auto" by the former where the engine shares this machine's files.
            user: user, or user:group, inside. Default: that of the image.
            network: the engine's network for specs with network.
            read_only: make everything read-only but /tmp, /var/tmp and a working directory outside the image, which
                are in memory and limited to `disk_bytes` each.
            runtime: the OCI runtime, such as `runsc`. Default: that of the engine.
            capabilities: capabilities to keep, such as `CHOWN`.
            grace: seconds within which an interrupted connection can be restored.
            parallel: containers that are created or removed at once. Default: two per processor of the engine; more
                make each slower and all no faster.
            profile: "hardened" needs gVisor or Kata as a runtime and remapped users, makes no sandbox for root inside,
                and raises an error where one of them is missing.
        """
        if transport not in ("auto", "socket", "exec"):
            raise ValueError(f"transport is 'auto', 'socket' or 'exec', not {transport!r}")
        if pull not in ("missing", "always", "never"):
            raise ValueError(f"pull is 'missing', 'always' or 'never', not {pull!r}")
        if grace <= 0 or (parallel is not None and parallel < 1):
            raise ValueError("grace and parallel must be positive")
        self._url, self._image, self._pull, self._progress = url, image, pull, progress
        self._transport, self._grace, self._parallel = transport, grace, parallel
        self._hardened = check_profile(profile)
        self._options = Options(user, network, read_only, runtime, tuple(capabilities))
        self._found: tuple[Engine, EngineInfo] | None = None
        self._missing = MissingDefaults(self.name)
        self._quota = True  # until the engine rejects one
        self._accounts: dict[tuple[str, str], Account] = {}  # by image and user
        self._volume: str | None = None  # of the portable runtime, once it exists
        self._parts: dict[tuple[str, str], bool] = {}  # by image and path
        # A backend serves any number of event loops; these objects belong to one loop each.
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"DockerBackend(url={self._url!r}, image={self._image!r})"

    async def check(self) -> Availability:
        try:
            engine, found = await self._engine(again=True)
            await asyncio.to_thread(runtime.portable_runtime)
            options = self._options_for(found)
        except BackendUnavailable as error:
            detail, _, fix = str(error).partition(". Next step: " if ". Next step: " in str(error) else ": ")
            return Availability(False, detail, fix)
        except BackendError as error:
            return Availability(False, str(error), advice(error))
        isolation, limits = hardened.isolation(options, found), limit_line(found)
        return Availability(True, description(found, engine), "", isolation, limits, hardened.better(options, found))

    def _options_for(self, found: EngineInfo) -> Options:
        """Raises `BackendUnavailable` if the profile is not available."""
        return hardened.hardened(self._options, found) if self._hardened else self._options

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

    # creating

    @typed_failures
    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        reject_fields("docker", spec, "root")  # the option `user` has it
        id = new_id()
        name = sandbox_title(id, spec.labels)
        try:
            engine, found = await self._engine()
        except EngineError as error:
            raise BackendUnavailable(str(error)) from error
        options = self._options_for(found)
        async with client(engine, found.api) as docker:
            creation = _Creation(self, spec, id, name, engine, found, docker, options)
            try:
                return await creation.sandbox()
            except BaseException:
                await finish(creation.undo())
                raise

    async def _ensure_image(self, docker: aiodocker.Docker, engine: Engine, name: str) -> Image:
        # One at a time, so that sandboxes that start together pull a missing image once.
        async with self._lock():
            found = await ensure_image(docker, engine, name, self._pull, self._progress)
            async with explained(engine, f"looking for the image {name}"):
                return Image.of(found)

    async def image(self, name: str, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
        """The engine's description of an image, which is pulled as the option `pull` says.

        Raises:
            BackendUnavailable: the image does not exist, or no engine answers.
        """
        engine, found = await self._engine()
        async with client(engine, found.api) as docker, self._lock():
            return await ensure_image(docker, engine, name, self._pull, progress or self._progress)

    async def build(
        self,
        archive: IO[bytes],
        name: str,
        *,
        dockerfile: str,
        args: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        """Build an image; see `images.build`."""
        engine, found = await self._engine()
        async with client(engine, found.api) as docker:
            await build(docker, engine, archive, name, dockerfile=dockerfile, args=args, tell=tell)

    # finding and removing

    async def sandboxes(self) -> list[SandboxInfo]:
        engine, found = await self._engine()
        async with client(engine, found.api) as docker:
            return await _listed(docker, engine)

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. Also removes interrupted uploads and socket folders of owners that are gone."""
        engine, found = await self._engine()
        async with client(engine, found.api) as docker:
            listed = await _listed(docker, engine)
            victims = [
                info for info in listed if (info.orphan or everyone) and (run_id is None or info.run_id == run_id)
            ]
            stale = [row["Id"] for row in await _rows(docker, engine, "upload") if is_gone(row["Labels"][OWNER])]
            names = [*(info.id for info in victims), *stale]
            removed = await asyncio.gather(
                *(self._remove(docker, engine, name) for name in names), return_exceptions=True
            )
        await asyncio.to_thread(remove_stale_folders)
        for failure in removed:
            if failure is not None:
                raise failure
        return victims

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


async def _listed(docker: aiodocker.Docker, engine: Engine) -> list[SandboxInfo]:
    # A container that a user made from a snapshot has its labels, but not its name.
    rows = await _rows(docker, engine, "id")
    return [containers.listed(row) for row in rows if f"/{row['Labels'][ID]}" in row.get("Names", [])]


async def _rows(docker: aiodocker.Docker, engine: Engine, label: str) -> list[dict[str, Any]]:
    filters = json.dumps({"label": [LABEL + label]})
    async with explained(engine, "listing containers"):
        found = await docker.containers.list(all=1, filters=filters)
    return [dict(container._container) for container in found]


@dataclass
class _Creation:
    """A sandbox that is being created. `undo` removes what exists of it."""

    backend: DockerBackend
    spec: SandboxSpec
    id: str
    name: str
    engine: Engine
    facts: EngineInfo
    docker: aiodocker.Docker
    """Closed once the sandbox exists."""
    options: Options
    created: float = field(default_factory=time.time)
    asked: bool = False
    """Whether a container of that name may exist."""
    route: Route | None = None
    connection: Connection | None = None

    @property
    def labels(self) -> dict[str, str]:
        return containers.labels(self.id, self.spec, this_owner(), self.created)

    async def sandbox(self) -> DockerSandbox:
        backend = self.backend
        image = await backend._ensure_image(self.docker, self.engine, self.spec.image or backend._image)
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
            if self.asked:
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
        self.asked = True
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


class DockerSandbox(ExecutorSandbox):
    """A container whose PID 1 is the executor."""

    def __init__(
        self, creation: _Creation, connection: Connection, *, workdir: str, python: str | None, in_memory: bool
    ) -> None:
        super().__init__(connection, id=creation.id, workdir=workdir, python=python)
        self._creation, self._in_memory = creation, in_memory
        self._end = self._ending()

    def _ending(self) -> asyncio.Task[None]:
        ending = asyncio.create_task(self._watch())
        ending.add_done_callback(seen)
        return ending

    async def _watch(self) -> None:
        """Remove the container when its connection has ended, even if the sandbox is never closed."""
        await asyncio.wait([self._connection.ended])
        await self._creation.undo(strict=True)

    async def close(self) -> None:
        """See `Sandbox.close`.

        Raises:
            BackendError: the engine does not answer. All processes inside have ended; `reap` removes the rest.
        """
        self._connection.shut_down()  # works without the engine
        self._connection.fail(f"{self._creation.name} was closed")
        if has_failed(self._end) or self._end.cancelling():
            self._end = self._ending()  # another attempt
        await finish(self._end)

    async def snapshot(self) -> str:
        """Save the root file system, including /tmp, as an image `lachesis-snapshot:ID-N`.

        Images stay until you remove them: docker image prune --all --filter label=lachesis.snapshot

        Raises:
            BackendUnavailable: written files are in memory, outside the root.
            SandboxLost: the sandbox is gone.
        """
        return await self._connection.guard(self._snapshot())

    async def _snapshot(self) -> str:
        creation = self._creation
        if self._connection.lost is not None:
            raise SandboxLost(self._connection.lost)
        if self._in_memory:
            raise BackendUnavailable(
                f"{creation.name} cannot be saved as an image: with read_only or disk_bytes its files are in memory; "
                "leave these out, or use an engine whose storage driver limits the disk"
            )
        tag = f"{self.id.removeprefix(ID_PREFIX)}-{secrets.token_hex(4)}"
        marks = {ID: "", f"{LABEL}snapshot": self.id, f"{LABEL}snapshot.run_id": creation.spec.labels.get("run_id", "")}
        async with explained(creation.engine, f"saving {creation.name} as an image", None):
            config = {"Entrypoint": [], "Cmd": ["/bin/sh"], "Labels": marks}
            async with client(creation.engine, creation.facts.api) as docker:
                await docker.containers.container(self.id).commit(repository=SNAPSHOTS, tag=tag, config=config)
        return f"{SNAPSHOTS}:{tag}"
