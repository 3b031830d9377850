"""Starting programs without `fork`: a few system calls in machine code."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from typing import TYPE_CHECKING

from .groups import CommandGroup, SpawnCall
from .kernel import COMMAND_FD, F_ADD_SEALS, F_SEAL_ALL, FILES, GO_FD, REPORT_FD, libc

if TYPE_CHECKING:
    from typing import Any

# Machine code, by machine: its number in an ELF header, START and BECOME.
#
# START is a function of (moves, argv, envp, call), where `call` is a `groups.SpawnCall`. It makes a process that shares
# this one's memory until its execve, and returns its id, or -errno. The new process calls write(tasks, "0", 1); prctl(
# PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter), if there is one; setsid(); write(open(SCORE_FILE), score, 5); dup2() for
# every pair in `moves`, up to a negative number; ioctl(0, TIOCSCTTY, 0), which matters to terminals only;
# execve(argv[0], argv, envp); exit_group(127). Both processes share one stack, so it uses none.
#
# BECOME is a program: prctl(PR_SET_CHILD_SUBREAPER, 1); write(open(SCORE_FILE), SCORE); sigprocmask(SIG_SETMASK, NONE);
# execve(argv[1], argv + 1, envp); if that fails, write(2, MESSAGE) and exit_group(126).
#
# Each line of code is about one system call. The assembly source is in scripts/starter of the repository.
_CODE = {
    "x86_64": (
        62,
        "4989f9 4989ca 4989f0 498b02 498b7a08 498b7210 0f05"
        "4885c0 0f85a5000000 4889d3 498b7a18 498d7220 ba01000000 b801000000 0f05"
        "498b5228 4885d2 7415 bf16000000 be02000000 b89d000000 0f05"
        "85c0 7564 b870000000 0f05"
        "488d3d63000000 be01000800 b802000000 0f05"
        "89c7 498d7230 ba05000000 b801000000 0f05"
        "418b39 418b7104 4983c108 85ff 7809 b821000000 0f05"
        "ebe8 31ff be0e540000 31d2 b810000000 0f05"
        "498b38 4c89c6 4889da b83b000000 0f05"
        "bf7f000000 b8e7000000 0f05 c3",
        "bf24000000 be01000000 31d2 4531d2 4531c0 b89d000000 0f05"
        "488d3d9b000000 be01000800 b802000000 0f05"
        "89c7 488d356a000000 ba04000000 b801000000 0f05"
        "bf02000000 488d354a000000 31d2 41ba08000000 b80e000000 0f05"
        "488b0424 488d742410 488b3e 488d14c6 b83b000000 0f05"
        "bf02000000 488d3524000000 ba18000000 b801000000 0f05"
        "bf7e000000 b8e7000000 0f05",
    ),
    "aarch64": (
        183,
        "e90300aa ea0301aa eb0302aa ec0303aa 880140a9 810940f9 010000d4"
        "800500b5 800d40f9 81810091 220080d2 080880d2 010000d4"
        "821540f9 c20000b4 c00280d2 410080d2 e81480d2 010000d4"
        "a0030035 a81380d2 010000d4"
        "600c8092 a1030010 22008052 0201a072 080780d2 010000d4"
        "81c10091 a20080d2 080880d2 010000d4"
        "2005c128 a000f837 020080d2 080380d2 010000d4"
        "fbffff17 000080d2 c1818ad2 020080d2 a80380d2 010000d4"
        "400140f9 e1030aaa e2030baa a81b80d2 010000d4"
        "e00f80d2 c80b80d2 010000d4 c0035fd6",
        "800480d2 210080d2 020080d2 030080d2 040080d2 e81480d2 010000d4"
        "600c8092 c1040010 22008052 0201a072 080780d2 010000d4"
        "41030010 820080d2 080880d2 010000d4"
        "400080d2 61020010 020080d2 030180d2 e81080d2 010000d4"
        "e20340f9 e1430091 200040f9 220c028b a81b80d2 010000d4"
        "400080d2 41010010 020380d2 080880d2 010000d4"
        "c00f80d2 c80b80d2 010000d4",
    ),
}
_NONE, _SCORE, _MESSAGE, _SCORE_FILE = bytes(8), b"1000", b"bash: cannot be started\n", b"/proc/self/oom_score_adj\0"


OOM_SCORE: bytes | None = None
"""This process' oom_score_adj, set by what starts a prepared executor."""


def own_oom_score() -> bytes:
    """This process' oom_score_adj, if need be read by a child: the file of PID 1 may be covered by a mount."""
    if OOM_SCORE is not None:
        return OOM_SCORE
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "rb") as file:
        return file.read(16).strip()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open("/proc/self/oom_score_adj", "rb") as file:
                os.write(theirs, file.read(16).strip())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    with open(ours, "rb") as file:
        return file.read() or b"0"


