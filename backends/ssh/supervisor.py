"""The supervisor of a sandbox on the far machine of an ssh connection.

A process that outlives the ssh session it was started from, and the subreaper of all that runs in its sandbox, so that
nothing leaves its tree. When the executor ends, or SIGTERM comes, it ends the rest and removes the sandbox' cgroups and
folder. As long as it lives it holds a lock on that folder's `meta.json`. Sent over ssh together with `remote.py`.
"""

# ruff: noqa: PTH101, PTH106, PTH112, PTH114, PTH118, PTH119, PTH120, PTH123, PTH208, UP031
# (pathlib would add to the start-up time)
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING

from .walls import remove_groups, write

if TYPE_CHECKING:  # on Python 3.8 these could not be evaluated
    from typing import Any

    Message = dict[str, Any]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
EVENT = 4000
"""Bytes of one event: less than a pipe takes in one piece."""
END_PATIENCE = 15.0
"""Seconds that the processes of a sandbox are given to die."""


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def descendants(root: int) -> set[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open("/proc/%s/stat" % name, "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    tree, grown = {root}, True
    while grown:
        found = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree |= found
        grown = bool(found)
    return tree - {root}


def reap(child: int) -> tuple[bool, int | None]:
    """Take leave of the children that have ended: (whether any is left, the wait status of `child` if it was there)."""
    status = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, status
        if pid == 0:
            return True, status
        if pid == child:
            status = code


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.isdir(folder):  # not being root, it must be let into folders first
        for parent, folders, _ in os.walk(folder):
            for name in folders:
                if not os.path.islink(os.path.join(parent, name)):
                    with contextlib.suppress(OSError):
                        os.chmod(os.path.join(parent, name), 0o700)
        shutil.rmtree(folder, ignore_errors=True)


def remove_base(base: str, own: bool) -> None:
    """The folder of all sandboxes, when it is empty and nobody else's idea."""
    if own:
        with contextlib.suppress(OSError):
            os.rmdir(base)


def become(command: list[str], env: dict[str, str], groups: list[str], fds: list[int], log: int) -> None:
    """In the child: turn into the sandbox. Never returns."""
    try:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # the executor then ends all of its own
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.dup2(log, 2)
        for group in groups:
            write(os.path.join(group, "cgroup.procs"), "0")
        for fd in fds:
            os.set_inheritable(fd, True)
        os.umask(0o022)
        os.execve(command[0], command, env)
    except BaseException as error:
        os.write(2, os.fsencode("%s: %s\n" % (command[0], error)))
    finally:
        os._exit(126)


def supervise(
    folder: str,
    command: list[str],
    env: dict[str, str],
    groups: list[str],
    fds: list[int],
    lock: int,
    events: int,
    lifetime: float,
    own_base: bool,
) -> None:
    """Run a sandbox until its executor ends, SIGTERM comes or `lifetime` is over; then leave nothing of it."""
    os.setsid()
    os.chdir("/")
    kept = {*fds, lock, events}
    null, log = os.open(os.devnull, os.O_RDWR), os.memfd_create("log")
    for target in (0, 1, 2):  # the ssh session would stay open for as long as anybody holds its pipes
        os.dup2(null, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in {*kept, log}:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    write(os.path.join(folder, "pid"), str(os.getpid()))
    end = time.monotonic() + lifetime
    child = os.fork()
    if child == 0:
        become(command, env, groups, fds, log)
    for fd in fds:
        os.close(fd)  # a dead executor's socket refuses connections
    status: int | None = None
    while status is None and time.monotonic() < end:
        told = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, max(0.0, end - time.monotonic()))
        if told is not None and told.si_signo == signal.SIGTERM:
            break
        status = reap(child)[1]
    patience = time.monotonic() + END_PATIENCE
    while True:
        left, ended = reap(child)
        status = ended if status is None else status
        if not left or time.monotonic() > patience:
            break
        for pid in descendants(os.getpid()):
            kill(pid)
        time.sleep(0.001)
    remove_groups(groups)
    text = os.pread(log, 2000, max(0, os.fstat(log).st_size - 2000)).decode(errors="replace").strip()
    remove_folder(folder)
    remove_base(os.path.dirname(folder), own_base)
    event: Message = {"ended": os.path.basename(folder), "code": status, "log": text}
    while len(json.dumps(event)) >= EVENT:
        event["log"] = event["log"][len(event["log"]) // 2 :]
    with contextlib.suppress(OSError):  # the hub may be gone
        os.write(events, (json.dumps(event) + "\n").encode())
