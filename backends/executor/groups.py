"""The control group of commands, below the one of the whole sandbox.

The kernel kills at a group's memory limit in that group only. So commands that reach theirs leave this process alone,
whatever oom_score_adj they choose and whichever process holds their memory.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

CLONE_VM, CLONE_INTO_CGROUP = 0x100, 0x200000000
CLONE, CLONE3 = {"aarch64": 220}.get(os.uname().machine, 56), 435


class CommandGroup:
    """An open group, from a descriptor that this process was started with.

    In version 2 it is that of the group's folder: a process can begin in it, if it is within the cgroup namespace. In
    version 1 it is that of its file `tasks`, where processes can only be moved to: each moves itself, which is fast,
    while to move another one, or in version 2 any, takes milliseconds on a machine on which others start processes.
    """

    def __init__(self, inherited: int) -> None:
        self.fd = fcntl.fcntl(inherited, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(inherited)
        self.unified = stat.S_ISDIR(os.fstat(self.fd).st_mode)
        self.filter: Any = None
        """What new processes give to PR_SET_SECCOMP: the calls that only this process may make, to start them."""

    def join(self) -> None:
        """Move this process into the group."""
        if not self.unified:
            os.write(self.fd, b"0")
            return
        file = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.write(file, b"0")
        finally:
            os.close(file)


class SpawnCall(ctypes.Structure):
    """How `starter` makes a process: a system call with two arguments, and what the new process begins with."""

    _fields_ = [
        ("number", ctypes.c_long),
        ("arguments", ctypes.c_long * 2),
        ("tasks", ctypes.c_long),
        ("zero", ctypes.c_char * 8),
        ("filter", ctypes.c_void_p),
        ("score", ctypes.c_char * 8),
    ]

    def __init__(self, score: bytes, group: CommandGroup | None) -> None:
        super().__init__(CLONE, (CLONE_VM | signal.SIGCHLD, 0), -1, b"0", None, score)
        self.begin = (ctypes.c_uint64 * 11)()  # struct clone_args: clone(2)
        if group is not None and group.filter is not None:
            self.filter = ctypes.addressof(group.filter)
        if group is not None and group.unified:
            self.begin[0], self.begin[4], self.begin[10] = CLONE_VM | CLONE_INTO_CGROUP, signal.SIGCHLD, group.fd
            self.number, self.arguments[:] = CLONE3, (ctypes.addressof(self.begin), ctypes.sizeof(self.begin))
        elif group is not None:
            self.tasks = group.fd

    def leave_group(self) -> bool:
        """Make processes without a group of version 2. False when they have none."""
        was = self.number == CLONE3
        self.number, self.arguments[:] = CLONE, (CLONE_VM | signal.SIGCHLD, 0)
        return was
