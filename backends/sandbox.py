"""`Sandbox` and `Process` on top of the connection to an executor.

A backend starts the executor, and overrides `ExecutorSandbox.close` to end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import itertools
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from .answers import shown
from .base import (
    MAX_DOWNLOAD,
    MAX_MEMBERS,
    MAX_OUTPUT,
    CallGuard,
    ExecResult,
    FileStatus,
    OutputChunk,
    Process,
    ProcessStatus,
)
from .connection import GRACE, PATIENCE, Connection
from .errors import BackendError, BackendUnavailable, SandboxExhausted, SandboxLost
from .executor.framing import CHUNK, PROTOCOL, WHOLE
from .spec import SandboxSpec

if TYPE_CHECKING:  # these modules are loaded by what needs them: few rollouts move folders or open connections
    from .forwarding import Forward
    from .transfer import Transfer

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inside:
    """Facts that the executor reports about its sandbox."""

    python: str | None
    """Path of a Python >= 3.8, or None."""


async def initialise(
    connection: Connection,
    spec: SandboxSpec,
    *,
    workdir: str,
    env: Mapping[str, str],
    grace: float = GRACE,
    start_timeout: float = PATIENCE,
) -> Inside:
    """Wait until the executor is ready, and send it the settings of `spec`: the first call on every connection.

    `workdir` (absolute) is created if missing. `spec.env` overrides `env`, the variables of the backend. `grace` is the
    time within which a resumable connection can be restored. The executor enforces `lifetime` and `wall_time`; the
    backend enforces all other limits.

    Raises:
        BackendError: the executor did not start, speaks another protocol, or cannot make `workdir`.
    """
    started: set[asyncio.Future[Any]] = {connection.hello, connection.ended}
    await asyncio.wait(started, timeout=start_timeout, return_when=asyncio.FIRST_COMPLETED)
    if not connection.hello.done():
        if connection.ended.done():
            raise BackendError(f"the executor did not start: {connection.ended.result() or 'its stream ended'}")
        raise BackendError(f"the executor did not start within {start_timeout:g} s")
    version = connection.hello.result()["hello"]
    if version != PROTOCOL:
        raise BackendError(
            f"the executor inside speaks protocol {version} instead of {PROTOCOL}; replace it by this version"
        )
    try:
        found, _ = await connection.request(
            "init",
            workdir=workdir,
            env={**env, **spec.env},
            lifetime=spec.lifetime,
            wall_time=spec.wall_time,
            grace=grace,
            memory=spec.memory_bytes,
            cpus=spec.cpus,
        )
    except SandboxLost as error:
        raise BackendError(f"the executor did not start: {error}") from None
    except OSError as error:
        raise BackendError(f"the working directory {workdir!r} cannot be used: {error}") from error
    connection.home = {**env, **spec.env}.get("HOME") or workdir
    if found["unfiltered"]:
        log.warning("commands may make every system call: %s", shown(found["unfiltered"]))
    return Inside(python=found["python"])


class ExecutorProcess:
    """A background process."""

    def __init__(self, connection: Connection, id: str, command: str) -> None:
        self._connection = connection
        self.id, self.command = id, command

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}: {self.command!r}>"

    async def status(self) -> ProcessStatus:
        header, _ = await self._connection.request("status", process=self.id)
        return ProcessStatus(exit_code=header["exit_code"], output_size=header["output_size"])

    async def read(self, offset: int = 0, *, wait: float = 0.0, limit: int = 65_536) -> OutputChunk:
        header, data = await self._connection.request(
            "output", process=self.id, offset=offset, wait=wait, limit=limit, patience=wait + PATIENCE, room=limit
        )
        return OutputChunk(data=data, offset=header["offset"], exit_code=header["exit_code"])

    async def write(self, data: bytes) -> None:
        # No limit: the process may not read its input for an hour.
        await self._connection.request("input", data, process=self.id, patience=None)

    async def close_stdin(self) -> None:
        await self._connection.request("input", process=self.id, close=True, patience=None)

    async def kill(self) -> None:
        await self._connection.request("kill", process=self.id)


class ExecutorSandbox:
    """A sandbox with an executor inside, with terminals. Subclasses override `close`."""

    shared_network: Literal["none", "this machine", "another machine"] = "none"
    """Whose network, loopback included, the inside has: none, or that of this machine or of the one that it runs on."""

    def __init__(self, connection: Connection, *, id: str, workdir: str, python: str | None) -> None:
        self._connection = connection
        self.id, self.workdir, self.python = id, workdir, python
        self._transfers = itertools.count(1)
        self._waited: float | None = 0.0
        """As the last answer said; None while a command that was cancelled may have waited longer."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}{' (lost)' if self._connection.lost else ''}>"

    @property
    def interrupted(self) -> float:
        """Seconds so far for which its connection was broken, through no fault of what runs inside."""
        return self._connection.interrupted

    @property
    def home(self) -> str:
        return self._connection.home

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = MAX_OUTPUT,
        fresh: bool = False,
    ) -> ExecResult:
        """See `Sandbox.exec`. A `cwd` that does not exist gives exit code 1 and a message in stderr.

        Of commands that run at once, each applies its changes of folder and variables when it ends.
        """
        try:
            header, data = await self._connection.request(
                "exec",
                stdin or b"",
                patience=timeout + PATIENCE,
                room=2 * max_output,
                command=command,
                timeout=timeout,
                cwd=cwd,
                env=dict(env or {}),
                stdin=stdin is not None,
                max_output=max_output,
                **({"fresh": True} if fresh else {}),
            )
        except OSError as error:  # errors of the command are in its result
            raise self._without_room("run commands", error) from error
        except asyncio.CancelledError:
            self._waited = None
            raise
        self._waited = header.get("waited_in_all")
        return ExecResult(
            exit_code=header["exit_code"],
            stdout=data[: header["stdout"]],
            stderr=data[header["stdout"] :],
            timed_out=header["timed_out"],
            stdout_elided=header["stdout_elided"],
            stderr_elided=header["stderr_elided"],
            duration=header["duration"],
            waited=header.get("waited"),
            execution=header["execution"],
        )

    async def waited(self) -> float | None:
        """See `SupportsWaited.waited`."""
        with contextlib.suppress(BackendError):
            header, _ = await self._connection.request("waited")
            self._waited = header["waited"]
        return self._waited

    async def read_output(
        self, result: ExecResult, stream: Literal["stdout", "stderr"] = "stdout", *, offset: int = 0, limit: int
    ) -> bytes:
        """See `Sandbox.read_output`. Outputs of the last four truncated results are kept, as far as there is room.

        Raises:
            FileNotFoundError: the output is no longer kept.
            OSError: there was no room for the bytes from `offset` on.
        """
        if stream not in ("stdout", "stderr"):
            raise ValueError(f"stream is 'stdout' or 'stderr', not {stream!r}")
        if not (result.stdout_elided if stream == "stdout" else result.stderr_elided):
            return (result.stdout if stream == "stdout" else result.stderr)[offset : offset + limit]
        _, data = await self._connection.request(
            "spilled", execution=result.execution, stream=stream, offset=offset, limit=limit, room=limit
        )
        return data

    async def start(
        self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecutorProcess:
        return await self._start(command, cwd, env, None)

    async def open_pty(
        self,
        command: str,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecutorProcess:
        """See `SupportsPty.open_pty`. TERM is `xterm` unless `env` sets it."""
        return await self._start(command, cwd, {"TERM": "xterm", **(env or {})}, [rows, columns])

    async def _start(
        self, command: str, cwd: str | None, env: Mapping[str, str] | None, terminal: list[int] | None
    ) -> ExecutorProcess:
        try:
            header, _ = await self._connection.request(
                "start", command=command, cwd=cwd, env=dict(env or {}), terminal=terminal
            )
        except OSError as error:
            raise self._without_room("start processes", error) from error
        return ExecutorProcess(self._connection, header["process"], command)

    def _without_room(self, what: str, error: OSError) -> BackendError:
        """The sandbox is out of memory, processes or open files of its own. All else is the machine's: open files of
        all processes (ENFILE), terminals and watched files of all sandboxes (ENOSPC)."""
        kind = SandboxExhausted if error.errno in (errno.EMFILE, errno.ENOMEM, errno.EAGAIN) else BackendError
        return kind(f"sandbox {self.id} cannot {what}: {error}")

    async def processes(self) -> list[Process]:
        header, _ = await self._connection.request("processes")
        return [ExecutorProcess(self._connection, id, command) for id, command in header["processes"]]

    async def stop_processes(self) -> None:
        await self._connection.request("kill_all")

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        room = WHOLE + CHUNK if limit is None else limit
        _, data = await self._connection.request("read", path=path, offset=offset, limit=limit, room=room)
        return data

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        if len(data) <= CHUNK:
            await self._connection.request("write", data, path=path, mode=mode)
            return
        async with self._transfer("write", path, mode=mode) as transfer:
            await transfer.push(data)
            await transfer.commit()

    def _transfer(self, kind: str, path: str, **options: int | None) -> Transfer:
        from .transfer import Transfer

        return Transfer(self._connection, next(self._transfers), kind, path, **options)

    async def stat(self, path: str) -> FileStatus:
        header, _ = await self._connection.request("stat", path=path)
        return FileStatus(header["path"], header.get("mode"), header.get("size", 0), header.get("mtime"))

    async def read_chunks(self, path: str) -> AsyncGenerator[bytes]:
        async with self._transfer("read", path) as transfer, aclosing(transfer.parts()) as parts:
            async for part in parts:
                yield part

    async def write_chunks(self, path: str, chunks: AsyncIterable[bytes], *, mode: int | None = None) -> None:
        async with self._transfer("write", path, mode=mode) as transfer:
            async for chunk in chunks:
                await transfer.push(chunk)
            await transfer.commit()

    async def upload_dir(
        self, local: str | os.PathLike[str], remote: str, *, modes: Mapping[str, int] | None = None
    ) -> None:
        """See `Sandbox.upload_dir`. Hard links become separate files; FIFOs, sockets and devices are left out."""
        from .transfer import upload

        async with self._transfer("unpack", remote) as transfer:
            await upload(transfer, os.fspath(local), modes)

    async def download_dir(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        max_bytes: int | None = MAX_DOWNLOAD,
        max_members: int | None = MAX_MEMBERS,
        modes: dict[str, int] | None = None,
    ) -> None:
        """See `Sandbox.download_dir`. Hard links become separate files; FIFOs and sockets are left out.

        Raises:
            OSError: as there; EPERM with their names if members were rejected. All others have then been copied.
        """
        from .extraction import Room
        from .transfer import download

        async with self._transfer("pack", remote, most=max_members) as transfer:
            await download(transfer, os.fspath(local), Room(max_bytes, max_members), modes)

    @contextlib.asynccontextmanager
    async def forward(self, host: str, port: int) -> AsyncIterator[Forward]:
        """See `SupportsForward.forward`."""
        from .forwarding import Forward, forwarded

        if self.shared_network == "another machine":
            raise BackendUnavailable(
                f"sandbox {self.id} shares the network of the machine that it runs on: every user there could use the "
                "way to this one. Next step: leave `network` out, and use isolation"
            )
        if self.shared_network == "this machine":
            yield Forward(port, host)
            return
        title = f"sandbox {self.id}"
        async with forwarded(self._connection, self._transfers, host, port, title=title) as inside:
            yield inside

    def leased(self, lease: CallGuard) -> Self:
        view = copy.copy(self)
        view._connection = cast(Connection, _LeasedConnection(self._connection, lease))
        view.close = lease.release  # type: ignore[method-assign]
        return view

    async def close(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no close()")


class _LeasedConnection:
    """A connection whose requests run through a lease."""

    def __init__(self, connection: Connection, lease: CallGuard) -> None:
        self._connection, self._lease = connection, lease
        self.post = connection.post  # a late `cancel` or `drop` can only end what this lease began

    @property
    def lost(self) -> str | None:
        return self._connection.lost

    @property
    def interrupted(self) -> float:
        return self._connection.interrupted

    @property
    def home(self) -> str:
        return self._connection.home

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        return await self._lease.run(call)

    async def request(self, op: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        return await self._lease.run(self._connection.request(op, payload, **fields))
