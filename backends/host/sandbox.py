"""A sandbox that is a process of this machine, from its first request to the end of all that it was."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

from backends.base import SandboxCheckpoint
from backends.connection import Connection
from backends.errors import BackendError, BackendUnavailable, SandboxLost
from backends.holding import Hold, held
from backends.sandbox import ExecutorSandbox, initialise
from backends.spec import SandboxSpec, sandbox_title
from backends.tasks import finish as to_its_end

from . import cgroups, records
from .disks import HostCheckpoint, SandboxDisk
from .folders import remove_sandbox
from .plan import Plan
from .records import Record
from .requests import executor_death, write_inside
from .spawner import Child

_LOG = logging.getLogger(__name__)
ENDING = 5.0
"""Seconds that a sandbox has to end by itself once its stream has ended."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Launched:
    """A started process, and everything that is removed with it."""

    plan: Plan
    spec: SandboxSpec
    """With its default limits."""
    record: Record
    name: str
    child: Child
    stream: socket.socket
    errors: int
    group: cgroups.Cgroup
    marked: bool
    disk: SandboxDisk | None
    """None where it cannot be changed: without isolation, or where executors start slowly."""
    asked: SandboxSpec
    """Without default limits."""


class HostSandbox(ExecutorSandbox):
    """A sandbox whose executor is the child of a process of this machine."""

    def __init__(self, connection: Connection, launched: Launched, threads: ThreadPoolExecutor) -> None:
        super().__init__(connection, id=launched.record.id, workdir=launched.plan.workdir, python=None)
        self._launched, self._threads = launched, threads
        self._raw = connection
        """Without the lease of a `leased` one: the end of a lease must not leave requests held."""
        self._changing = asyncio.Lock()
        self._as_reset: tuple[object, int] | None = None
        """The files that it was last reset to, and how many requests there had been."""
        self.last_words = ""
        """The end of its standard error, once it has ended."""
        connection.throttled = self._throttled
        self._end = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        """Its first process on this machine."""
        return self._launched.child.pid

    async def begin(self, spec: SandboxSpec) -> None:
        """Wait until it is ready for commands."""
        plan = self._launched.plan
        self.python = (await initialise(self._connection, spec, workdir=plan.workdir, env=plan.env)).python
        await write_inside(self, plan.written)

    async def checkpoint(self, *, running: Literal["error", "left out"] = "error") -> HostCheckpoint:
        """See `SupportsCheckpoint`. Later, a folder that is in it cannot be renamed in one step (EXDEV), unless
        root makes the sandboxes."""

        async def take(now: Hold) -> HostCheckpoint:
            disk = self._disk()
            layers = disk.below
            if now.running:
                layers = (await self._in_thread(disk.copied), *layers)
            elif not disk.untouched:
                layers = (disk.own, *layers)
                await self._in_thread(partial(disk.move, layers))
            return HostCheckpoint(self.id, now.folder, tuple(now.running), layers, now.state)

        return await self._change(take, stop=running == "left out")

    async def restore(self, checkpoint: SandboxCheckpoint) -> None:
        """See `SupportsCheckpoint.restore`."""
        wanted = self._own_kind(checkpoint)
        await self.stop_processes()
        await self._go_back(wanted)

    async def _go_back(self, wanted: HostCheckpoint) -> None:
        async def go_back(now: Hold) -> None:
            disk = self._disk()
            if now.ran or disk.below != wanted.layers or not disk.untouched:
                await self._in_thread(partial(disk.move, wanted.layers, back=True))
            now.resumed = wanted.state

        await self._change(go_back)

    async def fork(
        self, checkpoint: SandboxCheckpoint | None = None, *, labels: Mapping[str, str] | None = None
    ) -> HostSandbox:
        """See `SupportsCheckpoint.fork`."""
        taken = self._own_kind(checkpoint or await self.checkpoint())
        asked = self._launched.asked
        spec = asked if labels is None else replace(asked, labels=labels)
        child: HostSandbox = await self._connection.guard(self._disk().another(spec, taken.layers))
        try:
            await child._raw.request("go_on", taken.state)
        except BaseException:
            await asyncio.shield(child.close())
            raise
        return child

    async def reset(self, base: SandboxCheckpoint, *, labels: Mapping[str, str] | None = None) -> None:
        """See `SupportsCheckpoint.reset`."""
        disk, wanted = self._disk(), self._own_kind(base)
        if self._launched.group.starved():
            raise BackendError(f"{self._launched.name} has reached its limit of memory: the next user would be blamed")
        if self._as_reset == (wanted.layers, self._raw.requests):  # and nobody has asked anything of it since
            await self._begin_anew(labels)
            self._as_reset = (wanted.layers, self._raw.requests)
            return
        probe = f"/tmp/{os.urandom(16).hex()}"
        await self.stop_processes()
        if disk.below != wanted.layers or not disk.untouched:
            with contextlib.suppress(OSError):  # its disk may be full
                await self.write_bytes(probe, b"")
        await self._go_back(wanted)
        spec = await self._begin_anew(labels)
        await write_inside(self, self._launched.plan.written)
        last = await self._change(_nothing, stop=True)
        left = [*last.running, *["System V objects"] * bool(last.objects)]
        if (await self.stat(probe)).mode is not None:
            left.append("a file")
        if left:
            raise BackendError(f"{sandbox_title(self.id, spec.labels)} could not be reset: {left} are left")
        self._as_reset = (wanted.layers, self._raw.requests)

    async def _begin_anew(self, labels: Mapping[str, str] | None) -> SandboxSpec:
        """Begin its lifetime again, for somebody else."""
        launched = self._launched
        spec = launched.spec if labels is None else replace(launched.spec, labels=labels)
        record = launched.record.of(spec)
        await self._in_thread(partial(records.save, record))
        self._launched = replace(launched, spec=spec, record=record, name=sandbox_title(self.id, spec.labels))
        self._waited = 0.0
        plan = launched.plan
        self.python = (await initialise(self._connection, spec, workdir=plan.workdir, env=plan.env)).python
        return spec

    def _disk(self) -> SandboxDisk:
        disk = self._launched.disk
        if disk is None:
            raise BackendUnavailable(
                f"{self._launched.name} cannot make checkpoints: without isolation, or where `lachesis doctor` says "
                "that executors start slowly. Next step: use another backend"
            )
        return disk

    def _own_kind(self, checkpoint: SandboxCheckpoint) -> HostCheckpoint:
        self._disk()
        if not isinstance(checkpoint, HostCheckpoint):
            raise BackendUnavailable(f"{self._launched.name} cannot use a checkpoint of another backend")
        return checkpoint

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(submitted(self._threads, call))

    async def _change(self, act: Callable[[Hold], Awaitable[_T]], *, stop: bool = False) -> _T:
        """The result of `act`, which may change the files: no request is served meanwhile.

        Raises:
            ProcessesRunning: something runs, unless it is to `stop` meanwhile.
        """
        disk = self._disk()

        async def change() -> _T:
            async with self._changing, held(self._raw, self.id, stop=stop) as now:
                own = disk.own
                try:
                    return await act(now)
                finally:
                    now.moved = disk.own is not own

        return await self._connection.guard(to_its_end(change()))

    async def _throttled(self) -> int:
        return self._launched.group.throttled()

    async def close(self) -> None:
        self._connection.fail(f"{self._launched.name} was closed")
        await asyncio.shield(self._end)

    async def _watch(self) -> None:
        """From the end of the stream to the end of everything: afterwards nothing is left."""
        launched = self._launched
        try:
            reason = await self._connection.ended
            await launched.child.exited(ENDING)
        except asyncio.CancelledError:  # the event loop ends first: without its stream the executor ends by itself
            self._connection.fail(f"{launched.name} is gone: its event loop has ended")
            cleaned(self._threads, lambda: finish(launched))
            raise
        self.last_words = tail(launched.errors)
        starved = launched.group.starved()
        await asyncio.wrap_future(cleaned(self._threads, lambda: finish(launched)))
        lost = SandboxLost(reason) if reason else executor_death(launched.child.code, self.last_words, starved)
        self._connection.fail(f"{launched.name} is gone: {lost}", type(lost))


