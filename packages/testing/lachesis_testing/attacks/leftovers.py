"""Leftovers: what stays on the machine after a sandbox is closed."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from backends import SandboxSpec

from .attack import AttackTarget, Family, Fell, Held, Verdict, mark
from .probes import host_processes, output, until

leftovers = Family("leftovers")

STUBBORN = (
    "trap '' TERM INT HUP; for i in 1 2 3; do (trap '' TERM; setsid sleep {0} > /dev/null 2>&1 &); done;"
    "mkdir -p a/b/c; : > a/b/c/file; chmod 0 a/b/c a/b a; ln -s / root; mkfifo fifo;"
    "(exec 9> kept; rm kept; exec setsid sleep {0}) > /dev/null 2>&1 & sleep {0}"
)


@leftovers.attack("after close", "leave processes, folders without permissions, cgroups and mounts behind")
async def after_close(target: AttackTarget) -> Verdict:
    name = mark()
    sandbox = await target.backend.create(SandboxSpec(labels={"run_id": f"attack-{name}"}))
    await sandbox.start(STUBBORN.format(name))
    await output(sandbox, "until test -p fifo; do sleep 0.02; done", timeout=60)
    await sandbox.close()
    left: list[str] = []

    def nothing_is_left() -> bool:
        left[:] = [f"process {pid}" for pid in host_processes(name)] + _named(sandbox.id)
        return not left

    await until(nothing_is_left, 10)
    with contextlib.suppress(OSError):
        left += [info.id for info in await target.backend.sandboxes() if info.id == sandbox.id]
    return Fell(f"left: {', '.join(left[:5])}") if left else Held()


def _named(id: str) -> list[str]:
    """Cgroups, mounts, and files of temporary folders with this name."""
    found = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if id in line]
    for top in (Path("/sys/fs/cgroup"), Path(tempfile.gettempdir()), Path("/tmp"), Path("/run"), Path("/dev/shm")):
        with contextlib.suppress(OSError):
            found += [str(path) for depth in range(1, 5) for path in top.glob("/".join("*" * depth)) if id in path.name]
    return list(dict.fromkeys(found))
