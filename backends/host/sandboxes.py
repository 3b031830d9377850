"""Sandboxes that are processes of this machine, whichever program isolates them.

The program's standard input and output are the executor's stream. It ends with the stream, that is when the owner
closes the sandbox or dies, and everything inside ends with it. A record, and a cgroup for limits, are made before and
removed after; the next owner removes those of one that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from backends.connection import PATIENCE, Connection, asyncio_stream
from backends.errors import BackendError, SandboxLost
from backends.limits import MissingDefaults, with_defaults
from backends.owner import new_id
from backends.sandbox import ExecutorSandbox, initialise
from backends.spec import SandboxInfo, SandboxSpec, sandbox_title

from . import cgroups, delegation, records
from .folders import remove_sandbox
from .plan import FIRST_FILE, Disk, Plan, Prepared, memory_file
from .records import Record
from .requests import executor_death, write_inside
from .spawner import Child, Spawner

_LOG = logging.getLogger(__name__)
_AT_START = 2.0
"""Seconds that the first sandbox waits for the removal of all orphans; the rest of them is removed meanwhile."""
_REAPING = 120.0
"""Seconds for which a call of `reap` removes."""
_LEAST = 0.2
"""Seconds for each of the orphans, however many there are."""
_ENDING = 5.0
"""Seconds that a sandbox has to end by itself once its stream has ended."""
_T = TypeVar("_T")
MakePlan = Callable[[str, SandboxSpec, list[str], int | None], Plan]


@dataclass(frozen=True, slots=True)
class _Launched:
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


class HostSandboxes:
    """Starts, lists and ends one backend's sandboxes; for any number of event loops and threads."""

    def __init__(self, backend: str, *, marked: bool = False) -> None:
        """
        Args:
            marked: whether a sandbox' processes may outlive its first one, as they do without a PID namespace. They
                are then found by the variable `folders.MARK`.
        """
        self.spawner = Spawner()
        self._missing = MissingDefaults(backend)
        self._backend, self._marked = backend, marked
        # Starting takes processor time. More threads would finish no sooner, and slow down the event loop.
        self._starting = ThreadPoolExecutor(2 + 2 * (os.cpu_count() or 1), "lachesis-start")
        self._threads = ThreadPoolExecutor(4, f"lachesis-{backend}")
        self._lock = threading.Lock()
        self._cgroups: cgroups.Cgroups | None = None

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(_submit(self._threads, call))

    def available(self) -> cgroups.Cgroups:
        """The cgroups of this machine. The first call removes the orphans of earlier owners. Blocks."""
        with self._lock:
            if self._cgroups is None:
                self._reap(None, False, _AT_START)
                if any(record.left for record in records.all_records(self._backend)):
                    reaping = partial(self._reap, None, False, _REAPING)
                    threading.Thread(target=reaping, name="lachesis-reap", daemon=True).start()
                self._cgroups = cgroups.find()
                before = delegation.in_scope(self._cgroups)
                if before:
                    with contextlib.suppress(BackendError):
                        self._cgroups = cgroups.find(pid=self.spawner.start_by(before, delegation.bus()))
            return self._cgroups

    def run(self, command: Sequence[str], disk: Disk | None, prepared: Prepared | None = None) -> str:
        """Run a command to its end; returns the reason why it failed, empty when it did not. Blocks."""
        self.available()  # it may replace the helper, with which its children end
        errors, null = os.memfd_create("errors"), os.open(os.devnull, os.O_RDWR)
        try:
            child = self.spawner.spawn(command, stream=null, errors=errors, disk=disk, prepared=prepared)
            try:
                if not child.wait(60.0):
                    child.kill()
                    return "it does not end"
            finally:
                child.release()
            return "" if child.code == 0 else _tail(errors) or f"exit code {child.code}"
        except (OSError, BackendError) as error:
            return str(error)
        finally:
            os.close(errors)
            os.close(null)

    async def create(
        self,
        spec: SandboxSpec,
        plan: MakePlan,
        *,
        detail: str,
        countable: bool = False,
        file_systems: Callable[[], int] = lambda: 1,
    ) -> HostSandbox:
        """A sandbox that is ready for commands.

        Args:
            plan: called in a worker thread with the id, the spec with its default limits, the executor's arguments,
                and the number of processes that RLIMIT_NPROC has to limit, if any. It may block, and write into
                `records.folder(id)`. If there are arguments, `Plan.contents` are preceded by one descriptor.
            detail: one line for listings.
            countable: whether `plan` can set RLIMIT_NPROC inside a user namespace.
            file_systems: called in a worker thread: how many file systems in memory it will have.

        Raises:
            BackendUnavailable: a limit cannot be enforced; and what `plan` raises.
            BackendError: it did not start.
        """
        make = partial(self._launch, new_id(), spec, plan, detail, countable, file_systems)
        launching = _submit(self._starting, make)
        try:
            launched = await asyncio.wrap_future(launching)
            reader, writer = await asyncio.open_unix_connection(sock=launched.stream)
        except BaseException:
            await asyncio.shield(asyncio.wrap_future(_cleaned(self._threads, lambda: _discard(launching))))
            raise
        sandbox = HostSandbox(Connection(asyncio_stream(reader, writer)), launched, self._threads)
        if spec.network or self._marked:
            sandbox.shared_network = "this machine"
        try:
            await sandbox.begin(launched.spec)
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
        return await self.in_thread(lambda: self._reap(run_id, everyone, _REAPING))

    # In worker threads: everything below blocks.

    def _launch(
        self,
        id: str,
        asked: SandboxSpec,
        make_plan: MakePlan,
        detail: str,
        countable: bool,
        file_systems: Callable[[], int],
    ) -> _Launched:
        available = self.available()
        can = available.enforced(countable=countable)
        missing = [field for field in cgroups.FIELDS if field not in can]
        self._missing.warn(asked, missing, available.why_not(missing), cgroups.next_step(available))
        processors = os.cpu_count() or 1
        spec = with_defaults(asked, can, processors=processors, pids=cgroups.PIDS, file_systems=file_systems())
        limits = cgroups.Limits(spec.cpus, spec.memory_bytes, spec.pids)
        group, limits, counted = available.allot(id, limits, countable=countable, tracked=self._marked)
        groups = tuple(map(str, group.folders))
        record = Record.new(self._backend, id, spec, detail, groups)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as passed:
            records.prepare()
            undo.callback(_remove, record, self._marked)
            records.save(record)
            plan = make_plan(id, spec, group.arguments(FIRST_FILE), counted)
            joined = available.create(id, limits).open() if groups else []
            for fd in joined:
                passed.callback(os.close, fd)
            files = [group.open_commands()] if group.divided else []
            for fd in files:
                passed.callback(os.close, fd)
            for content in plan.contents:
                files.append(memory_file("file", content))
                passed.callback(os.close, files[-1])
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            passed.callback(theirs.close)
            errors = os.memfd_create("stderr")
            undo.callback(os.close, errors)
            # Others can see its environment and command line: neither has secrets.
            child = self.spawner.spawn(
                plan.command,
                stream=theirs.fileno(),
                errors=errors,
                files=files,
                groups=joined,
                disk=plan.disk,
                prepared=plan.prepared,
                env=plan.own_env,
            )
            undo.callback(child.release)
            undo.callback(child.wait, _ENDING)
            undo.callback(child.kill)
            record = record.started(child.pid)
            records.save(record)
            ours.setblocking(False)
            undo.pop_all()
        # Until it has started, it keeps its thread: the next one would only slow it down.
        greeting = select.poll()
        greeting.register(ours, select.POLLIN)
        greeting.poll(PATIENCE * 1000)
        return _Launched(plan, spec, record, sandbox_title(id, spec.labels), child, ours, errors, group, self._marked)

    def _reap(self, run_id: str | None, everyone: bool, seconds: float) -> list[SandboxInfo]:
        removed = []
        end = time.monotonic() + seconds
        for record in records.all_records(self._backend):
            being_made = not record.orphan and record.pid == 0
            if being_made or not (record.orphan or (everyone and record.reachable)):
                continue
            if run_id is None or record.run_id == run_id:
                _kill_first(record)
                # Marked: it may have been made with another isolation.
                if _remove(record, True, max(_LEAST, end - time.monotonic())):
                    removed.append(record.info())
        return removed


