"""The limits of sandboxes whose spec names none. A field of 0 means that there is to be none."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from .spec import SandboxSpec

log = logging.getLogger(__name__)

MEMORY = 2 << 30
"""Enough to build and test most projects, and a machine of 64 GiB holds 30 such sandboxes at their limit."""
CPUS = 2.0
"""A command may use a second processor, and a sandbox that spins takes no more from the others."""
DISK = 1 << 30
"""Half of `MEMORY`: where files are in memory, a full disk leaves the other half to commands."""

WATCH = 200
"""Bytes of memory that an epoll watch takes at least."""


def with_defaults(
    spec: SandboxSpec, can: Collection[str], *, processors: float, pids: int, file_systems: int = 1
) -> SandboxSpec:
    """`spec` with a default for each limit that it leaves open, and None for each that is 0.

    Args:
        can: the fields that the backend can enforce here. Others get no default.
        processors: how many the machine has. Where there are no more than `CPUS`, a limit would change nothing.
        pids: the backend's default.
        file_systems: how many in memory, each of `disk_bytes`, count towards the memory.
    """
    memory = max(MEMORY, file_systems * (spec.disk_bytes or 0) + MEMORY // 2)
    defaults = {"cpus": CPUS if processors > CPUS else None, "memory_bytes": memory, "pids": pids}
    changes: dict[str, float | None] = {}
    for field, default in defaults.items():
        value = getattr(spec, field)
        changes[field] = (default if field in can else None) if value is None else value or None
    return replace(spec, **changes)  # type: ignore[arg-type]


class MissingDefaults:
    """Says once that sandboxes lack limits that they have elsewhere."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._said = False

    def warn(self, spec: SandboxSpec, missing: Collection[str], reason: str, step: str) -> None:
        """Warn if `spec` leaves a limit open that is `missing` here."""
        fields = [field for field in missing if getattr(spec, field) is None]
        if fields and not self._said:
            self._said = True
            names = " and ".join(fields)
            text = "backend %r: sandboxes have no limit of %s: %s. Next step: %s"
            log.warning(text, self._backend, names, reason, step)


def countable(settings: str = "/proc/sys/fs") -> list[str]:
    """What one sandbox of this machine could use up for all processes of its user: advice for `Availability.better`."""
    try:
        watches = int(Path(settings, "epoll/max_user_watches").read_text())
    except (OSError, ValueError):
        return []
    if watches * WATCH > MEMORY:
        return []
    what = f"within its memory, a sandbox can use up all {watches} epoll watches of this user"
    return [f"{what}: sysctl -w fs.epoll.max_user_watches=1000000000"]
