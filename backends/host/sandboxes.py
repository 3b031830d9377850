"""Sandboxes that are processes of this machine, whichever program isolates them.

The program's standard input and output are the executor's stream. It ends with the stream, that is when the owner
closes the sandbox or dies, and everything inside ends with it. A record, and a cgroup for limits, are made before and
removed after; the next owner removes those of one that was killed.
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
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from backends.connection import PATIENCE, Connection, asyncio_stream
from backends.errors import BackendError, SandboxExhausted
from backends.limits import MissingDefaults, with_defaults
from backends.owner import new_id
from backends.spec import SandboxInfo, SandboxSpec, sandbox_title

from . import cgroups, delegation, records
from .disks import Another, Descriptor, DiskLayer, SandboxDisk, receive, require_room
from .layout import MISPLACED
from .plan import FIRST_FILE, Disk, Plan, Prepared, memory_file
from .records import Record
from .sandbox import ENDING, HostSandbox, Launched, cleaned, finish, remove, submitted, tail
from .spawner import Spawner

_MOVING = 60.0
"""Seconds for a new root."""
_AT_START = 2.0
"""Seconds that the first sandbox waits for the removal of all orphans; the rest of them is removed meanwhile."""
_REAPING = 120.0
"""Seconds for which a call of `reap` removes."""
_LEAST = 0.2
"""Seconds for each of the orphans, however many there are."""
_T = TypeVar("_T")
MakePlan = Callable[[str, SandboxSpec, list[str], int | None], Plan]


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
        self._first_users = threading.Lock()
        self.users: Sequence[Descriptor] = ()
        """The user namespace in which all disks are mounted, where this user needs one: so they can lie over others."""

    async def in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.wrap_future(submitted(self._threads, call))

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
            return "" if child.code == 0 else tail(errors) or f"exit code {child.code}"
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
        layers: tuple[DiskLayer, ...] = (),
    ) -> HostSandbox:
        """A sandbox that is ready for commands.

        Args:
            plan: called in a worker thread with the id, the spec with its default limits, the executor's arguments,
                and the number of processes that RLIMIT_NPROC has to limit, if any. It may block, and write into
                `records.folder(id)`. If there are arguments, `Plan.contents` are preceded by one descriptor.
            detail: one line for listings.
            countable: whether `plan` can set RLIMIT_NPROC inside a user namespace.
            file_systems: called in a worker thread: how many file systems in memory it will have.
            layers: what its disk lies over, the newest first.

        Raises:
            BackendUnavailable: a limit cannot be enforced; and what `plan` raises.
            BackendError: it did not start.
        """
        require_room(layers)

        def another(spec: SandboxSpec, layers: tuple[DiskLayer, ...]) -> Coroutine[Any, Any, HostSandbox]:
            return self.create(spec, plan, detail=detail, countable=countable, file_systems=file_systems, layers=layers)

        make = partial(self._launch, new_id(), spec, plan, detail, countable, file_systems, layers, another)
        launching = submitted(self._starting, make)
        try:
            launched = await asyncio.wrap_future(launching)
            reader, writer = await asyncio.open_unix_connection(sock=launched.stream)
        except BaseException:
            await asyncio.shield(asyncio.wrap_future(cleaned(self._threads, lambda: _discard(launching))))
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
        layers: tuple[DiskLayer, ...],
        another: Another,
    ) -> Launched:
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
            undo.callback(remove, record, self._marked)
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
            keeper, kept = socket.socketpair() if plan.prepared is not None else (None, None)
            for end in (keeper, kept):
                if end is not None:
                    passed.callback(end.close)
            if keeper is not None and not self.users and os.geteuid() != 0:
                passed.enter_context(self._first_users)  # the others use the namespace of the first one
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
                layers=[layer.fd for layer in layers],
                users=[each.fd for each in self.users] if plan.disk is not None else (),
                keeper=[kept.fileno()] if kept is not None else (),
            )
            undo.callback(child.release)
            undo.callback(child.wait, ENDING)
            undo.callback(child.kill)
            record = record.started(child.pid)
            records.save(record)
            disk = None
            with contextlib.suppress(BackendError):  # it ended before it had one
                if keeper is not None:
                    own, (users, *namespaces) = receive(keeper)
                    change = partial(self.new_disk, plan, group, sandbox_title(id, spec.labels))
                    disk = SandboxDisk(own, namespaces, layers, change, another)
                    self.users = self.users or ([] if plan.disk is None or os.geteuid() == 0 else [users])
            ours.setblocking(False)
            undo.pop_all()
        # Until it has started, it keeps its thread: the next one would only slow it down.
        greeting = select.poll()
        greeting.register(ours, select.POLLIN)
        greeting.poll(PATIENCE * 1000)
        name = sandbox_title(id, spec.labels)
        return Launched(plan, spec, record, name, child, ours, errors, group, self._marked, disk, asked)

    def new_disk(
        self, plan: Plan, group: cgroups.Cgroup, name: str, layers: Sequence[DiskLayer], namespaces: Sequence[int]
    ) -> DiskLayer:
        """A new disk over `layers` for a sandbox, which is its root from now on.

        Args:
            name: of the sandbox, in messages.
            namespaces: those of `rooting.move_root`; none: the disk is only a copy of the first layer.

        Raises:
            SandboxExhausted: commands have moved what the sandbox has mounts in, or the kernel has ended this for want
                of the sandbox' memory.
            BackendError: it failed, and nothing has changed.
        """
        require_room(layers)
        with contextlib.ExitStack() as passed:
            keeper, kept = socket.socketpair()
            null, errors = os.open(os.devnull, os.O_RDWR), os.memfd_create("errors")
            passed.callback(keeper.close)
            passed.callback(kept.close)
            for fd in (null, errors):
                passed.callback(os.close, fd)
            joined = group.open(commands=True) if group.folders else []
            for fd in joined:
                passed.callback(os.close, fd)
            child = self.spawner.spawn(
                [],
                stream=null,
                errors=errors,
                files=namespaces,
                groups=joined,
                disk=plan.disk,
                layers=[layer.fd for layer in layers],
                users=[each.fd for each in self.users],
                keeper=[kept.fileno()],
                moved=1 if namespaces else -1,
            )
            passed.callback(child.release)
            done = select.poll()
            done.register(keeper, select.POLLIN)
            done.register(child.handle, select.POLLIN)
            if not done.poll(_MOVING * 1000):
                child.kill()
            with contextlib.suppress(BackendError):
                return receive(keeper)[0]
            child.wait(ENDING)
            text = f"{name} gets no new disk: {tail(errors) or f'exit code {child.code}'}"
            own_doing = child.code == MISPLACED or (child.code == -signal.SIGKILL and group.starved())
            raise SandboxExhausted(text) if own_doing else BackendError(text)

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
                if remove(record, True, max(_LEAST, end - time.monotonic())):
                    removed.append(record.info())
        return removed


def _discard(launching: Future[Launched]) -> None:
    """End a sandbox whose creation was cancelled."""
    with contextlib.suppress(BaseException):
        launched = launching.result()
        launched.stream.close()
        finish(launched)


def _kill_first(record: Record) -> None:
    """Kill its first process and wait for its end: the kernel ends its PID namespace with it."""
    if not record.runs:
        return
    with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(record.pid), "rb") as handle:
        if record.runs:  # still: the handle is not one of another process with the same number
            signal.pidfd_send_signal(handle.fileno(), signal.SIGKILL)
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            ended.poll(ENDING * 1000)
