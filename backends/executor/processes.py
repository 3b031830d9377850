"""Processes as /proc shows them, and how a tree of them ends that does not want to."""

from __future__ import annotations

import contextlib
import os
import signal
import time


def process_table() -> dict[int, tuple[str, int, int]]:
    """`{pid: (state, ppid, session)}` of every process that can be seen."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fd = os.open("/proc/%s/stat" % name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fields = os.read(fd, 4096).rpartition(b")")[2].split()
                finally:
                    os.close(fd)
                table[int(name)] = (fields[0].decode(), int(fields[1]), int(fields[3]))
            except (OSError, IndexError):
                continue  # it ended meanwhile
    return table


def living_tree(root: int) -> set[int]:
    """Living processes below `root`, members of its session, and what is below those; never `root` itself."""
    table = process_table()
    tree = {pid for pid, (_, _, session) in table.items() if pid == root or session == root} | {root}
    grown = True
    while grown:
        found = {pid for pid, (_, parent, _) in table.items() if parent in tree and pid not in tree}
        tree |= found
        grown = bool(found)
    return {pid for pid in tree if pid != root and pid in table and table[pid][0] not in "ZX"}


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def are_forking() -> bool:
    """Whether processes are being started right now."""
    try:
        with open("/proc/loadavg", "rb") as file:
            last = file.read().split()[-1]
        time.sleep(0.002)
        with open("/proc/loadavg", "rb") as file:
            return file.read().split()[-1] != last
    except (OSError, IndexError):
        return True


def kill_tree(root: int) -> None:
    """Kill what `root` started until nothing new turns up.

    A shell is the subreaper of what it starts, so that an orphan stays in its tree: unless the shell becomes a program
    that gives that up. Then only the end of all, here or by the sandbox' owner, reaches it.

    All are stopped before any is killed: a dead process makes room for another where their number is limited, and
    then those that fork win; a stopped one does not.
    """
    # Who forks and ends all the time is never where a table says: as PID 1 one can stop all. Only then, as shells
    # with terminals see their jobs stopped and take the terminal away.
    if os.getpid() == 1 and (root == 1 or are_forking()):
        stopped = {pid for pid, (state, _, _) in process_table().items() if state == "T"}  # and are to stay so
        send_signal(-1, signal.SIGSTOP)
        victims = living_tree(root)
        for pid in victims:
            send_signal(pid, signal.SIGKILL)
        # Children first, which mostly have the higher numbers: a shell that looks at a job which is still stopped takes
        # its terminal away.
        for pid in sorted(process_table().keys() - victims - stopped - {1, root}, reverse=True):
            send_signal(pid, signal.SIGCONT)
    end = time.monotonic() + 5.0
    seen: set[int] = set()
    while True:
        victims = living_tree(root)
        fresh = victims - seen
        for pid in fresh:
            send_signal(pid, signal.SIGSTOP)
        seen |= fresh
        if not fresh or time.monotonic() > end:
            break
    patience = time.monotonic() + 0.15
    while victims:
        for pid in victims:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.001)
        victims = living_tree(root)
        now = time.monotonic()
        if victims - seen:
            patience = now + 0.15  # still forking
        seen |= victims
        if now > patience or now > end:
            return
