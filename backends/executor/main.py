"""The start of the executor: it secures its process, then serves; at its end it kills what it started."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import struct
import sys

from .executor import Executor
from .kernel import FILES, PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, PR_SET_SECCOMP, libc
from .processes import kill_tree
from .programs import find_bash
from .relay import relay


def main() -> None:
    options: dict[str, str] = {}
    folders = sys.argv[1:]
    while folders and folders[0] in ("--dial", "--listen", "--relay", "--bash"):
        options[folders[0]] = folders[1]
        del folders[:2]
    if "--relay" in options:
        relay("\0" + options["--relay"].lstrip("@"))
        return
    is_init = os.getpid() == 1
    stream_in, stream_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.set_inheritable(2, False)  # every child gets its own
    oom = None
    # Opened now: a process that is not dumpable cannot open its own file. The file of PID 1 may be covered by a mount.
    with contextlib.suppress(OSError, ValueError):
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        value = b"%d" % int(os.read(fd, 16))
        os.pwrite(fd, value, 0)
        oom = (fd, value)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (FILES[1], FILES[1])
    )  # children that outlive their commands hold two pipes each
    keyctl = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
    if keyctl is not None:
        libc.syscall(keyctl, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING: an empty keyring in place of the owner's
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The kernel ignores signals from inside to a PID 1 without handlers. Elsewhere SIGTERM ends the executor tidily.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):  # children inherit ignored signals, but no handlers
        signal.signal(number, lambda *_: None)
    if is_init:
        lock_own_settings()
    else:
        signal.signal(signal.SIGTERM, lambda *_: None)
    executor = Executor(find_bash(options.get("--bash")), oom)
    if "--dial" in options or "--listen" in options:
        os.close(stream_in)
        os.close(stream_out)
    else:
        executor.session.use_stream(stream_in, stream_out)
        if not is_init:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if "--listen" in options:
        executor.session.use_listener(options["--listen"])
    elif "--dial" in options:
        executor.session.use_dial(options["--dial"])
    try:
        executor.loop.run()
        executor.session.say_goodbye()
    finally:
        if not is_init:  # the kernel does this at the end of a PID namespace
            kill_tree(os.getpid())
            import shutil

            for path in folders:
                shutil.rmtree(path, ignore_errors=True)


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


if __name__ == "__main__":
    main()
