"""Mounts over /proc: the kernel's files that a sandbox must not see, or must not write to."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def bubblewrap_proc() -> list[str]:
    """bubblewrap's arguments for a new /proc in which the executor is PID 1."""
    arguments = ["--proc", "/proc"]
    for source, place in kernel_files():
        arguments += ["--ro-bind" if source == os.devnull else "--ro-bind-try", source, place]
    if os.geteuid() != 0:
        return arguments  # the executor is not dumpable: its files are root's, who is nobody inside
    # With a raised oom_score_adj, the kernel would kill the executor and not a command.
    for name in ("autogroup", "oom_adj", "oom_score_adj"):
        if os.path.exists("/proc/self/" + name):
            arguments += ["--ro-bind", os.devnull, "/proc/1/" + name]
    return [*arguments, "--perms", "0555", "--size", "4096", "--tmpfs", "/proc/1/task", "--remount-ro", "/proc/1/task"]
