"""The properties of a sandbox: those that are asked for, what backends check of them, and those of a listing."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .errors import BackendUnavailable
from .owner import is_gone


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The properties of a sandbox. None is the backend's default, which its documentation names. A backend raises
    `BackendUnavailable` for a field that it cannot enforce. A limit (`cpus`, `memory_bytes`, `pids`, `disk_bytes`) of 0
    is none at all."""

    image: str | None = None
    """The source of the root file system, in the terms of the backend: an image name, a file, a folder."""
    workdir: str | None = None
    """Absolute folder inside, created if missing, in which commands start and relative paths begin."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables to set inside. Variables of the host are never passed on."""
    network: bool = False
    """Whether the network is available. For local backends it is the host's, with loopback and abstract sockets."""
    cpus: float | None = None
    """Limit of processor time for everything inside, in processors."""
    memory_bytes: int | None = None
    """Limit of memory for everything inside. A command that needs more is killed (exit code 137)."""
    pids: int | None = None
    """Limit of processes and threads inside, including those of the backend."""
    disk_bytes: int | None = None
    """Limit of written data. Where files are in memory, they also count towards `memory_bytes`."""
    wall_time: float | None = None
    """Limit in seconds for every command, over any `timeout`, and for every background process."""
    lifetime: float = 3600.0
    """Seconds after which the sandbox ends itself, even while it is in use."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """`run_id` and `task_id`, for listings and error messages."""
    root: bool = False
    """Whether commands appear as user 0 inside, where they would be `agent`, with no more power outside."""

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes", "pids", "disk_bytes", "wall_time", "lifetime"):
            value, unlimited = getattr(self, name), 0 if name not in ("wall_time", "lifetime") else None
            if value is not None and not value > 0 and value != unlimited:
                raise ValueError(f"{name} must be positive, not {value!r}")
        if self.workdir is not None and not self.workdir.startswith("/"):
            raise ValueError(f"workdir must be an absolute path, not {self.workdir!r}")


Profile = Literal["standard", "hardened"]
"""How much a backend insists on. A backend with the option `profile` makes sandboxes of the profile `hardened` with all
walls and limits that it knows, or not at all: what it cannot have is a `BackendUnavailable`."""
HARDENED_LIMITS: Mapping[str, float] = {"cpus": 1.0, "memory_bytes": 2 << 30, "pids": 512}
"""Limits of the profile `hardened` for what a spec leaves open."""


def check_profile(profile: Profile) -> bool:
    """Whether it is `hardened`. Raises `ValueError` for a profile that does not exist."""
    if profile not in ("standard", "hardened"):
        raise ValueError(f"profile is 'standard' or 'hardened', not {profile!r}")
    return profile == "hardened"


def hardened_spec(spec: SandboxSpec, **more: float | str) -> SandboxSpec:
    """`spec` with a value for each limit of `HARDENED_LIMITS`, and those of `more` for other fields that it leaves."""
    wanted: dict[str, Any] = {**HARDENED_LIMITS, **more}
    return replace(spec, **{name: value for name, value in wanted.items() if getattr(spec, name) is None})


def reject_fields(backend: str, spec: SandboxSpec, *fields: str) -> None:
    """Raise `BackendUnavailable` when `spec` sets one of `fields`, which this backend cannot enforce."""
    for name in fields:
        if getattr(spec, name):  # 0 asks for no limit
            raise BackendUnavailable(f"backend {backend!r} cannot enforce {name}. Next step: leave {name} out")


def sandbox_title(id: str, labels: Mapping[str, str]) -> str:
    """The name of a sandbox in messages: its id, and the labels that have a value."""
    shown = ", ".join(f"{key}={value}" for key, value in labels.items() if value)
    return f"sandbox {id}" + (f" ({shown})" if shown else "")


def disk_in_memory(spec: SandboxSpec, *, file_systems: int = 1) -> int:
    """Bytes of each in-memory file system of a sandbox: `disk_bytes`, or a default.

    Written data counts as memory that killing a process does not free. The default is at most half of `memory_bytes`,
    so that filling the disk does not get the executor killed.

    Raises:
        BackendUnavailable: `disk_bytes` does not fit into `memory_bytes`, or is 0.
    """
    if spec.disk_bytes == 0:
        raise BackendUnavailable("disk_bytes of 0 is no limit, and files are in memory here. Next step: name a size")
    if spec.disk_bytes is not None:
        if spec.memory_bytes is not None and file_systems * spec.disk_bytes >= spec.memory_bytes:
            raise BackendUnavailable(
                f"disk_bytes of {spec.disk_bytes} does not fit into memory_bytes of {spec.memory_bytes}: files are "
                f"kept in memory here, in up to {file_systems} places of that size. Next step: raise memory_bytes, "
                "or leave disk_bytes out"
            )
        return spec.disk_bytes
    most = 1 << 30
    return most if spec.memory_bytes is None else max(1 << 20, min(most, spec.memory_bytes // (2 * file_systems)))


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as the technology lists it, of any owner, living or gone."""

    backend: str
    id: str
    """The name, chosen before the sandbox was created: `lachesis-` and random characters."""
    run_id: str
    task_id: str
    owner: str
    """The process that created it; see `owner.py`."""
    orphan: bool
    """Whether the owner is known to be gone. An owner on another machine is never known to be."""
    created: float
    """Unix time in seconds, 0 when unknown."""
    detail: str = ""
    """One line in the terms of the technology: a state, a process id, a folder."""

    @classmethod
    def of(cls, backend: str, id: str, labels: Mapping[str, str], detail: str) -> SandboxInfo:
        """From labels `run_id`, `task_id`, `owner` and `created`, as far as there are any."""
        owner = labels.get("owner", "")
        created = 0.0
        with contextlib.suppress(ValueError):
            created = float(labels.get("created", ""))
        run_id, task_id = labels.get("run_id", ""), labels.get("task_id", "")
        return cls(backend, id, run_id, task_id, owner, is_gone(owner), created, detail)
