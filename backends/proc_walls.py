"""Which of the kernel's own files a sandbox does not see, or cannot write to.

Sent to far machines as well, with `ssh/walls.py`: standard library, Python 3.8 or later.
"""

# ruff: noqa: PTH110
from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # on Python 3.8 this could not be evaluated
    from collections.abc import Iterator


def kernel_files() -> Iterator[tuple[str, str]]:
    """`(what to bind there, place)` for all in /proc that is no process' own, each to be bound read-only.

    What real root starts keeps kernel uid 0, whatever it is called inside: file modes do not stop it, so that it could
    write /proc/sys/kernel/core_pattern. Capabilities it has none; mounts it cannot change.
    """
    for entry in sorted(os.scandir("/proc"), key=lambda entry: entry.name):
        if entry.name.isdigit() or entry.is_symlink() or entry.name == "sysvipc":
            continue  # processes, self, net, and what belongs to the new IPC namespace
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
    # Raised, the executor's oom_score_adj would make the kernel end it in place of a command.
    for name in ("autogroup", "oom_adj", "oom_score_adj"):
        if os.path.exists("/proc/self/" + name):
            arguments += ["--ro-bind", os.devnull, "/proc/1/" + name]
    return [*arguments, "--perms", "0555", "--size", "4096", "--tmpfs", "/proc/1/task", "--remount-ro", "/proc/1/task"]
