"""The interface of engines, and the ledger of what they have started."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backends.errors import BackendError
from backends.plugins import Registry
from lachesis_pools.places import folder, write_private

_LOG = logging.getLogger(__name__)


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

    def left(self) -> list[str]:
        """Workers of which nobody knows that they have ended."""
        return [*self._entries()]

    def write(self, base: str, engine: str, note: str) -> None:
        """Written before a start, without a note, and after it."""
        write_private(self._path, json.dumps({**self._entries(), base: (engine, note)}) + "\n")

    async def reap(self, engines: Iterable[WorkerEngine]) -> None:
        """End all that is written here, by an engine of the same name. What cannot be ended stays written, with the
        reason in the log: it is tried again by the next start of the pool."""
        known = {engine.name: engine for engine in engines}
        left = {}
        for base, (name, note) in self._entries().items():
            try:
                if name not in known:
                    raise BackendError(f"the pool has no engine {name!r} now")
                await known[name].reap(base, note)
            except BackendError as error:
                _LOG.warning("workers %s may be left: %s", base, error)
                left[base] = (name, note)
        if left:
            write_private(self._path, json.dumps(left) + "\n")
        else:
            self._path.unlink(missing_ok=True)
