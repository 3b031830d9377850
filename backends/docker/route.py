"""The route to the executor of a Docker sandbox.

With an engine on this machine, the executor dials a Unix socket in a folder that is bound into its container
(`SocketRoute`). With any other engine it listens inside, and each stream goes through a relay process, which the
engine's `exec` starts there (`RelayRoute`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import struct
import tarfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiodocker
from aiodocker.stream import Stream

from backends import owner
from backends.byte_stream import ByteStream, PumpedStream, asyncio_stream
from backends.errors import BackendError
from backends.executor.trees import remove_tree
from backends.host import runtime
from backends.host.folders import REMOVAL, private_folder
from backends.host.layout import RUNTIME
from backends.tasks import finish

from .client import (
    PATIENCE,
    Engine,
    EngineError,
    EngineInfo,
    close_client,
    explained,
    open_client,
    request,
    upload,
)

INSIDE = "/run/lachesis-link"
"""Where the folder of the socket is bound inside. Not below the runtime, which is bound read-only."""
_SOCKET = "s"
_OWNER = "owner"
_STREAM_LIMIT = 1 << 18
_HALF_MADE = 600.0
"""Seconds after which a folder without an owner file counts as abandoned."""
_VOLUME = "lachesis-runtime-"

StillThere = Callable[[], Awaitable[None]]
"""Raises `SandboxLost`, with the reason, when the container is known to have ended."""


# --- a socket of this machine ----------------------------------------------------------------------------------------


def run_folder() -> Path:
    """The folder of all sockets: private to this user, with a path short enough for the address of a socket.

    Raises:
        BackendError: it cannot be created, or belongs to another user.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = base is not None and len(base) < 50 and os.access(base, os.W_OK | os.X_OK)
    folder = Path(base, "lachesis-docker") if base and usable else Path(f"/tmp/lachesis-docker-{os.geteuid()}")
    return private_folder(folder, "set XDG_RUNTIME_DIR")


def remove_stale_folders() -> None:
    """Remove the socket folders of owners that are gone."""
    for folder in run_folder().iterdir():
        with contextlib.suppress(OSError):
            try:
                who = (folder / _OWNER).read_text()
                stale = owner.is_gone(who) or not owner.is_of_this_boot(who)  # sockets do not survive a reboot
            except FileNotFoundError:  # its owner may have been killed before it wrote the file
                stale = time.time() - folder.stat().st_mtime > _HALF_MADE
            if stale:
                remove_tree(str(folder), REMOVAL)


class SocketRoute:
    """A socket that exists only while there is no stream, so that processes inside have nothing to attack.

    Only this user and the sandbox into which it is bound reach its folder. Any user inside may connect; peers other
    than the executor are disconnected, by their process id where the kernel shows it, and by the handshake in any case.
    """

    sealed = False
    arguments = ("--dial", f"{INSIDE}/{_SOCKET}")

    def __init__(self, id: str, runtime_folder: Path, still_there: StillThere) -> None:
        self._folder = run_folder() / id
        self._folder.mkdir(mode=0o700)
        (self._folder / "new").write_text(owner.this_owner())
        (self._folder / "new").replace(self._folder / _OWNER)  # readers see the whole file or none
        # A folder below is bound: its mode is for users inside, who may have any number.
        self._bound = self._folder / "link"
        self._bound.mkdir()
        self._bound.chmod(0o755)
        self.mounts: list[dict[str, Any]] = [
            {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": True}
            for source, target in ((runtime_folder, RUNTIME), (self._bound, INSIDE))
        ]
        self._still_there = still_there
        self._peer = 0
        self._listener: socket.socket | None = self._listen()

    def _listen(self) -> socket.socket:
        path = self._bound / _SOCKET
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(str(path))
            path.chmod(0o666)
            listener.listen(16)
        except OSError:
            listener.close()
            raise
        return listener

    async def dial(self) -> ByteStream:
        if self._listener is None:
            self._listener = self._listen()
        patience = 0.25  # check soon: most streams break because the container ended
        try:
            while True:
                try:
                    async with asyncio.timeout(patience):
                        accepted, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                except TimeoutError:
                    await self._still_there()
                    patience = 1.0
                else:
                    if self._is_executor(accepted):
                        break
                    accepted.close()
                    await asyncio.sleep(0)  # `sock_accept` does not wait while others in the container go on connecting
        finally:
            self._hang_up()
        return asyncio_stream(*await asyncio.open_unix_connection(sock=accepted, limit=_STREAM_LIMIT))

    def _is_executor(self, accepted: socket.socket) -> bool:
        """By its process id: the first peer is the executor, since nothing else has run before."""
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]  # 0: invisible in this process' namespace
        self._peer = self._peer or pid
        return pid == self._peer

    def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                (self._bound / _SOCKET).unlink()

    def close(self) -> None:
        self._hang_up()
        remove_tree(str(self._folder), REMOVAL)


