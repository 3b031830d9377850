"""Runs the functions of a family inside, and prints a JSON object with `[verdict, detail]` for each."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

SECONDS = 10.0
"""The time of one attack."""

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class WallFell(Exception):
    """A wall fell: what was reached."""


class NothingToAttack(Exception):
    """The attack means nothing here: why."""


def syscall(name: str, *arguments: Any) -> int:
    """A system call by its name. Raises `OSError` as the kernel refuses it."""
    machine = os.uname().machine
    if machine not in ("x86_64", "aarch64"):
        raise NothingToAttack("the numbers of system calls are not known for " + machine)
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = libc.syscall(ctypes.c_long(NUMBERS[name][machine == "aarch64"]), *wide)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def reached(name: str, *arguments: Any) -> None:
    """Fails where the kernel looks at these (impossible) arguments before, or instead of, refusing the call."""
    try:
        syscall(name, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise WallFell("%s is let through (%s)" % (name, error.strerror)) from None
    raise WallFell("%s succeeded" % name)


NUMBERS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "setns": (308, 268),
    "unshare": (272, 97),
    "cachestat": (451, 451),
    "clone3": (435, 435),
    "mincore": (27, 232),
    "modify_ldt": (154, -1),
    "personality": (135, 92),
    "quotactl": (179, 60),
    "request_key": (249, 218),
    "settimeofday": (164, 170),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "userfaultfd": (323, 282),
}
"""Numbers of system calls: on x86_64, and on aarch64."""


def run(attack: Callable[[], None]) -> list[str]:
    """The verdict on one attack and its detail."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _answer(attack, theirs)
    os.close(theirs)
    answer = b""
    try:
        while select.select([ours], [], [], SECONDS)[0]:
            part = os.read(ours, 1 << 16)
            if not part:
                break
            answer += part
        else:
            return ["error", "no answer within %g s" % SECONDS]
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not answer:
        return ["held", "killed by signal %d" % (status & 127)]
    found: list[str] = json.loads(answer)
    return found


def _answer(attack: Callable[[], None], fd: int) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    try:
        attack()
        verdict = ["held", ""]
    except WallFell as error:
        verdict = ["fell", str(error)]
    except NothingToAttack as error:
        verdict = ["not applicable", str(error)]
    except OSError as error:
        verdict = ["held", error.strerror or str(error)]
    except BaseException:
        verdict = ["error", traceback.format_exc()[-2000:]]
    os.write(fd, json.dumps(verdict).encode())
    os._exit(0)


def main(attacks: dict[str, Callable[[], None]], wanted: list[str]) -> None:
    found = {name: run(attacks[name]) for name in wanted}
    sys.stdout.write(json.dumps(found) + "\n")
