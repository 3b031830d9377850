"""System calls that commands may make: one seccomp filter, which the executor installs for itself and its descendants.

Nothing inside can remove it, setuid programs included. It is written here and not by a library: libseccomp is not in
images, and a filter from another machine would not fit. `docs/system-calls.md` says why each call is refused.
Sources: seccomp(2), linux/filter.h, the tables of calls in the kernel's source; a test compares the numbers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import TYPE_CHECKING

from .groups import CLONE3
from .kernel import MACHINES, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, libc

if TYPE_CHECKING:
    from typing import Any

    from .groups import CommandGroup

    Program = list[tuple[int, int, int, int]]

# Name, number on x86-64, number on ARM64 (- where it has none), by the error that refuses them. ENOSYS is what a kernel
# says that was built without the call: programs know what to do then.
REFUSED = {
    errno.EPERM: """
        setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, swapon 167 224, swapoff 168 225,
        reboot 169 142, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273,
        delete_module 176 106, acct 163 89, quotactl 179 60, quotactl_fd 443 443, settimeofday 164 170,
        clock_settime 227 112, syslog 103 116, vhangup 153 58, iopl 172 -, ioperm 173 -, open_by_handle_at 304 265,
        name_to_handle_at 303 264, pidfd_getfd 438 438""",
    errno.ENOSYS: """
        clone3 435 435, open_tree 428 428, open_tree_attr 467 467, move_mount 429 429, fsopen 430 430,
        fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, add_key 248 217,
        request_key 249 218, keyctl 250 219, io_uring_setup 425 425, io_uring_enter 426 426,
        io_uring_register 427 427, userfaultfd 323 282, bpf 321 280, perf_event_open 298 241,
        fanotify_init 300 262, fanotify_mark 301 263, mincore 27 232, cachestat 451 451, kcmp 312 272,
        lookup_dcookie 212 18, modify_ldt 154 -, ustat 136 -, sysfs 139 -, uselib 134 -, _sysctl 156 -""",
}
# Refused with some arguments only.
FILTERED = """
    socket 41 198, socketpair 53 199, clone 56 220, unshare 272 97, ioctl 16 29, fcntl 72 25, personality 135 92,
    preadv2 327 286, prlimit64 302 261, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
    sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30, prctl 157 167, setrlimit 160 164"""
IGNORED = "chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, setgroups 116 159"
"""Succeed without effect for a root who is the only user of his namespace: packages are for several."""
LATER = 470
"""The first number of calls that this table does not know, on both machines (Linux 6.18)."""
NAMESPACES = 0x7E020000
"""CLONE_NEWUSER, -NEWNS, -NEWPID, -NEWNET, -NEWIPC, -NEWUTS and -NEWCGROUP."""
FAMILIES, NETLINK = (1, 2, 10), 16
"""AF_UNIX, AF_INET, AF_INET6; AF_NETLINK for NETLINK_ROUTE only, with which programs list the interfaces."""
PROTOCOLS = (33, 115, 132, 136, 256, 262)
"""Of the internet: DCCP, L2TP, SCTP, UDP-Lite, SMC and MPTCP."""
TERMINAL_REQUESTS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX, TIOCSETD."""
FILE_COMMANDS = (1024, 1026, 1040)
"""F_SETLEASE, F_NOTIFY, F_SETDELEG."""
PERSONALITIES = 0x40000 | 0x20000 | 0x8
"""ADDR_NO_RANDOMIZE, with which debuggers start programs; UNAME26 and PER_LINUX32, which change names only."""

RLIMIT_CORE = 4

_LOAD, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_ALLOW: Program = [(_RETURN, 0, 0, 0x7FFF0000)]


def _refuse(error: int) -> Program:
    return [(_RETURN, 0, 0, 0x00050000 | error)]


def _when(argument: int, test: int, value: int, then: Program) -> Program:
    """`then` if the lower half of an argument passes: the kernel reads no more of those that are tested here."""
    return [(_LOAD, 0, 0, 16 + 8 * argument), (test, 0, len(then), value), *then]


def call_numbers(text: str, machine: int) -> dict[str, int]:
    """Name -> number on a machine of `MACHINES`."""
    rows = (row.split() for row in text.split(","))
    return {row[0]: int(row[1 + machine]) for row in rows if row[1 + machine] != "-"}


