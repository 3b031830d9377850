"""The job of Nomad that a worker is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from backends.errors import BackendError
from lachesis_pools.engines.engine import WorkerCommand
from lachesis_pools.wire import TOKEN

FOLDER = "nomad/jobs/"
"""Of variables: the one at `nomad/jobs/ID` can be read by the tasks of the job ID, without any policy."""
_DRIVERS = {"docker": True, "singularity": True, "exec": False, "raw_exec": False}
"""With an image, or without one."""
KILL = 30
"""Seconds that a worker has to end. Nodes allow no more, if `max_kill_timeout` is not set there."""


def job_id(name: str) -> str:
    """Of a worker, or what the IDs of a base begin with: paths of variables have no points."""
    return re.sub(r"[^a-zA-Z0-9~_-]", "_", name)


def number(option: str, given: float | str) -> float:
    """What an option says."""
    try:
        return float(given)
    except ValueError:
        step = f"Next step: --engine-option {option}=500"
        raise BackendError(f"engine 'nomad': {option}={given!r} is no number. {step}") from None


class WorkerJobs:
    """Makes the jobs of workers.

    Args:
        driver: `docker`, `singularity` (`apptainer exec`, by raw_exec), `exec` or `raw_exec`.
        image: for the first two, with lachesis-pools in it; for `singularity` a SIF.
        python: the interpreter. Default: `python3` of the image; without one, that of the pool.
        cpu: MHz that Nomad reserves for each worker.
        memory: MB that it reserves.
        privileged: whether containers of docker are: sandboxes in them make namespaces.
        datacenters: with commas between them; `*` needs Nomad 1.5.
        job: a file (JSON or YAML, as of /v1/jobs) that is merged over the job: constraints, volumes, privileges.
    """

    def __init__(
        self,
        worker: WorkerCommand,
        *,
        driver: str = "docker",
        image: str = "",
        python: str = "",
        cpu: int | str = 500,
        memory: int | str = 512,
        privileged: bool | str = False,
        datacenters: str | Sequence[str] = "*",
        job: str | Mapping[str, Any] = "",
    ) -> None:
        if driver not in _DRIVERS:
            raise BackendError(f"engine 'nomad' has no driver {driver!r}. Next step: one of {', '.join(_DRIVERS)}")
        if bool(image) != _DRIVERS[driver]:
            lack, step = ("has no", "driver=docker") if image else ("needs an", "image=NAME, with lachesis-pools in it")
            raise BackendError(f"engine 'nomad': driver {driver} {lack} image. Next step: --engine-option {step}")
        self._worker, self._driver, self._image = worker, driver, image
        self._python = python or ("python3" if image else worker.python)
        self._resources = {"CPU": int(number("cpu", cpu)), "MemoryMB": int(number("memory", memory))}
        self._privileged = str(privileged).lower() == "true"
        self._datacenters = datacenters.split(",") if isinstance(datacenters, str) else [*datacenters]
        self._over = _read(job) if job else {}

    def made(self, base: str, name: str) -> dict[str, Any]:
        """The job of the worker `name`."""
        group = {
            "Name": "worker",
            "Count": 1,
            "RestartPolicy": {"Attempts": 0, "Mode": "fail"},
            "ReschedulePolicy": {"Attempts": 0, "Unlimited": False},
            "Disconnect": {"Replace": False},  # since 1.8; an older Nomad places again what was on a lost node
            "Tasks": [self._task(name)],
        }
        ours = {
            "ID": job_id(name),
            "Name": name,
            "Type": "batch",
            "Datacenters": self._datacenters,
            "Meta": {"lachesis_pool_base": base},
            "TaskGroups": [group],
        }
        made: dict[str, Any] = _merged(ours, self._over)
        task = made["TaskGroups"][0]["Tasks"][0]
        task["Templates"] = [*(task.get("Templates") or []), _key_of(job_id(name))]
        return made

    def _task(self, name: str) -> dict[str, Any]:
        arguments, driver = self._worker.arguments(name)[1:], self._driver
        config: dict[str, Any] = {"command": self._python, "args": arguments}
        if driver == "docker":  # the image may have another entry point; init reaps what sandboxes leave
            config = {"image": self._image, "entrypoint": [self._python], "args": arguments, "init": True}
            config |= {"privileged": True} if self._privileged else {}
        elif driver == "singularity":
            driver = "raw_exec"
            config = {"command": "apptainer", "args": ["exec", self._image, self._python, *arguments]}
        ends = {"KillSignal": "SIGTERM", "KillTimeout": KILL * 10**9}
        return {"Name": "worker", "Driver": driver, "Config": config, "Resources": self._resources, **ends}


def _key_of(job: str) -> dict[str, Any]:
    """The template that gives the key to a worker.

    A worker has to live on while the servers are away, and when the variable is deleted: so it is rendered once (since
    Nomad 1.10), and a change does nothing.
    """
    text = f'{{{{ with nomadVar "{FOLDER}{job}" }}}}{TOKEN}={{{{ .key.Value | toJSON }}}}{{{{ end }}}}\n'
    return {"EmbeddedTmpl": text, "DestPath": "secrets/pool.env", "Envvars": True, "ChangeMode": "noop", "Once": True}


def _read(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """A job or a part of one."""
    try:
        read = yaml.safe_load(Path(given).expanduser().read_text()) if isinstance(given, str) else given
        return dict(read.get("Job", read))
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        step = "Next step: job=FILE, with JSON or YAML as of /v1/jobs"
        raise BackendError(f"engine 'nomad': {given!r} is no job: {error}. {step}") from None


def _merged(ours: Any, theirs: Any) -> Any:
    """Mappings are merged, and groups and tasks by their places; of all else, theirs."""
    if isinstance(ours, dict) and isinstance(theirs, Mapping):
        return ours | {key: _merged(ours.get(key), value) for key, value in theirs.items()}
    if isinstance(ours, list) and isinstance(theirs, list) and isinstance(ours[0], dict):
        return [*map(_merged, ours, theirs), *theirs[len(ours) :]]
    return theirs
