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
from .spawner import Child, Spawner

_ENDING = 5.0
"""Seconds that a sandbox has to end by itself once its stream has ended."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started, and what its executor is told."""

    command: Sequence[str]
    workdir: str
    env: Mapping[str, str]
    detail: str
    """One line for listings."""
    pids: int | None = None
    """`SandboxSpec.pids` where none is given, on machines that can enforce it."""


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


class HostSandboxes:
    """Starts, lists and ends one backend's sandboxes; for any number of event loops and threads."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._spawner = Spawner()
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
                records.prepare()
                self._reap(None, everyone=False)
                self._cgroups = cgroups.find()
            return self._cgroups

    async def create(self, spec: SandboxSpec, plan: Callable[[SandboxSpec], Plan]) -> HostSandbox:
        """A sandbox that is ready for commands. `plan` is called in a worker thread, and may block.

        Raises:
            BackendUnavailable: a limit cannot be enforced; and what `plan` raises.
            BackendError: it did not start.
        """
        launching = self._starting.submit(lambda: self._launch(new_id(), spec, plan))
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

    def _launch(self, id: str, spec: SandboxSpec, make_plan: Callable[[SandboxSpec], Plan]) -> _Launched:
        available = self.available()
        available.require(cgroups.Limits.of(spec))
        plan = make_plan(spec)
        limits = cgroups.Limits.of(spec)
        if limits.pids is None and "pids" in available.parents:
            limits = replace(limits, pids=plan.pids)
        group = available.group(id, limits) if limits else None
        record = Record.new(self._backend, id, spec, plan.detail)
        if group is not None:
            record = replace(record, groups=tuple(str(folder) for folder in group.folders))
        labels = [f"{key}={value}" for key, value in spec.labels.items() if value]
        name = f"sandbox {id}" + (f" ({', '.join(labels)})" if labels else "")
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as passed:
            records.save(record)
            undo.callback(_remove, record)
            joined: list[int] = []
            if group is not None:
                joined = available.create(id, limits).open()
                for fd in joined:
                    passed.callback(os.close, fd)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            passed.callback(theirs.close)
            errors = os.memfd_create("stderr")
            undo.callback(os.close, errors)
            child = self._spawner.spawn(plan.command, stream=theirs.fileno(), errors=errors, groups=joined)
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
        return _Launched(plan, record, name, child, ours, errors, group)

    def _reap(self, run_id: str | None, everyone: bool) -> list[SandboxInfo]:
        removed = []
        for record in records.all_records(self._backend):
            being_made = not record.orphan and record.pid == 0
            if being_made or not (record.orphan or (everyone and record.reachable)):
                continue
            if run_id is None or record.run_id == run_id:
                _kill_first(record)
                _remove(record)
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
    _remove(launched.record)
    child.release()
    os.close(launched.errors)


def _remove(record: Record) -> None:
    if record.groups:
        group = cgroups.Cgroup(tuple(Path(folder) for folder in record.groups))
        group.kill()
        group.remove()
    records.forget(record.id)


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
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
