"""Kernel constants that Python's library does not name, and the numbers of reserved descriptors."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import struct
import termios

REPORT_FD = 211
"""Where shells report their state. The numbers are high and odd: scripts use 3 to 9, 100 and 200."""
GO_FD, COMMAND_FD = 212, 213
"""Where a prewarmed shell waits for its command, and where it reads it."""
STARVED = 112
"""Exit code of an executor that found no memory."""
PF_FORKNOEXEC = 0x40
F_SETPIPE_SZ, F_ADD_SEALS = 1031, 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1, 2, 4, 8
F_SEAL_ALL = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Those whose system calls are filtered: AUDIT_ARCH, and the column of their numbers in `system_calls`."""
libc = ctypes.CDLL(None, use_errno=True)
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""The limit of open files for commands: (soft, hard)."""


def close_all(fds: list[int]) -> None:
    for fd in set(fds):
        os.close(fd)


def unread(fd: int) -> int:
    """The number of bytes that wait in a pipe."""
    count: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    return count
