"""The supervisor of a sandbox on a far machine.

It outlives the ssh session that has started it, and is the subreaper of all processes of its sandbox, so that none can
leave its tree. When the executor ends, or SIGTERM comes, it ends the rest and removes the sandbox' cgroups and folder.
While it lives it holds a lock on that folder's `meta.json`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from typing import TYPE_CHECKING

from backends.executor.processes import kill_tree

from .folders import remove_sandbox
from .starting import become

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from .cgroups import Cgroup

PR_SET_CHILD_SUBREAPER = 36
EVENT = 4000
"""Bytes of one event: less than a pipe takes in one piece."""
END_PATIENCE = 15.0
"""Seconds that the processes of a sandbox have to die."""


def reap(child: int) -> tuple[bool, int | None]:
    """Reap the children that have ended: whether any is left, and the exit code of `child` if it was among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, code
        if pid == 0:
            return True, code
        if pid == child:
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def remove_base(base: Path, own: bool) -> None:
    """Remove the folder of all sandboxes if it is empty and nobody has chosen another one."""
    if own:
        with contextlib.suppress(OSError):
            base.rmdir()


def supervise(
    folder: Path,
    job: dict[str, Any],
    fds: list[int],
    group: Cgroup,
    lock: int,
    events: int,
    lifetime: float,
    own_base: bool,
) -> None:
    """Run a sandbox until its executor ends, SIGTERM comes or `lifetime` is over; then remove all of it.

    `job` and `fds` are those of `starting.become`, without the standard descriptors.
    """
    os.setsid()
    os.chdir("/")
    null, log = os.open(os.devnull, os.O_RDWR), os.memfd_create("log")
    for target in (0, 1, 2):  # the ssh session stays open while any process holds its pipes
        os.dup2(null, target)
    kept = {0, 1, 2, *fds, lock, events, log}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    (folder / "pid").write_text(str(os.getpid()))
    end = time.monotonic() + lifetime
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        become(job, [0, log, *fds], parent)
    for fd in fds:
        os.close(fd)  # the socket of a dead executor refuses connections
    code: int | None = None
    while code is None and time.monotonic() < end:
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, max(0.0, end - time.monotonic()))
        if received is not None and received.si_signo == signal.SIGTERM:
            break
        code = reap(child)[1]
    patience = time.monotonic() + END_PATIENCE
    while True:
        left, ended = reap(child)
        code = ended if code is None else code
        if not left or time.monotonic() > patience:
            break
        kill_tree(os.getpid())
        time.sleep(0.001)
    starved = group.starved()
    text = os.pread(log, 2000, max(0, os.fstat(log).st_size - 2000)).decode(errors="replace").strip()
    remove_sandbox(folder, group.folders)
    remove_base(folder.parent, own_base)
    event = {"ended": folder.name, "code": code, "log": text, "starved": starved}
    while len(json.dumps(event)) >= EVENT:
        text = text[len(text) // 2 :]
        event["log"] = text
    with contextlib.suppress(OSError):  # the hub may be gone
        os.write(events, (json.dumps(event) + "\n").encode())