def _filtered_calls(own_pid: int) -> dict[str, Program]:
    """What decides about the calls of `FILTERED`. Each part falls through to the next, and the last allows."""
    invalid, denied = _refuse(errno.EINVAL), _refuse(errno.EPERM)
    no_protocol = _refuse(errno.EPROTONOSUPPORT)
    internet = [step for protocol in PROTOCOLS for step in _when(2, _EQUAL, protocol, no_protocol)] + _ALLOW
    route = _when(2, _EQUAL, 0, _ALLOW) + no_protocol
    sockets = _when(0, _EQUAL, NETLINK, route) + _when(0, _EQUAL, FAMILIES[0], _ALLOW)
    for family in FAMILIES[1:]:
        sockets += _when(0, _EQUAL, family, internet)
    sockets += _refuse(errno.EAFNOSUPPORT)
    calls = {
        "socket": sockets,
        "socketpair": sockets,
        "clone": _when(0, _ANY_BIT, NAMESPACES, denied),
        "unshare": _when(0, _ANY_BIT, NAMESPACES | 0x80, denied),  # CLONE_NEWTIME; for `clone` part of a signal
        "ioctl": [step for request in TERMINAL_REQUESTS for step in _when(1, _EQUAL, request, denied)],
        "fcntl": [step for command in FILE_COMMANDS for step in _when(1, _EQUAL, command, invalid)],
        "personality": _when(0, _EQUAL, 0xFFFFFFFF, _ALLOW) + _when(0, _ANY_BIT, ~PERSONALITIES & 0xFFFFFFFF, denied),
        "preadv2": _when(5, _ANY_BIT, 8, _refuse(errno.EOPNOTSUPP)),  # RWF_NOWAIT
        # A shell adopts the orphans of its command, so that a time limit finds them: no program may give that up.
        "prctl": _when(0, _EQUAL, PR_SET_CHILD_SUBREAPER, _when(1, _EQUAL, 0, denied)),
    }
    # Commands run as the same user: `prlimit --pid 1 --cpu=1` would kill the executor and `--nofile=9` disable it.
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        calls[name] = _when(0, _EQUAL, own_pid, denied)
    # At 1, no core is piped to the machine's handler, and at 0 it is (core(5)): nothing changes the limit.
    accepted = _refuse(0)
    calls["setrlimit"] = _when(0, _EQUAL, RLIMIT_CORE, accepted)
    of_core = [step for half in (32, 36) for step in ((_LOAD, 0, 0, half), (_EQUAL, 1, 0, 0), *accepted)]
    calls["prlimit64"] += _when(1, _EQUAL, RLIMIT_CORE, of_core)  # if there is a new limit
    for name, of_user in (("setpriority", 2), ("ioprio_set", 3)):  # of a process, or of all processes of a user
        calls[name] = _when(1, _EQUAL, own_pid, denied) + _when(0, _EQUAL, of_user, denied)
    return {name: rule + _ALLOW for name, rule in calls.items()}


def _search(calls: list[tuple[int, Program]]) -> Program:
    """A binary search for the number of the call, which is loaded. `calls` are sorted."""
    if len(calls) <= 2:
        steps = [[(_EQUAL, 0, len(rule), number), *rule] for number, rule in calls]
        return [*(step for part in steps for step in part), *_ALLOW]
    middle = len(calls) // 2
    low, high = _search(calls[:middle]), _search(calls[middle:])
    return [(_AT_LEAST, 0, 1, calls[middle][0]), (_JUMP, 0, 0, len(low)), *low, *high]


def filter_program(
    machine: str, own_pid: int, traceable: bool = True, *, clone3: bool = False, only_root: bool = False
) -> Program:
    """The filter as steps `(code, jump if true, jump if false, value)`; `machine` is one of `MACHINES`.

    Args:
        own_pid: the executor, whose limits and priority nothing inside may change.
        traceable: whether `ptrace` is allowed. Before Linux 4.8, it could change a call after the filter had seen it.
        clone3: whether it is allowed; its flags are where no filter reads them.
        only_root: whether the calls of `IGNORED` succeed.
    """
    architecture, column = MACHINES[machine]
    rules = {}
    for error, text in REFUSED.items():
        rules.update(dict.fromkeys(call_numbers(text, column).values(), _refuse(error)))
    by_name = _filtered_calls(own_pid)
    rules.update({number: by_name[name] for name, number in call_numbers(FILTERED, column).items()})
    if only_root:
        rules.update(dict.fromkeys(call_numbers(IGNORED, column).values(), _refuse(0)))
    if clone3:
        del rules[CLONE3]
    if not traceable:
        rules[(101, 117)[column]] = _refuse(errno.EPERM)
    # 32-bit programs and the x32 ABI have other numbers. Both are refused entirely, and so are calls of later kernels.
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), *_refuse(errno.ENOSYS), (_LOAD, 0, 0, 0)]
    program += [(_AT_LEAST, 0, 1, LATER), *_refuse(errno.ENOSYS)]
    return program + _search(sorted(rules.items()))


def refuse_system_calls(group: CommandGroup | None = None) -> str:
    """Install the filter for this process and all that it starts. Returns why there is none, or an empty text.

    Processes begin in a group of version 2 by `clone3`. Then this process keeps the call, and each that it starts
    installs `group.filter`, which refuses it.

    Raises:
        OSError: the kernel refuses a filter.
    """
    machine, release = os.uname().machine, os.uname().release
    if machine not in MACHINES:
        return "there is no list of system calls for %s" % machine
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    clone3 = group is not None and group.unified
    traceable = version >= (4, 8)
    program = filter_program(machine, os.getpid(), traceable, clone3=clone3, only_root=_is_only_root())
    install(_loadable(program))
    if group is not None and clone3:
        group.filter = _loadable([(_LOAD, 0, 0, 0), (_EQUAL, 0, 1, CLONE3), *_refuse(errno.ENOSYS), *_ALLOW])
    return ""


def _is_only_root() -> bool:
    """Whether this is user 0, and its user namespace has no other."""
    with open("/proc/self/uid_map") as file:
        return [line.split()[::2] for line in file] == [["0", "1"]]


def install(loadable: Any) -> None:
    """Install a filter. Raises `OSError`."""
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, 2, loadable, 0, 0):
        number = ctypes.get_errno()
        message = "the kernel refuses a filter of system calls (seccomp); use one with CONFIG_SECCOMP_FILTER"
        raise OSError(number, message)


def _loadable(steps: Program) -> Any:
    """A `struct sock_fprog`, followed by its steps."""
    size = struct.calcsize("HxxxxxxP")
    buffer = ctypes.create_string_buffer(size + 8 * len(steps))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer.raw = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer) + size) + code
    return buffer
