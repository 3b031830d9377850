"""System calls that Python has no name for, and what of /proc a sandbox must not change."""

from __future__ import annotations

import ctypes
import os
import stat

TYPE_CHECKING = False  # importing typing costs start-up time
if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
CLONE_PARENT = 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine)
OPEN_TREE, MOVE_MOUNT, OPEN_TREE_CLONE, AT_RECURSIVE, AT_FDCWD, EMPTY_PATHS = 428, 429, 1, 0x8000, -100, 0x44
IPC_LIMITS = {"kernel.shm_rmid_forced": "1", "kernel.msgmni": "64", "kernel.sem": "250 32000 32 128"}
"""Settings of an IPC namespace. System V objects belong to no process, so memory in them outlives those that are killed
for it. Shared memory that no process has attached is therefore removed; the rest takes 3 MiB at most."""
CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 21, 24
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def bind(source: str, place: str, flags: int) -> None:
    """Mount a file, or a folder without what is mounted below it, read-only."""
    for kind in (MS_BIND, MS_BIND | MS_REMOUNT | MS_RDONLY | flags):
        check(libc.mount(os.fsencode(source), os.fsencode(place), None, kind, None), f"mounting {place}")


def cloned_mount(path: str, recursive: bool = False) -> int:
    """A descriptor of a copy of the mount at `path`, which is attached nowhere and lives as long as the descriptor."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    fd = libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(path), flags)
    check(min(fd, 0), f"copying the mount {path}")
    return int(fd)


def attach_mount(mount: int, place: int) -> None:
    """Attach a copy to the file or folder that the descriptor `place` is of."""
    check(libc.syscall(MOVE_MOUNT, mount, b"", place, b"", EMPTY_PATHS), "attaching a mount")


def in_container() -> bool:
    """Whether this process is in a container of Docker or podman."""
    return any(os.path.exists(path) for path in ("/.dockerenv", "/run/.containerenv"))


def holds(capability: int) -> bool:
    """Whether this process has a capability."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def is_real_root() -> bool:
    """Whether this is root of the machine, and of no user namespace below."""
    with open("/proc/self/uid_map") as file:
        return holds(CAP_SYS_ADMIN) and file.read().split() == ["0", "0", str(0xFFFFFFFF)]


def kernel_files() -> Iterator[tuple[str, str]]:
    """`(source, place)` for everything in /proc that belongs to no process, each to be bound read-only.

    A process that real root starts keeps kernel uid 0, whatever its uid inside. File modes do not stop it: it could
    write /proc/sys/kernel/core_pattern. It has no capabilities, so it cannot change mounts.
    """
    for entry in sorted(os.scandir("/proc"), key=lambda entry: entry.name):
        if entry.name.isdigit() or entry.is_symlink() or entry.name == "sysvipc":
            continue  # processes, self, net; sysvipc belongs to the new IPC namespace
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            yield entry.path, entry.path
        elif mode & 0o222 or not mode & 0o004 or entry.name in ("keys", "key-users", "kallsyms"):
            yield os.devnull, entry.path  # bound without device access: cannot be opened


def own_settings() -> Iterator[str]:
    """Files of PID 1 to be covered where the owner is root, or commands are inside. For others, it is not dumpable: its
    files are root's, who is nobody inside. With a raised oom_score_adj, the kernel would kill the executor first."""
    for name in ("autogroup", "oom_adj", "oom_score_adj"):
        if os.path.exists("/proc/self/" + name):
            yield "/proc/1/" + name