# --- a relay inside --------------------------------------------------------------------------------------------------


class RelayRoute:
    """Streams through `exec`, for an engine that does not share this machine's files."""

    sealed = True

    def __init__(self, engine: Engine, facts: EngineInfo, id: str, volume: str, still_there: StillThere) -> None:
        self._engine, self._facts, self._id = engine, facts, id
        self.arguments = ("--listen", f"@{id}")
        self.mounts: list[dict[str, Any]] = [{"Type": "volume", "Source": volume, "Target": RUNTIME, "ReadOnly": True}]
        self._still_there = still_there

    async def dial(self) -> ByteStream:
        docker = open_client(self._engine, self._facts.api)
        try:
            async with explained(self._engine, "starting a relay inside"):
                container = docker.containers.container(self._id)
                command = runtime.runtime_command("--relay", f"@{self._id}")
                exec = await container.exec(command, stdin=True, workdir="/")
                stream = exec.start(detach=False)
                await stream.__aenter__()
        except BaseException as error:
            await close_client(docker)
            if isinstance(error, EngineError) and error.status in (404, 409):
                await self._still_there()
            raise
        return PumpedStream(_received(docker, stream), stream.write_in)

    def close(self) -> None:
        """Nothing of it stays on this machine."""


async def _received(docker: aiodocker.Docker, stream: Stream) -> AsyncGenerator[bytes]:
    """The standard output of an exec. Its standard error explains its end."""
    errors = b""
    try:
        while (message := await stream.read_out()) is not None:
            if message.stream == 1:
                yield message.data
            else:
                errors = (errors + message.data)[-2000:]
        if errors:
            raise BackendError(f"the relay inside ended: {errors.decode(errors='replace').strip()}")
    finally:
        with contextlib.suppress(Exception):
            await stream.close()
        await close_client(docker)


Route = SocketRoute | RelayRoute
"""`arguments` are those of the executor, `mounts` the container's in the terms of the engine; `sealed` tells whether
streams pass through a process that others inside could tamper with."""


async def runtime_volume(docker: aiodocker.Docker, engine: Engine, image: str) -> str:
    """The engine's volume with the portable runtime, uploaded once per version and shared read-only by all sandboxes.

    It is unpacked through a container of `image` that is never started. The name of the container is the lock.

    Raises:
        EngineError: the engine failed.
    """
    folder = await asyncio.to_thread(runtime.portable_runtime)
    name = _VOLUME + folder.name.rpartition("-")[2][:16]
    marker = f"{RUNTIME}/.complete"
    config = {
        "Image": image,
        "Entrypoint": ["/never-started"],
        "Labels": {
            "lachesis.upload": name,
            "lachesis.owner": owner.this_owner(),
            "lachesis.created": f"{time.time():.0f}",
        },
        "HostConfig": {
            "NetworkMode": "none",
            "Mounts": [{"Type": "volume", "Source": name, "Target": RUNTIME}],
        },
    }
    async with explained(engine, "uploading the portable runtime"):
        container = await _locked(docker, f"{name}-upload", config)
        try:
            status, _, _ = await request(docker, "HEAD", f"containers/{container.id}/archive", {"path": marker})
            if status == 404:
                for target, archive in (("/", runtime.archive), (RUNTIME, _marker)):
                    await upload(docker, container.id, target, await asyncio.to_thread(archive))
        finally:
            await finish(container.delete(force=True))
    return name


async def _locked(docker: aiodocker.Docker, name: str, config: dict[str, Any]) -> aiodocker.docker.DockerContainer:
    while True:
        # Awaited even when cancelled: a lock without an owner would block all others.
        asking = asyncio.ensure_future(asyncio.wait_for(docker.containers.create(config, name=name), PATIENCE))
        try:
            return await finish(asking)
        except asyncio.CancelledError:
            if not asking.cancelled() and asking.exception() is None:
                await finish(asking.result().delete(force=True))
            raise
        except aiodocker.DockerError as error:
            if error.status != 409:
                raise
        with contextlib.suppress(aiodocker.DockerError):  # it was just removed
            other = await docker.containers.get(name)
            labels = other["Config"]["Labels"]
            old = time.time() - float(labels.get("lachesis.created", 0)) > 2 * PATIENCE  # perhaps of another machine
            if old or owner.is_gone(labels.get("lachesis.owner", "")):
                await other.delete(force=True)
        await asyncio.sleep(0.1)


def _marker() -> bytes:
    """The file that marks a complete upload, uploaded last."""
    return tar_of(tarfile.TarInfo(".complete"))


def tar_of(member: tarfile.TarInfo) -> bytes:
    """A tar file with one empty file or folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member)
    return buffer.getvalue()