class HostSandbox(ExecutorSandbox):
    """A sandbox whose executor is the child of a process of this machine."""

    def __init__(self, connection: Connection, launched: _Launched, threads: ThreadPoolExecutor) -> None:
        super().__init__(connection, id=launched.record.id, workdir=launched.plan.workdir, python=None)
        self._launched, self._threads = launched, threads
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
            await launched.child.exited(_ENDING)
        except asyncio.CancelledError:  # the event loop ends first: without its stream the executor ends by itself
            self._connection.fail(f"{launched.name} is gone: its event loop has ended")
            _cleaned(self._threads, lambda: _finish(launched))
            raise
        self.last_words = _tail(launched.errors)
        starved = launched.group.starved()
        await asyncio.wrap_future(_cleaned(self._threads, lambda: _finish(launched)))
        lost = SandboxLost(reason) if reason else executor_death(launched.child.code, self.last_words, starved)
        self._connection.fail(f"{launched.name} is gone: {lost}", type(lost))


def _submit(pool: ThreadPoolExecutor, call: Callable[[], _T]) -> Future[_T]:
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


def _cleaned(pool: ThreadPoolExecutor, call: Callable[[], None]) -> Future[None]:
    """Run what must not be left out, in a worker thread, or here if there can be none."""
    try:
        return _submit(pool, call)
    except RuntimeError:
        done: Future[None] = Future()
        call()
        done.set_result(None)
        return done


def _discard(launching: Future[_Launched]) -> None:
    """End a sandbox whose creation was cancelled."""
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
    _remove(launched.record, launched.marked and child.code != 0)
    child.release()
    os.close(launched.errors)


def _remove(record: Record, marked: bool, seconds: float | None = None) -> bool:
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


def _kill_first(record: Record) -> None:
    """Kill its first process and wait for its end: the kernel ends its PID namespace with it."""
    if not record.runs:
        return
    with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(record.pid), "rb") as handle:
        if record.runs:  # still: the handle is not one of another process with the same number
            signal.pidfd_send_signal(handle.fileno(), signal.SIGKILL)
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            ended.poll(_ENDING * 1000)


def _tail(errors: int) -> str:
    text = os.pread(errors, 4096, max(0, os.fstat(errors).st_size - 4096)).decode(errors="replace")
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
