"""`Sandbox` and `Process` on top of an executor's connection: what all backends with an executor inside share.

A backend adds how the executor is started and how it is ended; a subclass of `ExecutorSandbox` says the latter.
"""

from __future__ import annotations

from collections.abc import Mapping

from .base import MAX_OUTPUT, BackendError, ExecResult, OutputChunk, Process, ProcessStatus
from .connection import PATIENCE, Connection


class ExecutorProcess:
    """A background process, known to the executor by its id."""

    def __init__(self, connection: Connection, id: str, command: str) -> None:
        self._connection = connection
        self._id, self._command = id, command

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id}: {self._command!r}>"

    @property
    def id(self) -> str:
        return self._id

    @property
    def command(self) -> str:
        return self._command

    async def status(self) -> ProcessStatus:
        header, _ = await self._connection.request("status", process=self._id)
        return ProcessStatus(exit_code=header["exit_code"], output_size=header["output_size"])

    async def read(self, offset: int = 0, *, wait: float = 0.0, limit: int = 65_536) -> OutputChunk:
        header, data = await self._connection.request(
            "output", process=self._id, offset=offset, wait=wait, limit=limit, patience=wait + PATIENCE
        )
        return OutputChunk(data=data, offset=header["offset"], exit_code=header["exit_code"])

    async def write(self, data: bytes) -> None:
        # How long it takes is the process' affair: it may well read nothing for an hour.
        await self._connection.request("input", data, process=self._id, patience=None)

    async def close_stdin(self) -> None:
        await self._connection.request("input", process=self._id, close=True, patience=None)

    async def kill(self) -> None:
        await self._connection.request("kill", process=self._id)


class ExecutorSandbox:
    """A sandbox with an executor inside. Subclasses override `close`."""

    def __init__(self, connection: Connection, *, id: str, workdir: str, python: str | None) -> None:
        self._connection = connection
        self._id, self._workdir, self._python = id, workdir, python

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id}{' (lost)' if self._connection.lost else ''}>"

    @property
    def id(self) -> str:
        return self._id

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def python(self) -> str | None:
        return self._python

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> ExecResult:
        """See `Sandbox.exec`. A `cwd` that does not exist is the command's failure: exit code 1, a message in stderr.

        With several running at once, each one's changes of folder and variables are applied as it ends. Elided output
        is missing after the first `max_output // 2` bytes.
        """
        try:
            header, data = await self._connection.request(
                "exec",
                stdin or b"",
                patience=timeout + PATIENCE,
                command=command,
                timeout=timeout,
                cwd=cwd,
                env=dict(env or {}),
                stdin=stdin is not None,
                max_output=max_output,
            )
        except OSError as error:  # not the command's: those are in its result
            raise BackendError(f"sandbox {self._id} cannot run commands: {error}") from error
        return ExecResult(
            exit_code=header["exit_code"],
            stdout=data[: header["stdout"]],
            stderr=data[header["stdout"] :],
            timed_out=header["timed_out"],
            stdout_elided=header["stdout_elided"],
            stderr_elided=header["stderr_elided"],
            duration=header["duration"],
        )

    async def start(
        self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> ExecutorProcess:
        try:
            header, _ = await self._connection.request("start", command=command, cwd=cwd, env=dict(env or {}))
        except OSError as error:
            raise BackendError(f"sandbox {self._id} cannot start processes: {error}") from error
        return ExecutorProcess(self._connection, header["process"], command)

    async def processes(self) -> list[Process]:
        header, _ = await self._connection.request("processes")
        return [ExecutorProcess(self._connection, id, command) for id, command in header["processes"]]

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        _, data = await self._connection.request("read", path=path, offset=offset, limit=limit)
        return data

    async def write_bytes(self, path: str, data: bytes) -> None:
        await self._connection.request("write", data, path=path)

    async def close(self) -> None:
        raise BackendError(f"{type(self).__name__} does not say how it is closed")
