"""The control group of commands, below the one of the whole sandbox.

The kernel kills at a group's memory limit in that group only. So commands that reach theirs leave this process alone,
whatever oom_score_adj they choose and whoever holds their memory.
"""

from __future__ import annotations

import _thread
import ctypes
import fcntl
import os
import signal
import stat
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

CLONE_VM, CLONE_INTO_CGROUP = 0x100, 0x200000000
CLONE, CLONE3 = {"aarch64": 220}.get(os.uname().machine, 56), 435


class CommandGroup:
    """An open group, from a descriptor that this process was started with.

    In version 2 it is that of the group's folder: a process can begin in it, if it is within the cgroup namespace. In
    version 1 it is that of its file `tasks`, where processes can only be moved to.
    """

    def __init__(self, inherited: int) -> None:
        self.fd = fcntl.fcntl(inherited, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(inherited)
        self.unified = stat.S_ISDIR(os.fstat(self.fd).st_mode)

    def join(self) -> None:
        """Move the calling thread into the group; in version 2, its whole process."""
        if not self.unified:
            os.write(self.fd, b"0")
            return
        file = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            os.write(file, b"0")
        finally:
            os.close(file)


def clone_call(group: CommandGroup | None) -> tuple[Any, Any]:
    """The system call that makes a process, a number and two arguments; and the memory to which they point."""
    if group is None or not group.unified:
        return (ctypes.c_long * 3)(CLONE, CLONE_VM | signal.SIGCHLD, 0), None
    arguments = (ctypes.c_uint64 * 11)()  # struct clone_args: clone(2)
    arguments[0], arguments[4], arguments[10] = CLONE_VM | CLONE_INTO_CGROUP, signal.SIGCHLD, group.fd
    return (ctypes.c_long * 3)(CLONE3, ctypes.addressof(arguments), ctypes.sizeof(arguments)), arguments


class GroupThread:
    """A thread in a group of version 1: the processes that it makes begin there, without being moved.

    To move each would take milliseconds on a machine on which others start processes. The memory of this process
    belongs to the group of its first thread.
    """

    def __init__(self, group: CommandGroup) -> None:
        if sys.version_info >= (3, 12):  # what forks beside the thread uses no lock that it might hold
            import warnings

            warnings.simplefilter("ignore", DeprecationWarning)
        self.task: Callable[[], int] = lambda: 0
        self.result = 0
        self.failure: OSError | None = None
        self.begin, self.end = _thread.allocate_lock(), _thread.allocate_lock()
        self.begin.acquire()
        self.end.acquire()
        before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        _thread.start_new_thread(self.serve, (group,))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.end.acquire()
        if self.failure is not None:
            raise self.failure

    def serve(self, group: CommandGroup) -> None:
        try:
            group.join()
        except OSError as error:
            self.failure = error
        self.end.release()
        while self.failure is None:
            self.begin.acquire()
            self.result = self.task()
            self.end.release()

    def run(self, task: Callable[[], int]) -> int:
        """The result of `task`, which must not raise."""
        self.task = task
        self.begin.release()
        self.end.acquire()
        return self.result
