"""Sandboxes that are processes of this machine, whatever program walls them off.

The program is started with the executor's stream as its standard input and output. It ends when the stream does, which
is when the owner closes the sandbox or dies, and everything inside ends with it. A record, and a cgroup where limits
are asked for, are made before and removed after; those of an owner that was killed are removed by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from . import cgroups, records
from .base import BackendError, SandboxInfo, SandboxSpec
from .connection import PATIENCE, Connection, asyncio_stream
from .owner import new_id
from .records import Record
from .sandbox import ExecutorSandbox, initialise
from .spawner import Child, Disk, Spawner, memory_file

_ENDING = 5.0
"""Seconds that a sandbox has to end by itself once its stream has ended."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started, and what its executor is told."""

    command: Sequence[str]
    workdir: str
    env: Mapping[str, str]
    contents: Sequence[bytes] = ()
    """Files in memory that the command is given as descriptors; it knows them by `spawner.numbers`."""
    disk: Disk | None = None
    """File system in memory that is mounted for it."""
    copied: Sequence[str] = ()
    """Files of this machine that are written inside at the start, where that can be done."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A process that has been started, and everything that has to go with it."""

    plan: Plan
    record: Record
    name: str
    child: Child
    stream: socket.socket
    errors: int
    group: cgroups.Cgroup | None
    mark: bytes

    def remove(self) -> None:
        """Remove what is left of it, when its first process has ended."""
        _remove(self.record, b"" if self.child.code == 0 else self.mark)


class HostSandboxes:
    """Starts, lists and ends one backend's sandboxes; for any number of event loops and threads."""

    def __init__(self, backend: str, *, mark: str = "") -> None:
        """
        Args:
            mark: variable that holds the id in the environment of all that runs inside, where a sandbox' processes do
                not end with its first one; empty where they do, as with a PID namespace.
        """
        self.spawner = Spawner()
        self._backend, self._mark = backend, mark
        # Starting takes processor time: more at once would not be sooner, and would take it from the event loop.
        self._starting = ThreadPoolExecutor(2 + 2 * (os.cpu_count() or 1), "lachesis-start")
        self._threads = ThreadPoolExecutor(4, f"lachesis-{backend}")
        self._lock = threading.Lock()
        self._cgroups: cgroups.Cgroups | None = None

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(self._threads.submit(call))

    def available(self) -> cgroups.Cgroups:
        """The cgroups of this machine; what earlier owners have left behind goes first. Blocks."""
        with self._lock:
            if self._cgroups is None:
                self._reap(None, everyone=False)
                self._cgroups = cgroups.find()
            return self._cgroups

    async def create(self, spec: SandboxSpec, plan: Callable[[str], Plan], *, detail: str, pids: int) -> HostSandbox:
        """A sandbox that is ready for commands.

        Args:
            plan: called with the id, in a worker thread; it may block, and write into `records.folder(id)`.
            detail: one line for listings.
            pids: `SandboxSpec.pids` where none is given, on machines that can enforce it.

        Raises:
            BackendUnavailable: a limit cannot be enforced; and what `plan` raises.
            BackendError: it did not start.
        """
        launching = self._starting.submit(lambda: self._launch(new_id(), spec, plan, detail, pids))
        try:
            launched = await asyncio.wrap_future(launching)
        except asyncio.CancelledError:
            # Who cancels wants nothing left.
            await asyncio.shield(asyncio.wrap_future(self._threads.submit(_discard, launching)))
            raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=launched.stream)
        except BaseException:
            # Who cancels wants nothing left.
            await asyncio.shield(asyncio.wrap_future(self._threads.submit(_discard, launching)))
            raise
        sandbox = HostSandbox(Connection(asyncio_stream(reader, writer)), launched, self._threads)
        try:
            await sandbox.begin(spec)
        except BackendError as error:
            await sandbox.close()
            reason = sandbox.last_words or str(error)
            raise BackendError(f"{launched.name} could not be started: {reason}") from error
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def sandboxes(self) -> list[SandboxInfo]:
        return await self.in_thread(lambda: [record.info() for record in records.all_records(self._backend)])

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        """See `Backend.reap`. With `everyone`, an owner finds its sandbox lost."""
        return await self.in_thread(lambda: self._reap(run_id, everyone))

    # In worker threads: everything below blocks.

    def _launch(
        self, id: str, spec: SandboxSpec, make_plan: Callable[[str], Plan], detail: str, pids: int
    ) -> _Launched:
        available = self.available()
        limits = cgroups.Limits.of(spec)
        if limits.pids is None and "pids" in available.parents:
            limits = replace(limits, pids=pids)
        # Without walls a group is also what finds all processes again.
        group = available.group(id, limits) if limits or (available.tracks and self._mark) else None
        record = Record.new(self._backend, id, spec, detail)
        if group is not None:
            record = replace(record, groups=tuple(str(folder) for folder in group.folders))
        mark = f"{self._mark}={id}".encode() if self._mark else b""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as passed:
            records.prepare()
            undo.callback(_remove, record, mark)
            records.save(record)
            plan = make_plan(id)
            joined: list[int] = []
            if group is not None:
                joined = available.create(id, limits).open()
                for fd in joined:
                    passed.callback(os.close, fd)
            files: list[int] = []
            for content in plan.contents:
                files.append(memory_file("file", content))
                passed.callback(os.close, files[-1])
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            passed.callback(theirs.close)
            errors = os.memfd_create("stderr")
            undo.callback(os.close, errors)
            # The environment is empty, and the command line without secrets: both can be seen by others.
            child = self.spawner.spawn(
                plan.command, stream=theirs.fileno(), errors=errors, files=files, groups=joined, disk=plan.disk
            )
            undo.callback(child.release)
            undo.callback(child.wait, _ENDING)
            undo.callback(child.kill)
            record = record.started(child.pid)
            records.save(record)
            ours.setblocking(False)
            undo.pop_all()
        # While it starts, the place is taken: the next one would only slow it down.
        greeting = select.poll()
        greeting.register(ours, select.POLLIN)
        greeting.poll(PATIENCE * 1000)
        labels = [
            f"{name}={value}" for name, value in (("run_id", record.run_id), ("task_id", record.task_id)) if value
        ]
        name = f"sandbox {id}" + (f" ({', '.join(labels)})" if labels else "")
        return _Launched(plan, record, name, child, ours, errors, group, mark)

    def _reap(self, run_id: str | None, everyone: bool) -> list[SandboxInfo]:
        removed = []
        for record in records.all_records(self._backend):
            being_made = not record.orphan and record.pid == 0
            if being_made or not (record.orphan or (everyone and record.reachable)):
                continue
            if run_id is None or record.run_id == run_id:
                _kill_first(record)
                _remove(record, f"{self._mark}={record.id}".encode() if self._mark else b"")
                removed.append(record.info())
        return removed


