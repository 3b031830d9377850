"""Workers as jobs of Slurm: one array for all that start together."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from backends.errors import BackendError
from lachesis_pools.engines.engine import WorkerCommand
from lachesis_pools.places import folder
from lachesis_pools.wire import TOKEN

_LIVING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING"}


class SlurmEngine:
    """Workers that `sbatch` places."""

    name = "slurm"

    def __init__(self, worker: WorkerCommand, *, sbatch: str = "", logs: str = "") -> None:
        """
        Args:
            sbatch: more of its options, such as `--partition=cpu --cpus-per-task=16 --time=08:00:00`.
            logs: a folder that all nodes see, for the output of workers. Default: beside the state of pools.
        """
        self._worker, self._sbatch = worker, sbatch.split()
        self._logs = Path(logs) if logs else folder() / "logs"
        self._jobs: dict[str, str] = {}
        """The job of each worker, with its place in the array."""

    async def start(self, base: str, count: int) -> str:
        """See `WorkerEngine.start`."""
        self._logs.mkdir(parents=True, exist_ok=True)
        # The key goes with the environment of the job, which other users cannot read.
        script = f"#!/bin/sh\nexec {self._worker.line(f'{base}.$SLURM_ARRAY_TASK_ID')}\n"
        said = await _run(
            "sbatch",
            *("--parsable", f"--job-name={base}", f"--array=1-{count}", "--ntasks=1", "--no-requeue"),
            *("--open-mode=append", f"--output={self._logs}/{base}.%a", *self._sbatch),
            stdin=script,
            env={TOKEN: self._worker.token},
        )
        job = said.strip().partition(";")[0]
        if not re.fullmatch(r"\d+", job):
            raise BackendError(f"sbatch gave no number of a job: {said[:300]!r}")
        self._jobs |= {f"{base}.{at}": f"{job}_{at}" for at in range(1, count + 1)}
        return job

    async def ended(self, names: Collection[str]) -> Mapping[str, str]:
        """See `WorkerEngine.ended`."""
        mine = {name: self._jobs[name] for name in names if name in self._jobs}
        if not mine:
            return {}
        said = await _run("squeue", "--noheader", "--array", "--format=%i %T", "--me")
        states = dict(line.split() for line in said.splitlines() if line.strip())
        return {
            name: f"its job {job} ended: {self._last_words(name) or states.get(job, 'it is in no queue')}"
            for name, job in mine.items()
            if states.get(job) not in _LIVING
        }

    def _last_words(self, name: str) -> str:
        base, _, at = name.rpartition(".")
        try:
            lines = (self._logs / f"{base}.{at}").read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:500] if lines else ""

    async def stop(self, names: Collection[str]) -> None:
        """See `WorkerEngine.stop`."""
        jobs = [self._jobs.pop(name) for name in names if name in self._jobs]
        if jobs:
            await _run("scancel", "--quiet", *jobs)

    async def reap(self, base: str, note: str) -> None:
        """See `WorkerEngine.reap`: by the name of the job, as sbatch may have been accepted without an answer."""
        await _run("scancel", "--quiet", "--me", f"--jobname={base}")
        for _ in range(300):
            if not (await _run("squeue", "--noheader", "--me", f"--name={base}", "--format=%i")).strip():
                return
            await asyncio.sleep(0.1)
        raise BackendError(f"jobs of the name {base} do not end. Next step: squeue --name={base}")

    async def close(self) -> None: ...


async def _run(*command: str, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
    """The output of a command of Slurm. Raises `BackendError`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
    except OSError as error:
        raise BackendError(f"{command[0]} cannot be run: {error}. Next step: start the pool where Slurm is") from error
    said, failed = await process.communicate(stdin.encode())
    if process.returncode:
        raise BackendError(f"{command[0]} failed: {failed.decode(errors='replace').strip()[:500]}")
    return said.decode(errors="replace")
