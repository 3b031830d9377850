"""Leftovers of sandboxes on this machine, seen from outside: processes, mounts, cgroups, folders.

Nothing here uses the code under test. A sandbox is identified by words in its processes (its name; a mark in their
variables), and by the kernel's data on these processes while they live: their PID namespace, their cgroups, and
their ancestors that are not older than the sandbox.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_KERNEL_THREAD = 0x200000  # PF_KTHREAD


class Leftovers:
    """Made before the sandboxes, notified of each while it lives, and queried when they are gone.

    Nobody else may make anything in the folders `places` meanwhile: everything new there is a leftover, and so is every
    new mount below. Shared folders are searched for the sandboxes' names.
    """

    def __init__(self, places: Iterable[Path] = ()) -> None:
        self._places = list(places)
        self._before = set(self._entries()) | set(self._mounts())
        self._running = dict(_living())
        self._words: set[bytes] = set()
        self._namespaces: set[int] = set()
        self._groups: set[str] = set()
        self._processes: dict[int, bytes] = {}

    def watch(self, *words: str) -> None:
        """Remember the sandbox whose processes contain one of `words`, with its surroundings as they are now. Blocks.

        Raises:
            AssertionError: there is no such process for a minute, so that its leftovers would go unseen.
        """
        self._words |= {word.encode() for word in words}
        own_groups = set(_groups(os.getpid()))
        end = time.monotonic() + 60
        while not (found := self._bearers()) and time.monotonic() < end:
            time.sleep(0.01)
        assert found, f"no process bears {words}"
        for bearer in found:
            pid = bearer
            namespace = _namespace(pid)
            if namespace not in (_namespace(os.getpid()), 0, *self._namespaces):
                self._hold(pid)
                self._namespaces.add(namespace)
            for group in _groups(pid):
                if (
                    group != "/" and group not in own_groups and "ssh-engine-" not in Path(group).name
                ):  # for all sandboxes
                    self._groups.add(group)
            while pid not in (0, 1, os.getpid()):
                fields = _stat(pid)
                if not fields or fields[19] == self._running.get(pid):
                    break
                parent = int(fields[1])
                if parent == os.getpid() and pid not in found:
                    break  # a helper or an engine of this process, for all sandboxes
                self._processes[pid] = fields[19]
                pid = parent

    def _bearers(self) -> list[int]:
        """Processes with one of the words, once no process is at an exec. Its arguments and variables are empty then,
        on a busy machine for a while."""
        living = [pid for pid, _ in _living()]
        end = time.monotonic() + 1  # a process may have emptied them itself
        while any(_at_an_exec(pid) for pid in living) and time.monotonic() < end:
            time.sleep(0.001)
        return [pid for pid in living if self._bears_a_word(pid)]

    def _hold(self, pid: int) -> None:
        """Keep the number of its PID namespace from being reused by a namespace that need not be a sandbox."""
        with contextlib.suppress(OSError):
            held = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
            weakref.finalize(self, os.close, held)

    def left(self) -> list[str]:
        """One line for each remaining thing."""
        return [*self._left_processes(), *self._left_groups(), *self._left_names()]

    def left_after(self, seconds: float = 60.0) -> list[str]:
        """`left`, once it is empty or the time is over, because engines may need a moment to remove things. Blocks."""
        end = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def _left_processes(self) -> Iterator[str]:
        for pid, start in _living():
            if (
                self._processes.get(pid) == start
                or _namespace(pid) in self._namespaces
                or (pid != os.getpid() and self._bears_a_word(pid))
            ):
                yield f"process {pid}: {_read(pid, 'cmdline')[:200]!r}"

    def _left_groups(self) -> Iterator[str]:
        for group in self._groups:
            for root in (_CGROUPS, *_CGROUPS.glob("*/")):
                if (root / group.lstrip("/")).is_dir():
                    yield f"cgroup {root}{group}"
        for folder in _below(_CGROUPS, 4):
            if any(word in os.fsencode(folder.name) for word in self._words):
                yield f"cgroup {folder}"

    def _left_names(self) -> Iterator[str]:
        yield from (set(self._entries()) | set(self._mounts())) - self._before
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            if any(word in line for word in self._words):
                yield f"mount {line!r}"
        for base in {Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm"), Path("/run")}:
            for folder in _below(base, 2):
                if any(word in os.fsencode(folder.name) for word in self._words):
                    yield f"folder {folder}"

    def _bears_a_word(self, pid: int) -> bool:
        text = _read(pid, "cmdline") + _read(pid, "environ")
        return any(word in text for word in self._words)

    def _entries(self) -> Iterator[str]:
        for place in self._places:
            with contextlib.suppress(OSError):
                yield from (f"entry {path}" for path in place.iterdir())

    def _mounts(self) -> Iterator[str]:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            point = line.split()[4]
            if any(point.startswith(f"{place}/") for place in self._places):
                yield f"mount {point}"


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _at_an_exec(pid: int) -> bool:
    fields = _stat(pid)
    alive = bool(fields) and fields[0] not in (b"Z", b"X")
    return alive and not int(fields[6]) & _KERNEL_THREAD and not _read(pid, "cmdline") + _read(pid, "environ")


def _stat(pid: int) -> list[bytes]:
    """State, parent, and so on; empty if there is no such process."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _living() -> Iterator[tuple[int, bytes]]:
    """Number and start time of every process, without zombies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and fields[0] not in (b"Z", b"X"):
                yield int(entry.name), fields[19]


def _namespace(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino
    except OSError:
        return 0


def _groups(pid: int) -> list[str]:
    return [line.split(":", 2)[2] for line in _read(pid, "cgroup").decode().splitlines()]


def _below(base: Path, depth: int) -> Iterator[Path]:
    """Folders below `base`, without links."""
    try:
        folders = [entry for entry in os.scandir(base) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for entry in folders:
        path = Path(entry.path)
        yield path
        if depth > 1:
            yield from _below(path, depth - 1)
