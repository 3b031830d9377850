"""Removing System V shared memory, message queues and semaphores: they outlive the processes that made them."""

from __future__ import annotations

import contextlib
import itertools
import os

from .kernel import libc

IPC_RMID = 0
FEW_SEMAPHORES = 128


def is_shared_ipc() -> bool:
    """Whether other processes of the machine may use the same objects."""
    first = 0xEFFFFFFF  # the number of the machine's own namespace (include/linux/proc_ns.h)
    try:
        return os.getpid() != 1 or os.stat("/proc/self/ns/ipc").st_ino == first
    except OSError:
        return True


def shared_objects() -> int:
    """How many there are in this IPC namespace; 0 where it is shared."""
    if is_shared_ipc():
        return 0
    count = 0
    for kind in ("shm", "msg", "sem"):
        with contextlib.suppress(OSError), open("/proc/sysvipc/" + kind) as file:
            count += max(0, sum(1 for _ in file) - 1)
    return count


def remove_ipc(*, orphans: bool = False) -> None:
    """Remove all objects of this IPC namespace, none where it is shared.

    With `orphans`, those remain that a living process has made or used last, and the first sets of semaphores, whose
    users nobody knows.
    """
    if is_shared_ipc():
        return
    for kind in ("shm", "msg", "sem"):
        with contextlib.suppress(OSError), open("/proc/sysvipc/" + kind) as file:
            names = next(file).split()  # key, id and more. Rows are read one by one: there may be no memory
            rows = (dict(zip(names, map(int, line.split()))) for line in file)
            spared = FEW_SEMAPHORES if orphans and kind == "sem" else 0
            for row in itertools.islice(rows, spared, None):
                users = [row[name] for name in ("cpid", "lspid", "lrpid") if row.get(name)]
                used = row.get("nattch") or any(os.path.exists("/proc/%d" % pid) for pid in users)
                if not (orphans and used):
                    getattr(libc, kind + "ctl")(row[names[1]], IPC_RMID, IPC_RMID)  # semctl has the command third
