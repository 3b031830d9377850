"""For how long commands could have run while others had the processors.

That tells a command that hangs from one that a busy machine keeps from its end: the first one sleeps, or has the time
of a processor. It is found by looking at the processes of the sandbox again and again, since the kernel forgets how
long an ended one has waited.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loop import Loop

_FIRST, _PART = 0.1, 1 / 16
"""Seconds until the first look, and the part of the time so far until the next one."""
_SCHED_IDLE = 5
_TICKS = os.sysconf("SC_CLK_TCK")


class Waiting:
    """Looks at everything that runs in the sandbox while there are commands to watch."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.cpus = float("inf")
        """Processors that the sandbox may use at most."""
        # gVisor has no such file, and counts what a program waits as processor time.
        self.is_known = os.path.exists("/proc/self/schedstat")
        self.total = 0.0
        """Seconds so far."""
        self.watched = 0
        self.begun = 0.0
        self.round = 0
        self.before = Look()

    def begin(self) -> float:
        """A command to watch begins; returns the seconds so far."""
        self.watched += 1
        if self.watched == 1 and self.is_known:
            self.begun = time.monotonic()
            self.before = Look(self.begun)
            self.round += 1
            self.schedule()
        return self.total

    def end(self) -> None:
        self.watched -= 1

    def schedule(self) -> None:
        number = self.round

        def look() -> None:
            if self.watched and number == self.round:
                self.look()
                self.schedule()

        self.loop.after(max(_FIRST, (time.monotonic() - self.begun) * _PART), look)

    def look(self) -> None:
        """Add what was waited since the last look."""
        if not self.watched or not self.is_known:
            return
        most = min(self.cpus, len(os.sched_getaffinity(0)))
        before, now = self.before, Look.at_all(most)
        self.before = now
        if not now.wanting:  # they sleep, have ended, or leave the processors to others
            return
        # Of what runs side by side, each has a part of the time.
        wide = min(most, max(1, before.wanting, now.wanting))
        took = now.since(before) / wide
        self.total += max(0.0, now.at - before.at - took)


class Look:
    """The processes of the sandbox at one moment."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at
        self.all: float | None = None
        """Seconds of processor time of all that live, and of those that they waited for."""
        self.own: dict[int, float] = {}
        """By process."""
        self.wanting = 0
        """Threads that run or could run."""

    def since(self, before: Look) -> float:
        """Seconds of processor time since an earlier look, at least. What an ended process took is in the time of the
        one that waited for it, which may be none."""
        seen = sum(max(0.0, seconds - before.own.get(pid, 0.0)) for pid, seconds in self.own.items())
        return max(seen, 0.0 if self.all is None or before.all is None else self.all - before.all)

    @classmethod
    def at_all(cls, most: float) -> Look:
        """Of this process' descendants. Threads that want to run are counted up to `most`."""
        found = cls(time.monotonic())
        lowest = os.getpriority(os.PRIO_PROCESS, 0)
        table: dict[int, list[bytes]] = {}
        children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (fields := _fields("/proc/%s/stat" % name)):
                table[int(name)] = fields
                children.setdefault(int(fields[1]), []).append(int(name))
        tree = list(children.get(os.getpid(), ()))
        times = os.times()
        found.all = times.children_user + times.children_system
        for pid in tree:
            tree += children.get(pid, ())  # a walk comes to these as well
            fields = table[pid]
            found.own[pid] = _seconds(pid, fields)
            found.all += found.own[pid] + (int(fields[13]) + int(fields[14])) / _TICKS
            if fields[0] in b"ZX" or found.wanting >= most:
                continue
            threads = [fields] if int(fields[17]) < 2 else _threads(pid, fields)
            for thread in threads:
                # Waiting for a disk; the parent of a `vfork` has that state as well.
                runs = thread[0] == b"R" or (thread[0] == b"D" and pid not in children)
                # One that asks for less time than others gets it.
                found.wanting += runs and int(thread[16]) <= lowest and int(thread[38]) != _SCHED_IDLE
                if found.wanting >= most:
                    break
        return found


def _seconds(pid: int, fields: list[bytes]) -> float:
    """Of processor time. Many processes may have had less than a tick each."""
    if int(fields[17]) < 2:
        exact = _read("/proc/%d/schedstat" % pid).split()
        if exact:
            return int(exact[0]) / 1e9
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _threads(pid: int, fields: list[bytes]) -> list[list[bytes]]:
    try:
        names = os.listdir("/proc/%d/task" % pid)
    except OSError:  # it has ended
        return [fields]
    return [found for name in names if (found := _fields("/proc/%d/task/%s/stat" % (pid, name)))]


def _fields(path: str) -> list[bytes]:
    """Those after the name of the program: the state is the first. Empty where the process has ended."""
    fields = _read(path).rpartition(b")")[2].split()
    return fields if len(fields) > 38 else []


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return b""
