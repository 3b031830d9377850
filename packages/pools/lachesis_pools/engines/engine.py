"""The interface of engines, and the ledger of what they have started."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backends.plugins import Registry
from lachesis_pools.places import folder, write_private


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How a worker of a pool is started."""

    url: str
    token: str
    slots: int
    backend: str = "local"
    options: str = "{}"
    warm: bool = True
    profile: str = ""
    spec: str = "{}"
    python: str = sys.executable

    def arguments(self, name: str) -> list[str]:
        """The command line. The key is not in it."""
        words = [self.python, "-m", "lachesis_pools", "worker", "--connect", self.url, "--name", name]
        words += ["--slots", str(self.slots), "--backend", self.backend, "--options", self.options]
        words += ["--profile", self.profile] if self.profile else []
        words += ["--spec", self.spec] if self.spec != "{}" else []
        return [*words, *(["--warm"] if self.warm else [])]

    def line(self, name: str) -> str:
        """The same for a shell; `name` may be an expression of it."""
        quoted = shlex.join(self.arguments("NAME"))
        return quoted.replace("--name NAME", f'--name "{name}"')


class WorkerEngine(Protocol):
    """Starts and ends workers by name."""

    name: str

    async def start(self, base: str, count: int) -> str:
        """Start the workers `base.1` to `base.count`; returns what `reap` needs to find them again.

        Raises:
            BackendError: the engine refuses.
        """
        ...

    async def ended(self, names: Collection[str]) -> Mapping[str, str]:
        """Those that have ended, each with the reason."""
        ...

    async def stop(self, names: Collection[str]) -> None:
        """End workers, whatever they do. Those that are gone are no error."""
        ...

    async def reap(self, base: str, note: str) -> None:
        """End what `start` of an earlier process has started and is still there."""
        ...

    async def close(self) -> None: ...


ENGINES: Registry[type] = Registry(
    "engine",
    "lachesis.engines",
    {
        "kubernetes": "lachesis_pools.engines.kubernetes:KubernetesEngine",
        "modal": "lachesis_pools.engines.modal:ModalEngine",
        "nomad": "lachesis_pools.engines.nomad:NomadEngine",
        "processes": "lachesis_pools.engines.processes:ProcessEngine",
        "ray": "lachesis_pools.engines.ray_actors:RayEngine",
        "slurm": "lachesis_pools.engines.slurm:SlurmEngine",
        "ssh": "lachesis_pools.engines.processes:SshEngine",
    },
    package="lachesis-pools",
)


class StartLedger:
    """What a pool has started, in a file that outlives it."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self._path: Path = folder() / f"{pool}.started"

    def _entries(self) -> dict[str, tuple[str, str]]:
        try:
            found: dict[str, tuple[str, str]] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def write(self, base: str, profile: str, note: str) -> None:
        """Written before a start, without a note, and after it."""
        write_private(self._path, json.dumps({**self._entries(), base: (profile, note)}) + "\n")

    async def reap(self, engines: Mapping[str, WorkerEngine]) -> None:
        """End all that is written here: each by the engine of its profile, which may be another one than then."""
        entries = self._entries()
        if entries and not engines:
            return
        for base, (profile, note) in entries.items():
            await engines.get(profile, next(iter(engines.values()))).reap(base, note)
        self._path.unlink(missing_ok=True)
