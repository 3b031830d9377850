"""One ssh connection, kept for as long as something uses it: byte streams to far sockets, and a hub on the far machine.

Streams are forwarded sockets, which servers do not count as sessions. The hub (`backends/host/hub.py`) takes one
session for any number of sandboxes. After a connection has broken, both are restored over a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import shlex
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import asyncssh

from backends.connection import ByteStream, asyncio_stream
from backends.errors import BackendError, BackendUnavailable, ImageUnavailable
from backends.host.program import BOOTSTRAP, program

from .login import HUB_TIMEOUT, Target, connect

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_THEIRS = logging.getLogger("asyncssh")
if _THEIRS.level == logging.NOTSET:
    _THEIRS.setLevel(logging.WARNING)  # it has two lines for each channel of a broken connection
IDLE = 10.0
"""Seconds for which an unused connection is kept."""
_SHELL = 'p=$1; shift; test -n "$p" || p=/usr/bin/python3; test -x "$p" || p=python3; exec "$p" -I -S -c "$@"'


class LinkLost(BackendError):
    """The ssh connection or the hub was lost during a request."""


def _shared(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that any number of callers wait for."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


class FarHub:
    """The near end of `backends/host/hub.py`."""

    def __init__(self, target: Target, process: Any, deaths: Mapping[str, asyncio.Future[dict[str, Any]]]) -> None:
        self._target, self._process, self._deaths = target, process, deaths
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = 0
        self.lost = ""
        """Why it cannot be used any more."""
        self._task = asyncio.create_task(self._read())

    async def request(self, op: str, **fields: Any) -> dict[str, Any]:
        """Raises `LinkLost`, `BackendUnavailable` for what the far machine cannot do, `BackendError` for the rest."""
        if self.lost:
            raise LinkLost(self.lost)
        self._last += 1
        number = self._last
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps({"n": number, "op": op, **fields}).encode() + b"\n")
            async with asyncio.timeout(HUB_TIMEOUT):
                header: dict[str, Any] = await answer
        except OSError as error:  # TimeoutError as well
            self.close()
            raise LinkLost(f"{self._target.name} did not answer {op!r} ({error or 'in time'})") from None
        finally:
            self._answers.pop(number, None)
        if "failed" in header:
            kinds = {kind.__name__: kind for kind in (BackendUnavailable, ImageUnavailable)}
            if (kind := kinds.get(header["failed"])) is not None:
                raise kind(f"backend 'ssh' on {self._target.name}: {header['error']}")
            raise BackendError(f"{self._target.name}: {op} failed: {header['failed']}: {header['error']}")
        return header

    async def _read(self) -> None:
        reason = "the ssh connection broke"
        try:
            while line := await self._process.stdout.readline():
                message = json.loads(line)
                ended = "ended" in message
                waiting = self._deaths.get(message["ended"]) if ended else self._answers.get(message["n"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        except (asyncssh.Error, OSError, ValueError) as error:
            reason = f"the ssh connection broke ({error})"
        finally:
            self.lost = f"{self._target.name}: {reason}"
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(LinkLost(self.lost))

    def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(OSError, asyncssh.Error):
            self._process.close()


class Link:
    """The connection of one backend in one event loop: made when needed, closed when idle."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.relayed: bool | None = None
        """Whether the server forwards no sockets, so that every stream takes a session. None before it is known."""
        self.deaths: dict[str, asyncio.Future[dict[str, Any]]] = {}
        """Sandbox -> what the far machine reports of its end."""
        self._connection: asyncssh.SSHClientConnection | None = None
        self._connecting: asyncio.Task[asyncssh.SSHClientConnection] | None = None
        self._hub: FarHub | None = None
        self._starting: asyncio.Task[FarHub] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._users = 0
        self._idle: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[Link]:
        """Keeps the connection open for a block."""
        self.hold()
        try:
            yield self
        finally:
            self.release()

    def hold(self) -> None:
        self._users += 1
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._idle = asyncio.get_running_loop().call_later(IDLE, self.abort)

    def abort(self) -> None:
        if self._hub is not None:
            self._hub.close()
        if self._connection is not None:
            self._connection.abort()
        self._connection = self._hub = None

    async def connection(self) -> asyncssh.SSHClientConnection:
        """The connection, or a new one. Raises `BackendUnavailable`."""
        if self._connection is None:
            if self._connecting is None:
                self._connecting = _shared(self._connect())
            return await asyncio.shield(self._connecting)
        return self._connection

    async def _connect(self) -> asyncssh.SSHClientConnection:
        try:
            self._connection = await connect(self.target)
            self._watching = asyncio.create_task(self._watch(self._connection))
            return self._connection
        finally:
            self._connecting = None

    async def _watch(self, connection: asyncssh.SSHClientConnection) -> None:
        """Close everything with the connection, or when the event loop ends and cancels this."""
        owner = connection.get_owner()
        try:
            await connection.wait_closed()
            if self._connection is connection and self.deaths:
                count, lost = len(self.deaths), getattr(owner, "lost", None) or "closed from there"
                _LOG.warning("%s: the ssh connection of %d sandboxes broke: %s", self.target.name, count, lost)
        finally:
            connection.abort()
            if self._connection is connection:
                self._connection = self._hub = None

    async def hub(self) -> FarHub:
        """The hub, or a new one. Raises `BackendUnavailable`."""
        if self._hub is None or self._hub.lost:
            if self._starting is None:
                self._starting = _shared(self._start_hub())
            return await asyncio.shield(self._starting)
        return self._hub

    async def _start_hub(self) -> FarHub:
        try:
            process = await self._run("hub", self.target.folder)
            async with asyncio.timeout(HUB_TIMEOUT):
                failed = json.loads(await process.stdout.readline())["failed"]
            if failed:
                process.close()
                raise BackendUnavailable(f"{self.target.name}: its folder for sandboxes cannot be used: {failed}")
            self._hub = FarHub(self.target, process, self.deaths)
            if self.relayed is None:
                self.relayed = not await self._forwards(self._hub)
            return self._hub
        except (asyncssh.Error, OSError, ValueError) as error:
            raise LinkLost(f"{self.target.name}: the ssh connection broke ({error})") from None
        finally:
            self._starting = None

    async def _forwards(self, hub: FarHub) -> bool:
        path = (await hub.request("probe", open=True))["socket"]
        connection = await self.connection()
        try:
            _, writer = await connection.open_unix_connection(path, encoding=None)
        except asyncssh.ChannelOpenError:
            return False
        else:
            writer.channel.abort()
            return True
        finally:
            await hub.request("probe", open=False)

    async def _run(self, mode: str, argument: str) -> Any:
        """Start the far program in a new session, and skip the output of the login shell."""
        connection = await self.connection()
        mark = "lachesis " + secrets.token_hex(16)
        code = program()
        arguments = [self.target.python, BOOTSTRAP, str(len(code)), mark, mode, argument]
        command = shlex.join(["exec", "/bin/sh", "-c", _SHELL, "sh", *arguments])
        try:
            process: Any = await connection.create_process(command, encoding=None, env={}, send_env=[])
        except asyncssh.ChannelOpenError as error:
            raise BackendUnavailable(
                f"{self.target.name}: it allows no more sessions on one connection ({error.reason}). Next step: raise "
                "MaxSessions in its sshd_config"
            ) from None
        with contextlib.suppress(OSError):  # the session may have ended already; its output tells why
            process.stdin.write(code)
        try:
            async with asyncio.timeout(HUB_TIMEOUT):
                await process.stdout.readuntil(mark.encode() + b"\n")
        except asyncio.IncompleteReadError as error:
            said = error.partial + await process.stderr.read(4096)
            raise self._no_program(said.decode(errors="replace").strip()) from None
        except TimeoutError:
            process.close()
            raise self._no_program(f"no activity for {HUB_TIMEOUT:g} s") from None
        return process

    def _no_program(self, said: str) -> BackendUnavailable:
        lines = said.splitlines()
        detail = lines[-1] if lines else "the session ended at once"
        if "python3" in said or "ModuleNotFoundError" in said:
            fix = "apt-get install python3 (3.8 or later) there, or name its path as the option python"
        else:
            fix = f"let the user run commands there; try: {self.target.command} python3 --version"
        return BackendUnavailable(f"{self.target.name}: it cannot run Python ({detail}). Next step: {fix}")

    async def open(self, path: str) -> ByteStream:
        """A stream to the far socket `path`.

        Raises:
            ConnectionRefusedError: no process listens there.
            OSError, BackendUnavailable: there is no connection now.
        """
        try:
            if self.relayed:
                process = await self._run("relay", path)
                return asyncio_stream(process.stdout, process.stdin)
            connection = await self.connection()
            return asyncio_stream(*await connection.open_unix_connection(path, encoding=None))
        except asyncssh.ChannelOpenError:
            raise ConnectionRefusedError(f"{self.target.name}: no process listens on {path}") from None
        except asyncssh.Error as error:
            raise ConnectionResetError(str(error)) from None

    async def end(self, ids: Sequence[str], patience: float) -> None:
        """Returns when nothing of these sandboxes is left.

        Raises:
            BackendError: processes or files are left, or the far machine could not be reached for `patience` seconds.
        """
        end = asyncio.get_running_loop().time() + patience
        while True:
            try:
                hub = await self.hub()
                left = (await hub.request("end", ids=list(ids)))["left"]
            except (LinkLost, BackendUnavailable):
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(0.2)
                continue
            if left:
                raise BackendError(f"{self.target.name}: processes or files of {', '.join(left)} are left")
            return
