"""A running sandbox gets another root: a new disk over sealed ones, between two commands.

What belongs to the sandbox and not to its files stays: /proc, /dev, the runtime and what is read from the machine.
Its first process keeps running, and finds itself at the new root.
"""

from __future__ import annotations

import os
import re
import stat

from .kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNS,
    MNT_DETACH,
    PIVOT_ROOT,
    attach_mount,
    check,
    cloned_mount,
    libc,
)
from .layout import MISPLACED
from .starting import ROOT, kept_disk, make_disk, send_disk

TYPE_CHECKING = False  # importing typing costs start-up time
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

SHARED = "/dev/shm"


def move_root(
    job: dict[str, Any], layers: list[int], users: int, keeper: int, inner: Sequence[int], groups: Sequence[int] = ()
) -> None:
    """Mount a disk over `layers`, and make it the root of a sandbox.

    Args:
        job: `disk`, a `plan.Disk`; `moved`, 1, or -1 to only copy the first layer.
        users: see `starting.make_disk`.
        keeper: a socket that gets the disk.
        inner: its mount namespace; then its IPC namespace, if message queues are to be removed from it.
        groups: joined only before files are copied, as that takes longer than all else.
    """
    disk = job["disk"]
    if job["moved"] < 0:
        join_groups(groups)
        copy_disk(disk, layers.pop(0), users, keeper)
        return
    mount = disk["mount"]
    overlays = [pair for pair in disk["overlays"] if pair[1].startswith("root")]  # all but the runtime
    make_disk(**{**disk, "overlays": overlays, "copied": []}, layers=layers, users=users)
    linked = linked_files(f"/proc/self/fd/{layers[0]}", mount, overlays)
    if linked:
        join_groups(groups)
    for paths in linked:
        join_names(paths)
    root, shared = cloned_mount(f"{mount}/root", recursive=True), cloned_mount(f"{mount}/shm")
    kept = kept_disk(mount, ROOT or users >= 0)
    if inner[1:]:
        remove_queues(inner[1], f"{mount}/empty")
    check(libc.setns(inner[0], CLONE_NEWNS), "entering its mount namespace")
    paths = carried({name[4:] for _, name in overlays})
    before = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    mounts = [(path, cloned_mount(path, recursive=True)) for path in paths]
    attach_mount(root, os.open("/proc", os.O_PATH | os.O_CLOEXEC))  # commands cannot have changed this folder
    os.fchdir(root)
    try:
        for path, copy in mounts:
            try:
                target = place(root, path)
            except OSError as error:
                os.write(2, f"commands have moved {path}: {error.strerror}".encode())
                os._exit(MISPLACED)
            attach_mount(copy, target)
        libc.umount2(os.fsencode(SHARED[1:]), MNT_DETACH)
        attach_mount(shared, place(root, SHARED))
        check(libc.syscall(PIVOT_ROOT, b".", b"."), "changing the root")
    except BaseException:
        libc.umount2(b".", MNT_DETACH)
        raise
    os.fchdir(before)
    check(libc.umount2(b".", MNT_DETACH), "detaching the root of before")
    send_disk(keeper, [*kept, *inner])  # the end of this process takes longer than all of that


def remove_queues(ipc: int, place: str) -> None:
    """Remove the POSIX message queues of an IPC namespace: they outlive processes, and only a mount lists them."""
    check(libc.setns(ipc, CLONE_NEWIPC), "entering its IPC namespace")
    check(libc.mount(b"mqueue", os.fsencode(place), b"mqueue", 0, None), "mounting its message queues")
    for name in os.listdir(place):
        os.unlink(os.path.join(place, name))
    check(libc.umount2(os.fsencode(place), MNT_DETACH), "detaching its message queues")


def copy_disk(disk: dict[str, Any], layer: int, users: int, keeper: int) -> None:
    """Send a copy of a disk's changes, which is a sealed layer itself."""
    mount = disk["mount"]
    make_disk(mount, disk["size"], [], [], [], users=users)
    os.set_inheritable(layer, True)
    source = f"/proc/self/fd/{layer}"
    folders = [name for name in os.listdir(source) if name.startswith(("root", "shm", "upper"))]
    argv = ["/bin/cp", "-a", *[f"{source}/{name}" for name in folders], mount]
    code = os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn(argv[0], argv, {}), 0)[1])
    if code:
        raise OSError(f"cp has failed (exit code {code})")
    send_disk(keeper, kept_disk(mount, ROOT or users >= 0))


def carried(targets: set[str]) -> list[str]:
    """Where in this mount namespace something is mounted that does not belong to the disk, outermost first; without
    what lies below that."""
    found, own = [], set()
    with open("/proc/1/mountinfo", "rb") as file:
        for line in file:
            number, parent, _, _, place, *_ = line.split()
            path = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), place))
            if path == "/" or (parent in own and path in targets):
                own.add(number)
            elif parent in own and path not in found:
                found.append(path)
    return found


def place(root: int, path: str) -> int:
    """A descriptor of what is at `path` below `root`. Commands can have put links in the way: none is followed."""
    fd = os.dup(root)
    for name in path.strip("/").split("/"):
        inner = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        os.close(fd)
        fd = inner
    return fd


def join_groups(groups: Sequence[int]) -> None:
    """What is copied counts as the sandbox' memory."""
    for fd in groups:
        os.write(fd, b"0")


def linked_files(layer: str, mount: str, overlays: list[tuple[str, str]]) -> list[list[str]]:
    """The files that have several names in the newest layer, each with its paths on the new disk."""
    found = []
    changes = {"root": "root", "shm": "shm", **{name: f"upper{number}" for number, (_, name) in enumerate(overlays)}}
    for name, folder in changes.items():
        below = f"{layer}/{folder}"
        if not os.path.isdir(below):
            continue
        names: dict[int, list[str]] = {}
        left = [""]
        while left:
            inner = left.pop()
            with os.scandir(f"{below}/{inner}") as entries:
                for entry in entries:
                    path = f"{inner}/{entry.name}" if inner else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        left.append(path)
                        continue
                    facts = entry.stat(follow_symlinks=False)
                    if facts.st_nlink > 1 and not stat.S_ISCHR(facts.st_mode):  # else what marks removed files
                        names.setdefault(facts.st_ino, []).append(path)
        found += [[f"{mount}/{name}/{path}" for path in paths] for paths in names.values()]
    return found


def join_names(paths: list[str]) -> None:
    """Make a file new, with all of its names: an overlay would give the one that is written to a file of its own."""
    first, *others = paths
    for path in others:
        folder = os.path.dirname(path)
        facts = os.stat(folder)
        os.unlink(path)
        os.link(first, path, follow_symlinks=False)
        os.utime(folder, ns=(facts.st_atime_ns, facts.st_mtime_ns))
