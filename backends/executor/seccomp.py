"""A filter of system calls for everything inside."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .kernel import PR_SET_SECCOMP, libc


def lock_own_settings() -> None:
    """Deny changes to the limits and the priority of PID 1, to this process and its descendants.

    Commands run as the same user: `prlimit --pid 1 --cpu=1` would kill the executor and `--nofile=9` would disable it.
    This is a seccomp filter (seccomp(2), linux/filter.h). It is not installed on other architectures, nor where the
    kernel requires no_new_privs, which bubblewrap sets, and that is not set.
    """
    number, first, second = 0, 16, 24  # offsets in struct seccomp_data: system call, first and second argument
    known = {
        "x86_64": (0xC000003E, (302, 203, 144, 142, 314), 141, 251),
        "aarch64": (0xC00000B7, (261, 122, 119, 118, 274), 140, 30),
    }.get(os.uname().machine)
    if known is None:
        return
    # prlimit64, sched_setaffinity, _setscheduler, _setparam and _setattr; setpriority; ioprio_set
    machine, with_pid, setpriority, ioprio_set = known
    rules = [(call, first, 1) for call in with_pid]
    for call, of_user in ((setpriority, 2), (ioprio_set, 3)):  # of a process, or of all processes of a user
        rules += [(call, second, 1), (call, first, of_user)]

    load, equal, at_least, done = 0x20, 0x15, 0x35, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    # 32-bit programs and the x32 ABI have other numbers for these calls: both are denied entirely.
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (done, 0, 0, unknown)]
    program += [(load, 0, 0, number), (at_least, 0, 1, 0x40000000), (done, 0, 0, unknown)]
    for call, argument, value in rules:
        program += [(load, 0, 0, number), (equal, 0, 3, call), (load, 0, 0, argument), (equal, 0, 1, value)]
        program += [(done, 0, 0, refuse)]
    program += [(done, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    pointer = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(pointer), 0, 0)
