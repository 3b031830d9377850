"""What keeps the sandboxes of this machine in, and what they lack for the profile `hardened`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from backends.errors import BackendUnavailable
from backends.executor.kernel import MACHINES

from .cgroups import FIELDS, next_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .bubblewrap import Bubblewrap
    from .cgroups import Cgroups

NAMESPACES = "own files, processes, users, IPC and network"
SHARED_KERNEL = "for a kernel of its own: docker with the runtime runsc or kata, or modal"


def isolation(program: str) -> str:
    """The isolation, in one line."""
    filtered = "filtered system calls" if os.uname().machine in MACHINES else "all system calls"
    who = "the kernel's user 0 without capabilities" if os.geteuid() == 0 else "an ordinary user"
    return f"{program}: {NAMESPACES}; {filtered}; {who}; the machine's kernel"


def lacks(available: Cgroups, bwrap: Bubblewrap | None = None) -> list[tuple[str, str]]:
    """What the profile `hardened` lacks here, with the next step; `bwrap` where sandboxes are made by one."""
    found = []
    if os.geteuid() == 0:
        what = "commands are user 0 for the kernel, since root makes the sandboxes"
        found.append((what, "run it as an ordinary user"))
    if bwrap is not None and not bwrap.disable_userns:
        found.append(("bubblewrap cannot forbid user namespaces", "install bubblewrap 0.8 or later"))
    if os.uname().machine not in MACHINES:
        what = f"system calls of {os.uname().machine} are not filtered"
        found.append((what, "use a machine with x86-64 or ARM64"))
    missing = [name for name, controller in FIELDS.items() if controller not in available.parents]
    if missing:
        reasons = {available.refused.get(FIELDS[name], "there is no such cgroup controller") for name in missing}
        what = f"{', '.join(missing)} cannot be limited ({'; '.join(sorted(reasons))})"
        found.append((what, next_step(available)))
    return found


def advice(lacking: Sequence[tuple[str, str]]) -> list[str]:
    """`Availability.better`."""
    return [*(f"{what}: {step}" for what, step in lacking), SHARED_KERNEL]


def require_nothing(where: str, lacking: Sequence[tuple[str, str]]) -> None:
    """Raises `BackendUnavailable` with all that is lacking."""
    if lacking:
        what = "; ".join(what for what, _ in lacking)
        step = "; ".join(step for _, step in lacking)
        raise BackendUnavailable(f"{where} cannot make sandboxes of the profile 'hardened': {what}. Next step: {step}")