class Starter:
    """Starts shells in a short time that does not depend on the size of this process.

    `fork` copies the page tables, and then every page that either process writes to: that takes longer than a short
    command. After `vfork`, and so `posix_spawn`, this process waits for the new one, which processes inside can stop
    for ever. Here neither happens. No Python can run in the new process, so machine code makes its system calls.
    Sources: clone(2), prctl(2), elf(5), memfd_create(2).

    Processes that share memory share their oom_score_adj. Commands may write that of the new process, and so make the
    kernel prefer the executor when memory runs out. Each start therefore restores it, and a process that was stopped
    before its execve is woken (`Shells.settle`).
    """

    def __init__(self, group: CommandGroup | None = None) -> None:
        """Raises `OSError` where it does not work. Shells are then forked."""
        machine, start, become = _CODE.get(os.uname().machine, (0, "", ""))
        if not machine or FILES[0] <= COMMAND_FD:
            raise OSError(errno.ENOSYS, "not on this machine")
        reserved = (REPORT_FD, GO_FD, COMMAND_FD)  # reserve the numbers for what is moved there
        if any(
            os.path.lexists("/proc/self/fd/%d" % fd) for fd in reserved
        ):  # it was inherited, such as a listening socket
            raise OSError(errno.EBUSY, "a descriptor is in use")
        for fd in reserved:
            os.dup2(0, fd, inheritable=False)
        program = bytes.fromhex(become) + _NONE + _SCORE + _MESSAGE + _SCORE_FILE
        base, headers = 0x400000, 64 + 2 * 56
        size = headers + len(program)
        elf = b"\x7fELF" + bytes([2, 1, 1]).ljust(12, b"\0")
        elf += struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, base + headers, 64, 0, 0, 64, 56, 2, 0, 0, 0)
        elf += struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x10000)  # all of it: read, execute
        elf += struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)  # a stack without execute permission
        file = os.memfd_create("starter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        code = (elf + program).ljust(size + -size % 16, b"\0")
        os.write(file, code + bytes.fromhex(start) + _SCORE_FILE)
        fcntl.fcntl(file, F_ADD_SEALS, F_SEAL_ALL)
        self.path = b"/proc/self/fd/%d" % file
        libc.mmap.restype = ctypes.c_void_p
        readable_and_executable, private = 5, 2
        address = libc.mmap(None, ctypes.c_size_t(1 << 12), readable_and_executable, private, file, ctypes.c_long(0))
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "no code can be mapped")
        texts = ctypes.POINTER(ctypes.c_char_p)
        function = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_char_p, texts, texts, ctypes.POINTER(SpawnCall))
        self.function = function(address + len(code))
        score = own_oom_score()
        self.sigprocmask = {62: 14, 183: 135}[machine]
        self.every = ctypes.create_string_buffer(b"\xff" * 128)
        self.before = ctypes.create_string_buffer(128)
        self.kept: dict[int, Any] = {}
        """Memory that a new process may still read, by its id."""
        self.call = SpawnCall(score, group)
        try:
            pid = self.start([b"/dev/null/none"], [], [(0, 2)])
        except OSError as error:
            if not self.call.leave_group():
                raise
            # They stay in the sandbox' group, which has a limit as well.
            os.write(2, os.fsencode("commands have no control group of their own: %s\n" % error))
            pid = self.start([b"/dev/null/none"], [], [(0, 2)])
        status = os.waitpid(pid, 0)[1]
        if not os.WIFEXITED(status) or os.WEXITSTATUS(status) != 126:
            raise OSError(errno.ENOEXEC, "its program does not run")
        self.kept.clear()

    def start(self, arguments: list[bytes], env: list[bytes], moves: list[tuple[int, int]]) -> int:
        """Run a program with the descriptors that `moves` gives it; returns its process id. Raises `OSError`."""
        pairs = struct.pack("%di" % (2 * len(moves) + 1), *(fd for pair in moves for fd in pair), -1)
        argv = (ctypes.c_char_p * (len(arguments) + 2))(self.path, *arguments)
        envp = (ctypes.c_char_p * (len(env) + 1))(*env)
        block, restore = 0, 2
        # A signal handler would use the stack. libc's sigprocmask does not block two signals of its own.
        libc.syscall(self.sigprocmask, block, self.every, self.before, 8)
        pid: int = self.function(pairs, argv, envp, self.call)
        libc.syscall(self.sigprocmask, restore, self.before, None, 8)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        self.kept[pid] = pairs, argv, envp
        return pid
