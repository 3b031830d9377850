"""Processes as /proc shows them, and killing a whole tree of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time


def process_table() -> dict[int, tuple[str, int, int]]:
    """`{pid: (state, ppid, session)}` of every visible process."""
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
                continue  # it has ended
    return table


def living_tree(root: int) -> set[int]:
    """Living descendants of `root` and of the members of its session, without `root` itself."""
    table = process_table()
    tree = {pid for pid, (_, _, session) in table.items() if pid == root or session == root} | {root}
    grown = True
    while grown:
        found = {pid for pid, (_, parent, _) in table.items() if parent in tree and pid not in tree}
        tree |= found
        grown = bool(found)
    return {pid for pid in tree if pid != root and pid in table and table[pid][0] not in "ZX"}


def command_line(pid: int) -> str:
    """What a process shows of itself, shortened; its number if it shows nothing."""
    with contextlib.suppress(OSError), open("/proc/%d/cmdline" % pid, "rb") as file:
        words = file.read(120).replace(b"\0", b" ").strip()
        if words:
            return ascii(os.fsdecode(words))[1:-1]
    return "process %d" % pid


def stop_processes(pids: set[int]) -> set[int]:
    """Stop those that are not stopped already; returns them."""
    table = process_table()
    running = {pid for pid in pids if pid in table and table[pid][0] != "T"}
    for pid in running:
        send_signal(pid, signal.SIGSTOP)
    return running


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def last_process() -> bytes:
    """The number of the process that was started last."""
    try:
        with open("/proc/loadavg", "rb") as file:
            return file.read().split()[-1]
    except (OSError, IndexError):
        return os.urandom(8)


def are_forking() -> bool:
    """Whether processes are being started right now."""
    last = last_process()
    time.sleep(0.002)
    return last_process() != last


def is_left(root: int) -> bool:
    """Whether something of the tree may live. A table misses only processes that are started meanwhile, or their
    children."""
    last = last_process()
    return bool(living_tree(root)) or last_process() != last


def kill_tree(root: int) -> None:
    """Kill what `root` started, until no new process appears.

    A shell is the subreaper of its descendants, so orphans stay in its tree, unless it executes a program that gives
    the role up. Then only `kill_all` or the end of the sandbox reaches them.

    All are stopped before any is killed. Where the number of processes is limited, a killed process makes room for a
    new one, and a fork bomb would win; a stopped one keeps its place.
    """
    # A process that forks and exits in a loop is gone before a table of processes is complete. PID 1 can stop all at
    # once. It does so only then: shells with terminals would see their jobs stopped and take the terminal away.
    if os.getpid() != 1:
        kill_found(root)
        return
    if root == 1 or are_forking():
        kill_stopped(root)
    kill_found(root)
    if all(is_left(root) for _ in range(3)):  # on a busy machine, it was not seen to fork
        kill_stopped(root)
        kill_found(root)


def kill_stopped(root: int) -> None:
    """Stop all processes at once, kill those of the tree, and let the others go on."""
    stopped = {pid for pid, (state, _, _) in process_table().items() if state == "T"}  # and must stay so
    send_signal(-1, signal.SIGSTOP)
    victims = living_tree(root)
    for pid in victims:
        send_signal(pid, signal.SIGKILL)
    # Children first, which mostly have higher numbers: a shell that sees a stopped job takes its terminal away.
    for pid in sorted(process_table().keys() - victims - stopped - {1, root}, reverse=True):
        send_signal(pid, signal.SIGCONT)


def kill_found(root: int) -> None:
    """Kill what tables of processes show of the tree, until they show nothing new."""
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
