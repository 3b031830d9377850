"""The process that a sandbox belongs to, so that any other process can tell later whether it is an orphan.

Process ids are used again. Together with the boot of the machine and the start time of the process they are unique.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

ID_PREFIX = "lachesis-"


def new_id() -> str:
    """A name for a sandbox, chosen before it is created, so that its remains can be found after a crash."""
    return ID_PREFIX + secrets.token_hex(8)


def this_owner() -> str:
    """The running process: `BOOT.PID.START`."""
    return owner_of(os.getpid())


def owner_of(pid: int) -> str:
    """The process that has this number now, as `this_owner` names itself. `is_gone` if there is none."""
    return f"{_boot()}.{pid}.{start_time(pid)}"


def is_gone(owner: str) -> bool:
    """Whether this process has ended. False for a process on another machine."""
    try:
        boot, pid, start = owner.split(".")
        return boot == _boot() and (start == "" or start_time(int(pid)) != start)
    except ValueError:
        return False


def this_machine() -> str:
    """Identifies this machine across boots; differs between clones of one machine."""
    try:
        number = Path("/etc/machine-id").read_text().strip()
    except OSError:
        number = ""
    return f"{os.uname().nodename}/{number}"


def is_of_this_boot(owner: str) -> bool:
    """Whether this process was started since the last boot of this machine, in any of its containers."""
    return owner.partition("-")[0] == _boot().partition("-")[0]


def _boot() -> str:
    # The PID namespace tells containers of one machine apart: they do not see each other's processes.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot[:16]}-{namespace}"


def start_time(pid: int) -> str:
    """Clock ticks from boot to the start of the process; empty if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
