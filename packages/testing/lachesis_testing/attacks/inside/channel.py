"""The control channel: the executor, which is PID 1, as a command of the same user sees it.

These run only in a PID namespace of their own.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from typing import Any

from lachesis_testing.attacks.inside.harness import WallFell, libc, syscall


def _threads() -> list[int]:
    """The numbers of the executor's threads. Each has a folder in /proc, which is not listed."""
    found = []
    for number in range(1, 200):
        try:
            with open("/proc/%d/status" % number) as file:
                if "Tgid:\t1\n" in file:
                    found.append(number)
        except OSError:
            pass
    return found


def descriptors() -> None:
    """open the descriptors of the executor (/proc/PID/fd, pidfd_getfd)"""
    try:
        pidfd = syscall("pidfd_open", 1, 0)
        for number in range(300):
            try:
                syscall("pidfd_getfd", pidfd, number, 0)
            except OSError:
                continue
            raise WallFell("descriptor %d was copied" % number)
    except OSError:
        pass
    for name in os.listdir("/proc/1/fd"):
        for flags in (os.O_RDONLY, os.O_WRONLY):
            try:
                os.open("/proc/1/fd/" + name, flags | os.O_NONBLOCK)
            except OSError:
                continue
            raise WallFell("descriptor %s of the executor opens" % name)


def memory() -> None:
    """read and write the memory of the executor (/proc/PID/mem, process_vm_readv, process_vm_writev)"""
    for name in ("mem", "maps", "environ", "stack", "auxv", "syscall", "pagemap"):
        for flags in (os.O_RDONLY, os.O_WRONLY):
            try:
                fd = os.open("/proc/1/" + name, flags)
                if flags == os.O_RDONLY and name != "mem" and not os.read(fd, 1):
                    continue
            except OSError:
                continue
            raise WallFell("/proc/1/%s opens" % name)
    vector = (ctypes.c_size_t * 2)(0, 1)
    for call in ("process_vm_readv", "process_vm_writev"):
        try:
            syscall(call, 1, vector, 1, vector, 1, 0)
        except PermissionError:
            continue
        except OSError as error:
            if error.errno == 38:
                continue
            raise WallFell("%s is let through (%s)" % (call, error.strerror)) from None


def ptrace() -> None:
    """trace the executor (ptrace attach and seize)"""
    attach, seize, detach = 16, 0x4206, 17
    for request in (seize, attach):
        if libc.ptrace(request, 1, None, None) == 0:
            libc.ptrace(detach, 1, None, None)
            raise WallFell("the executor is traced")


def limits() -> None:
    """change the limits, the priority, the policy and the processors of the executor"""
    idle, done = os.sched_param(0), []
    for number in _threads():
        changes: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
            ("limit of files", resource.prlimit, (number, resource.RLIMIT_NOFILE, (64, 64))),
            ("limit of processor time", resource.prlimit, (number, resource.RLIMIT_CPU, (3600, 3600))),
            ("priority", os.setpriority, (os.PRIO_PROCESS, number, 19)),
            ("priority of the user", os.setpriority, (os.PRIO_USER, 0, 19)),
            ("processors", os.sched_setaffinity, (number, {0})),
            ("policy", os.sched_setscheduler, (number, os.SCHED_IDLE, idle)),
        ]
        for name, change, arguments in changes:
            try:
                change(*arguments)
                done.append(name)
            except OSError:
                pass
    if done:
        raise WallFell("changed: " + ", ".join(done))


def oom_score() -> None:
    """make the kernel prefer the executor when memory runs out (oom_score_adj, autogroup)"""
    for number in _threads():
        for name in ("oom_score_adj", "oom_adj", "autogroup", "timerslack_ns", "task/1/oom_score_adj"):
            try:
                fd = os.open("/proc/%d/%s" % (number, name), os.O_WRONLY)
                os.write(fd, b"15")
            except OSError:
                continue
            raise WallFell("%s of the executor can be written" % name)


def working_folder() -> None:
    """leave through the root or the folder of PID 1 and of the executor (/proc/PID/root, cwd, exe, map_files)"""
    for name in ("root", "cwd", "exe"):
        try:
            os.stat("/proc/1/" + name)
        except OSError:
            continue
        raise WallFell("/proc/1/%s can be followed" % name)
