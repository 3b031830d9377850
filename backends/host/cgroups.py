"""Limits on processor time, memory and processes, by the kernel's control groups, of version 1 or 2.

A sandbox' group is made below the group of the process that makes it, so that the limits of that process (a
container's, a batch job's) also hold for its sandboxes. Version 2 does not allow that for a group that has processes;
then the nearest usable group above is the parent.

    available = cgroups.find()
    group = available.create("lachesis-0123", Limits(memory_bytes=1 << 30))
    ...                               # a starting process writes "0" into each of `group.open()`
    group.kill(); group.remove()
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backends.errors import BackendError, BackendUnavailable

from .kernel import in_container

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PIDS = 2048
"""`SandboxSpec.pids` where none is given, on machines that can enforce it."""

_PARENT = "lachesis"
_PERIOD = 100_000
"""Microseconds over which processor time is measured out."""
FIELDS = {"cpus": "cpu", "memory_bytes": "memory", "pids": "pids"}
"""Field of `SandboxSpec` -> controller."""
_COMMANDS, _EXECUTOR = "commands", "executor"
"""Groups below the one of a sandbox that has a memory limit. In version 1, the executor is in the upper one itself."""
_ROOM = 32 << 20
"""Bytes of the memory limit that commands cannot take from the executor."""
_TRACKER = "pids"
"""The controller of version 1 that lists and ends the processes of a group: its limit stops a fork bomb."""


@dataclass(frozen=True)
class Limits:
    """The limits of a group; None means no limit."""

    cpus: float | None = None
    memory_bytes: int | None = None
    """Memory without swap, files on a tmpfs included."""
    pids: int | None = None

    def controllers(self) -> set[str]:
        return {controller for name, controller in FIELDS.items() if getattr(self, name) is not None}


@dataclass(frozen=True)
class Cgroups:
    """Where this process may make groups."""

    version: int
    """1, 2, or 0 where there is none at all."""
    parents: Mapping[str, Path] = field(default_factory=dict)
    """Controller -> the folder below which groups that need it are made."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Controller -> why there is no such folder."""
    step: str = ""
    """What to do about it; empty: see `next_step`."""

    def enforced(self, *, countable: bool) -> list[str]:
        """The fields of `SandboxSpec` that `allot` can enforce, with its `countable`."""
        counted = ["pids"] if countable and _counts_processes_per_namespace() else []
        return [name for name, controller in FIELDS.items() if controller in self.parents or name in counted]

    def why_not(self, fields: Iterable[str]) -> str:
        """Why fields of `SandboxSpec` cannot be enforced."""
        missing = (FIELDS[field] for field in fields)
        reasons = (self.refused.get(each, f"there is no cgroup controller {each!r}") for each in missing)
        return "; ".join(dict.fromkeys(reasons))

    def require(self, limits: Limits) -> None:
        """Raises `BackendUnavailable` naming the first field of `limits` that cannot be enforced here."""
        for name, controller in FIELDS.items():
            if getattr(limits, name) is not None and controller not in self.parents:
                step = f"{next_step(self)}; or leave it out"
                raise BackendUnavailable(
                    f"{name} cannot be enforced on this machine: {self.why_not([name])}. Next step: {step}"
                )

    def group(self, name: str, limits: Limits) -> Cgroup:
        """The group that `create` would make.

        Raises:
            BackendUnavailable: one of the limits cannot be enforced here.
        """
        self.require(limits)
        wanted = limits.controllers() | ({_TRACKER} & self.parents.keys())
        folders = tuple(dict.fromkeys(self.parents[each] / _PARENT / name for each in sorted(wanted)))
        if limits.memory_bytes is None:
            return Cgroup(folders)
        own = self.parents["memory"] / _PARENT / name
        below = (own / _COMMANDS, own / _EXECUTOR) if self.version == 2 else (own / _COMMANDS,)
        return Cgroup(below + folders)

    def allot(self, name: str, limits: Limits, *, countable: bool, tracked: bool) -> tuple[Cgroup, Limits, int | None]:
        """How the limits of a new sandbox are enforced.

        Args:
            countable: whether RLIMIT_NPROC can be set inside a user namespace, for users who may not make groups.
            tracked: whether a group is needed to find its processes again, as without a PID namespace.

        Returns:
            The group that it needs, without folders if it needs none; the limits with which `create` makes it; and the
            number of processes that RLIMIT_NPROC has to limit.

        Raises:
            BackendUnavailable: one of the limits cannot be enforced here.
        """
        counted = None
        if "pids" not in self.parents and countable and _counts_processes_per_namespace():
            limits, counted = replace(limits, pids=None), limits.pids
        tracks = self.parents if self.version == 2 else _TRACKER in self.parents
        needed = limits.controllers() or (tracked and tracks)
        return self.group(name, limits) if needed else Cgroup(()), limits, counted

    def create(self, name: str, limits: Limits) -> Cgroup:
        """An empty group with these limits.

        Raises:
            BackendUnavailable: one of them cannot be enforced here.
            BackendError: the kernel refused.
        """
        group = self.group(name, limits)
        try:
            for folder in reversed(group.folders):  # those below the others are first
                self._make(folder)
            self._limit(name, limits)
        except OSError as error:
            group.remove(patience=0.0)
            raise BackendError(f"the cgroup of {name} cannot be made: {error}") from error
        return group

    def _make(self, folder: Path) -> None:
        for attempt in range(10):  # removing another process' last sandbox removes the parent
            try:
                below = folder.name in (_COMMANDS, _EXECUTOR)
                if not below:
                    folder.parent.mkdir(exist_ok=True)
                if self.version == 2:
                    _enable(folder.parent, ["memory"] if below else self.parents)
                folder.mkdir()
                return
            except (FileExistsError, FileNotFoundError):  # the former may have vanished again
                if attempt == 9:
                    raise

    def _limit(self, name: str, limits: Limits) -> None:
        def write(controller: str, file: str, value: object, *, optional: bool = False) -> None:
            path = self.parents[controller] / _PARENT / name / file
            if not optional or path.exists():
                path.write_text(str(value))

        if limits.cpus is not None:
            quota = max(1_000, round(limits.cpus * _PERIOD))
            if self.version == 2:
                write("cpu", "cpu.max", f"{quota} {_PERIOD}")
            else:
                write("cpu", "cpu.cfs_period_us", _PERIOD)
                write("cpu", "cpu.cfs_quota_us", quota)
        if limits.memory_bytes is not None:
            room = min(_ROOM, limits.memory_bytes // 4)
            limit = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            write("memory", f"{_COMMANDS}/{limit}", limits.memory_bytes - room)
            if self.version == 2:
                write("memory", "memory.max", limits.memory_bytes)
                write("memory", "memory.swap.max", 0, optional=True)  # missing if the kernel does not account swap
            else:
                write("memory", "memory.limit_in_bytes", limits.memory_bytes)
                write("memory", "memory.memsw.limit_in_bytes", limits.memory_bytes, optional=True)
                write("memory", "memory.swappiness", 0, optional=True)
        if limits.pids is not None:
            write("pids", "pids.max", limits.pids)


@dataclass(frozen=True)
class Cgroup:
    """A group: one folder in version 2, one per controller in version 1, after those of groups below it."""

    folders: tuple[Path, ...]

    @property
    def divided(self) -> bool:
        """Whether the commands of its executor have a group of their own."""
        return any(folder.name == _COMMANDS for folder in self.folders)

    def arguments(self, number: int) -> list[str]:
        """Those of an executor that gets `open_commands` as its descriptor `number`."""
        unified = any(folder.name == _EXECUTOR for folder in self.folders)
        return ["--group", f"{'folder' if unified else 'tasks'}:{number}"] if self.divided else []

    def open_commands(self) -> int:
        """A descriptor of the group of commands, for the executor's option `--group`."""
        folder = next(folder for folder in self.folders if folder.name == _COMMANDS)
        legacy = folder / "tasks"
        try:
            return os.open(legacy, os.O_WRONLY | os.O_CLOEXEC) if legacy.exists() else os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise BackendError(f"no process can be moved into the cgroup {folder}: {error}") from error

    def open(self, *, commands: bool = False) -> list[int]:
        """Descriptors for a process that is to join: it writes "0" into each, before it runs anything.

        Args:
            commands: whether it joins the commands, if they have a group of their own, and not the executor.
        """
        opened: list[int] = []
        try:
            own = [folder for folder in self.folders if commands and folder.name == _COMMANDS]
            leaves = [folder for folder in self.folders if folder.name == _EXECUTOR]
            others = [folder for folder in self.folders if folder.name != _COMMANDS]
            for folder in (own or leaves) if leaves else [*others, *own]:
                opened.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            for fd in opened:
                os.close(fd)
            raise BackendError(f"no process can be moved into the cgroup {folder}: {error}") from error
        return opened

    def processes(self) -> set[int]:
        found: set[int] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
        return found - {0}  # 0: one that this PID namespace cannot see

    def starved(self) -> bool:
        """Whether the kernel has killed processes because of the memory limit."""
        for path in [folder / name for folder in self.folders for name in ("memory.events", "memory.oom_control")]:
            killed, at_limit = _counter(path, "oom_kill"), _counter(path, "oom")
            # Version 2 tells these apart from those that were killed because the machine had no memory.
            if killed and (at_limit is None or killed <= at_limit):
                return True
        return False

    def throttled(self) -> int:
        """In how many periods, of a tenth of a second, the limit of processor time has held it back."""
        return next(filter(None, (_counter(folder / "cpu.stat", "nr_throttled") for folder in self.folders)), 0)

    def kill(self, patience: float = 5.0) -> bool:
        """Kill all its processes, also a fork bomb. Returns whether none is left."""
        end = time.monotonic() + patience
        for folder in self.folders:
            for name, value in (("cgroup.kill", "1"), ("pids.max", "0")):
                if (folder / name).exists():
                    with contextlib.suppress(OSError):
                        (folder / name).write_text(value)
        while True:
            left = self.processes()
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not left or time.monotonic() > end:
                return not left
            time.sleep(0.002)

    def remove(self, patience: float = 5.0) -> bool:
        """Remove it once its last processes are gone, and the parent folder after the last group. Blocks.

        Returns whether it is gone.
        """
        end = time.monotonic() + patience
        gone = True
        for folder in self.folders:
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    pass
                except OSError as error:
                    if error.errno == errno.EBUSY and time.monotonic() < end:
                        time.sleep(0.002)
                        continue
                    gone = False
                break
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
        return gone


def _counter(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = path.read_text().split()
        return int(words[words.index(name) + 1])
    return None


def find(step: str = "", pid: int | str = "self") -> Cgroups:
    """What this process may use for children of `pid`, tried with a group that is removed again.

    `step` is for error messages.
    """
    if not Path("/proc/self/cgroup").exists():
        return Cgroups(0, {}, dict.fromkeys(FIELDS.values(), "this kernel has no cgroups"), step)
    own = dict(_own_groups(pid))
    legacy = {controller: own[controller] for controller in FIELDS.values() if controller in own}
    return replace(_find_legacy(legacy) if legacy or "" not in own else _find_unified(*own[""]), step=step)


def describe(available: Cgroups) -> str:
    """One line: the fields of `SandboxSpec` that can be enforced, and why others cannot."""
    usable = [name for name, controller in FIELDS.items() if controller in available.parents]
    missing = {available.refused.get(each, "not there") for each in FIELDS.values() if each not in available.parents}
    text = f"{', '.join(usable) or 'none'} (cgroup version {available.version})" if available.version else "none"
    return text + (f"; others not: {'; '.join(sorted(missing))}" if missing else "")


def next_step(available: Cgroups) -> str:
    """How this process gets cgroups that it may write to."""
    if available.step:
        return available.step
    if os.geteuid() != 0:
        scope = "start it with: systemd-run --user --scope -p Delegate=yes COMMAND"
        return scope if available.version == 2 else "run it as root"
    if in_container():
        return "give this container its cgroups writable, or use a backend whose engine sets limits"
    return "mount the cgroups writable, with all controllers"


def _own_groups(pid: int | str) -> Iterable[tuple[str, tuple[Path, Path]]]:
    """`(controller, (mount point, folder of the group of a process))`; the controller of version 2 is ''."""
    paths = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        names = {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, [])
        for controller in names:
            if controller in paths:
                # In a container the mount begins at `root`; the path in /proc may or may not include that.
                path = paths[controller]
                inside = os.path.relpath(path, root) if Path(root) in (Path(path), *Path(path).parents) else "."
                folder = Path(mount, inside)
                yield controller, (Path(mount), folder if folder.is_dir() else Path(mount))


def _try(available: Cgroups, controllers: Iterable[str]) -> str | None:
    """Make and remove a group with limits of these controllers. Returns the reason of a failure."""
    tried = {"cpus": 1, "memory_bytes": 1 << 30, "pids": 1 << 10}
    limits = Limits(**{name: value for name, value in tried.items() if FIELDS[name] in controllers})
    try:
        group = available.create(f"probe-{os.getpid()}-{time.monotonic_ns()}", limits)
        for fd in group.open():
            os.close(fd)
        group.remove(0.5)
    except BackendError as error:
        return str(error.__cause__ or error)
    return None


def _find_legacy(own: Mapping[str, tuple[Path, Path]]) -> Cgroups:
    failures = {each: _try(Cgroups(1, {each: folder}), [each]) for each, (_, folder) in own.items()}
    parents = {each: own[each][1] for each, failure in failures.items() if failure is None}
    return Cgroups(1, parents, {each: failure for each, failure in failures.items() if failure is not None})


def _find_unified(mount: Path, own: Path) -> Cgroups:
    wanted = list(FIELDS.values())
    failure = "there is no cgroup of version 2"
    candidates = [folder for folder in (own, *own.parents) if mount in (folder, *folder.parents)]
    for folder in candidates:
        try:
            present = (folder / "cgroup.controllers").read_text().split()
            usable = [each for each in wanted if each in present]
            if not usable or not os.access(folder / "cgroup.procs", os.W_OK):
                failure = f"{folder} does not belong to this user" if usable else f"{folder} has no controllers"
                continue
            _enable(folder, usable)
        except OSError as error:
            failure = f"{folder} cannot be used: {error}"
            continue
        tried = _try(Cgroups(2, dict.fromkeys(usable, folder)), usable)
        if tried is None:
            refused = {each: f"{folder} has no such controller" for each in wanted if each not in usable}
            return Cgroups(2, dict.fromkeys(usable, folder), refused)
        failure = tried
    return Cgroups(2, {}, dict.fromkeys(wanted, failure))


def _counts_processes_per_namespace() -> bool:
    """Whether RLIMIT_NPROC counts the processes of one user namespace (Linux 5.14 and later, never for root)."""
    release = os.uname().release.partition("-")[0].split(".")
    return os.geteuid() != 0 and (int(release[0]), int(release[1])) >= (5, 14)


def _enable(folder: Path, controllers: Iterable[str]) -> None:
    """Enable the controllers for the groups below `folder`."""
    control = folder / "cgroup.subtree_control"
    lacking = sorted(set(controllers) - set(control.read_text().split()))
    if lacking:
        control.write_text(" ".join(f"+{each}" for each in lacking))