async def _nothing(now: Hold) -> Hold:
    return now


def submitted(pool: ThreadPoolExecutor, call: Callable[[], _T]) -> Future[_T]:
    """`pool.submit`, which keeps the call for later even if it raises, for want of a thread."""
    wanted = [True]

    def run() -> _T:
        if not wanted:
            raise CancelledError
        return call()

    try:
        return pool.submit(run)
    except RuntimeError:
        wanted.clear()
        raise


def cleaned(pool: ThreadPoolExecutor, call: Callable[[], None]) -> Future[None]:
    """Run what must not be left out, in a worker thread, or here if there can be none."""
    try:
        return submitted(pool, call)
    except RuntimeError:
        done: Future[None] = Future()
        call()
        done.set_result(None)
        return done


def finish(launched: Launched) -> None:
    """From the end of the stream to the end of everything."""
    child = launched.child
    if not child.wait(ENDING):
        child.kill()
        child.wait(ENDING)
    remove(launched.record, launched.marked and child.code != 0)
    child.release()
    os.close(launched.errors)
    if launched.disk is not None:
        launched.disk.end()


def remove(record: Record, marked: bool, seconds: float | None = None) -> bool:
    """Remove what is left of a sandbox whose first process has ended. What takes longer is named and left to `reap`."""
    folder = records.folder(record.id)
    try:
        left = remove_sandbox(folder, record.groups, record.id if marked else "", seconds)
    except OSError as error:  # there is no descriptor to look at processes, for example
        left = str(error)
    if left:
        _LOG.warning("%s could not be removed: %s. `lachesis sandboxes reap` and the next start go on", folder, left)
    records.forget(record, left)
    return not left


def tail(errors: int) -> str:
    text = os.pread(errors, 4096, max(0, os.fstat(errors).st_size - 4096)).decode(errors="replace")
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
