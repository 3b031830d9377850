"""Sandboxes that are containers of a Docker engine, or of podman by its Docker-compatible socket.

The executor is the only program of the container and its PID 1. It ends without a connection for `grace` seconds, or
when `lifetime` is over. The engine then removes the container, without any help of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal

from backends.base import Availability
from backends.errors import BackendError, BackendUnavailable
from backends.failures import typed_failures
from backends.host import runtime
from backends.owner import is_gone, new_id
from backends.spec import Profile, SandboxInfo, SandboxSpec, check_profile, reject_fields, sandbox_title
from backends.tasks import finish

from . import hardened
from .client import (
    EngineError,
    advice,
    client,
    description,
    limit_line,
)
from .container import OWNER, Options
from .creation import Creation, DockerSandbox
from .images import Pull, build, ensure_image
from .route import remove_stale_folders
from .saving import remove_images
from .shared import DockerShared, listed, rows


class DockerBackend(DockerShared):
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
        options = Options(user, network, read_only, runtime, tuple(capabilities))
        super().__init__(url, image, pull, progress, transport, grace, parallel, check_profile(profile), options)

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
            creation = Creation(self, spec, id, name, engine, found, docker, options, self.create)
            try:
                return await creation.sandbox()
            except BaseException:
                await finish(creation.undo())
                raise

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
            return await listed(docker, engine)

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. Also removes interrupted uploads and socket folders of owners that are gone."""
        engine, found = await self._engine()
        async with client(engine, found.api) as docker:
            found_ones = await listed(docker, engine)
            victims = [
                info for info in found_ones if (info.orphan or everyone) and (run_id is None or info.run_id == run_id)
            ]
            stale = [row["Id"] for row in await rows(docker, engine, "upload") if is_gone(row["Labels"][OWNER])]
            names = [*(info.id for info in victims), *stale]
            removed = await asyncio.gather(
                *(self._remove(docker, engine, name) for name in names), return_exceptions=True
            )
            await remove_images(docker, engine, run_id, everyone)
        await asyncio.to_thread(remove_stale_folders)
        for failure in removed:
            if failure is not None:
                raise failure
        return victims
