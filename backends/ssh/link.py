"""One ssh connection, kept for as long as something uses it: byte streams to far sockets, and a hub on the far machine.

Streams are forwarded sockets, which servers do not count as sessions. The hub (`backends/host/hub.py`) takes one
session for any number of sandboxes. After a connection has broken, both are restored over a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import socket
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import asyncssh

from backends.base import BackendError, BackendUnavailable, ImageUnavailable
from backends.connection import ByteStream, asyncio_stream
from backends.host.program import BOOTSTRAP, program

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_THEIRS = logging.getLogger("asyncssh")
if _THEIRS.level == logging.NOTSET:
    _THEIRS.setLevel(logging.WARNING)  # it has two lines for each channel of a broken connection
CONNECT_TIMEOUT, LOGIN_TIMEOUT, HUB_TIMEOUT = 15.0, 30.0, 60.0
KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3
"""A connection without an answer for 15 to 20 seconds is replaced by a new one."""
IDLE = 10.0
"""Seconds for which an unused connection is kept."""
_SHELL = 'p=$1; shift; test -n "$p" || p=/usr/bin/python3; test -x "$p" || p=python3; exec "$p" -I -S -c "$@"'


@dataclass(frozen=True, slots=True)
class Target:
    """The machine to connect to, and how. Fields that are None come from the ssh configuration."""

    host: str
    port: int | None = None
    username: str | None = None
    client_keys: tuple[str, ...] | None = field(default=None, repr=False)
    known_hosts: str | None = None
    config: tuple[str, ...] | None = None
    python: str = ""
    """Path of the far Python; empty: /usr/bin/python3, or the one on PATH."""
    folder: str = ""
    """Far folder of this user's sandboxes; empty: /tmp/lachesis-ssh-UID."""

    @property
    def name(self) -> str:
        user = f"{self.username}@" if self.username else ""
        return f"{user}{self.host}" + (f":{self.port}" if self.port else "")

    @property
    def command(self) -> str:
        """The ssh command line of the same connection, for people to try."""
        user = f"{self.username}@" if self.username else ""
        return "ssh" + (f" -p {self.port}" if self.port else "") + f" {user}{self.host}"


class LinkLost(BackendError):
    """The ssh connection or the hub was lost during a request."""


def _shared(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that any number of callers wait for."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


class _HostKeys(asyncssh.SSHClient):
    """Looks keys up in known_hosts, and keeps the result: the library does not tell unknown keys from changed ones."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self.known = False
        self.lost: Exception | None = None
        """Why the connection was lost."""
        self.shown = ""
        """Fingerprint of the key that was rejected."""

    def match(self, host: str, address: str, port: int | None) -> Any:
        found = asyncssh.match_known_hosts(list(self._files) or b"", host, address, port)
        self.known = bool(found[0] or found[1])
        return found

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = f"{key.get_algorithm()} {key.get_fingerprint()}"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc


async def connect(target: Target) -> asyncssh.SSHClientConnection:
    """Raises `BackendUnavailable` with the reason and the next step: host key, login, network."""
    given: dict[str, Any] = {
        "host": target.host,
        "connect_timeout": CONNECT_TIMEOUT,
        "login_timeout": LOGIN_TIMEOUT,
        "keepalive_interval": KEEPALIVE_INTERVAL,
        "keepalive_count_max": KEEPALIVE_COUNT,
        "agent_forwarding": False,
    }
    for option in ("port", "username", "client_keys", "known_hosts", "config"):
        value = getattr(target, option)
        if value is not None:
            given[option] = list(value) if isinstance(value, tuple) else value
    if target.client_keys is not None:
        given["agent_path"] = None  # its keys would go first, and servers count attempts
    keys: _HostKeys | None = None
    try:
        options = await asyncssh.SSHClientConnectionOptions.construct(**given)
        keys = _HostKeys(_known_hosts_files(target, options.known_hosts))
        owner = keys
        options = await asyncssh.SSHClientConnectionOptions.construct(
            options, known_hosts=keys.match, client_factory=lambda: owner
        )
        try:
            return await asyncssh.connect(target.host, options=options)
        except (asyncssh.ConnectionLost, asyncssh.KeyExchangeFailed, ConnectionResetError):
            if not keys.known:
                raise
            # Only known kinds of keys were offered, and a server that has none of them hangs up. Offered all kinds, it
            # shows the one that it has.
            return await asyncssh.connect(target.host, options=options, server_host_key_algs="default")
    except (asyncssh.Error, asyncssh.KeyImportError, asyncssh.ConfigParseError, OSError, ValueError) as error:
        raise _unavailable(target, error, keys) from None


def _known_hosts_files(target: Target, configured: Any) -> list[str]:
    if configured is None:
        raise BackendUnavailable(
            f"{target.name}: the ssh configuration says `UserKnownHostsFile none`, so that any machine could "
            "impersonate it. Next step: name a file there, or as the option known_hosts"
        )
    if target.known_hosts is not None:
        if not Path(target.known_hosts).is_file():
            raise FileNotFoundError(f"there is no file {target.known_hosts} (the option known_hosts)")
        return [target.known_hosts]
    files = [str(Path(name).expanduser()) for name in configured or ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")]
    return [name for name in files if os.access(name, os.R_OK)]


def _unavailable(target: Target, error: Exception, keys: _HostKeys | None) -> BackendUnavailable:
    """`error` with its reason and the next step."""
    detail = str(error).strip() or type(error).__name__
    port = f"-p {target.port} " if target.port else ""
    where = target.known_hosts or "~/.ssh/known_hosts"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        shown = f" It shows {keys.shown}." if keys is not None and keys.shown else ""
        if keys is not None and keys.known:
            reason = (
                f"its host key is not the one in {where}: the machine was reinstalled, or another one answers.{shown}"
            )
            name = f"[{target.host}]:{target.port}" if target.port not in (None, 22) else target.host
            fix = f"ask its administrator; if the new key is right: ssh-keygen -R '{name}' -f {where}, then add it"
        else:
            reason = f"its host key is unknown: {where} has none for it.{shown}"
            fix = f"compare that with the machine's key, then: ssh-keyscan {port}{target.host} >> {where}"
    elif isinstance(error, asyncssh.PermissionDenied):
        reason = f"it rejects this user and these keys ({detail})"
        fix = f"ssh-copy-id {port}{target.command.rpartition(' ')[2]}, or name the right username and client_keys"
    elif isinstance(error, asyncssh.KeyImportError | asyncssh.KeyEncryptionError):
        reason = f"a private key cannot be used ({detail})"
        fix = "load it into the agent with ssh-add, or name another one"
    elif isinstance(error, socket.gaierror):
        reason, fix = f"there is no such host ({detail})", "correct `host`, or name it in ~/.ssh/config"
    elif isinstance(error, asyncssh.Error):
        reason, fix = f"the ssh connection could not be made ({detail})", f"try: {target.command} true"
    elif isinstance(error, FileNotFoundError | ValueError | asyncssh.ConfigParseError):
        reason, fix = detail, "correct the option, or the ssh configuration"
    else:
        late = f"no answer within {CONNECT_TIMEOUT:g} s" if isinstance(error, TimeoutError) else detail
        reason = f"it cannot be reached ({late})"
        fix = f"start sshd there, or check host and port with: {target.command} true"
    return BackendUnavailable(f"{target.name}: {reason.rstrip('.')}. Next step: {fix}")


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
