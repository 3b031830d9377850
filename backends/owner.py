"""Which process a sandbox belongs to, so that any other can tell later whether it was left behind.

A process id alone comes round again; with the machine's boot and the process' start time it does not.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

ID_PREFIX = "lachesis-"


def new_id() -> str:
    """A sandbox' name, chosen before it is created: whatever a crash leaves behind can be found by it."""
    return ID_PREFIX + secrets.token_hex(8)


def this_owner() -> str:
    """The running process: `BOOT.PID.START`."""
    return f"{_boot()}.{os.getpid()}.{start_time(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Whether this process has ended. False for one on another machine, of which nothing is known from here."""
    try:
        boot, pid, start = owner.split(".")
        return boot == _boot() and start_time(int(pid)) != start
    except ValueError:
        return False


def this_machine() -> str:
    """The same after the next boot, and another one on another machine, be it cloned from this one."""
    try:
        number = Path("/etc/machine-id").read_text().strip()
    except OSError:
        number = ""
    return f"{os.uname().nodename}/{number}"


def is_of_this_boot(owner: str) -> bool:
    """Whether this process was started since this machine's last boot; in another container of it, too."""
    return owner.partition("-")[0] == _boot().partition("-")[0]


def _boot() -> str:
    # Differs between machines and between boots; a reboot leaves no process behind, and other containers of this
    # machine, whose processes cannot be seen from here, differ in their PID namespace.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return f"{boot[:16]}-{namespace}"


def start_time(pid: int) -> str:
    """Clock ticks from boot to the process' start; empty when there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