class HostSandbox(ExecutorSandbox):
    """A sandbox whose executor is the child of a process of this machine."""

    def __init__(self, connection: Connection, launched: _Launched, threads: ThreadPoolExecutor) -> None:
        super().__init__(connection, id=launched.record.id, workdir=launched.plan.workdir, python=None)
        self._launched, self._threads = launched, threads
        self.last_words = ""
        """What was written to its standard error before it ended."""
        self._end = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """Its first process on this machine."""
        return self._launched.child.pid

    async def begin(self, spec: SandboxSpec) -> None:
        """Wait until it is ready for commands."""
        plan = self._launched.plan
        self._python = (await initialise(self._connection, spec, workdir=plan.workdir, env=plan.env)).python
        for path in plan.copied:
            with contextlib.suppress(OSError):  # the image may have a way of its own
                await self.write_bytes(path, await asyncio.to_thread(Path(path).read_bytes))

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
        starved = launched.group is not None and launched.group.out_of_memory() > 0
        await asyncio.wrap_future(self._threads.submit(_finish, launched))
        if reason is None:
            reason = f"its executor died ({_describe(launched.child.code)})"
            reason += f": {self.last_words}" if self.last_words else ""
            reason += ", after the kernel had killed processes for want of memory (memory_bytes)" if starved else ""
        self._connection.fail(f"{launched.name} is gone: {reason}")


def _discard(launching: Future[_Launched]) -> None:
    """End what was started for somebody who no longer waits for it."""
    with contextlib.suppress(BaseException):
        launched = launching.result()
        launched.stream.close()
        _finish(launched)


def _finish(launched: _Launched) -> None:
    """From the end of the stream to the end of everything."""
    child = launched.child
    if not child.wait(_ENDING):
        child.kill()
        child.wait(_ENDING)
    launched.remove()
    child.release()
    os.close(launched.errors)


def _remove(record: Record, mark: bytes) -> None:
    """Remove what is left of a sandbox whose first process has ended; processes that carry `mark`, if one is given."""
    if record.groups:
        group = cgroups.Cgroup(tuple(Path(folder) for folder in record.groups))
        group.kill()
        group.remove()
    elif mark:
        _kill_marked(mark)
    records.forget(record.id)


def _kill_marked(mark: bytes) -> None:
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


def _kill_first(record: Record) -> None:
    """Kill its first process and wait until that is gone: the kernel ends its PID namespace with it."""
    if not record.runs:
        return
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        end = time.monotonic() + _ENDING
        if record.runs:  # still: the handle is not of another one that got its number
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        while record.runs and time.monotonic() < end:
            time.sleep(0.002)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def _tail(errors: int) -> str:
    text = os.pread(errors, 4096, max(0, os.fstat(errors).st_size - 4096)).decode(errors="replace")
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _describe(code: int | None) -> str:
    if code is None:
        return "it cannot be killed"
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # real-time: no name
