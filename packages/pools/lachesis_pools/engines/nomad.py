"""Workers as batch jobs of Nomad, one each. Nomad restarts and moves none: the pool replaces what is gone.

The key is in a variable of Nomad that only the worker's own job reads: whoever may read jobs does not see it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

from backends.errors import BackendError
from backends.tasks import run_all
from lachesis_pools.engines.engine import WorkerCommand
from lachesis_pools.engines.nomad_client import NomadClient
from lachesis_pools.engines.nomad_job import FOLDER, KILL, WorkerJobs, job_id, number

_END = KILL + 60.0
"""Seconds until it is said that a job does not end."""
_OVER = {"complete", "failed", "lost", "unknown"}  # unknown: its node does not answer, and nothing can be waited for
_AFTERWARDS = {"Killing", "Killed", "Not Restarting"}
"""Events that come with any end, and do not tell why."""


class NomadEngine:
    """Workers that Nomad places."""

    name = "nomad"

    def __init__(
        self,
        worker: WorkerCommand,
        *,
        address: str = "",
        namespace: str = "",
        region: str = "",
        unfit: float | str = 300.0,
        **job: Any,
    ) -> None:
        """
        Args:
            address: see `NomadClient`, also for `namespace` and `region`.
            unfit: seconds that a worker waits for a node while none that is there may run it; one may be added.
            job: see `WorkerJobs`.
        """
        self._jobs, self._key, self._unfit = WorkerJobs(worker, **job), worker.token, number("unfit", unfit)
        self._client = NomadClient(address, namespace=namespace, region=region)
        self._waiting: dict[str, float] = {}  # since when some worker of a base waits for a node

    async def start(self, base: str, count: int) -> str:
        """See `WorkerEngine.start`."""
        await self._client.leader()
        await run_all(self._start(base, f"{base}.{at}") for at in range(1, count + 1))
        return ""

    async def _start(self, base: str, name: str) -> None:
        await self._client.put_variable(FOLDER + job_id(name), {"key": self._key})
        # An equal job of that ID stays as it is, with what it has placed: after a lost answer, it is said again.
        await self._client.register(self._jobs.made(base, name))

    async def ended(self, names: Collection[str]) -> Mapping[str, str]:
        """See `WorkerEngine.ended`."""
        found: dict[str, str] = {}
        since: dict[str, float] = {}
        for base in {name.rpartition(".")[0] for name in names}:
            jobs = {job["ID"]: job for job in await self._client.jobs(f"{job_id(base)}_")}
            states = {name: jobs.get(job_id(name)) for name in names if name.rpartition(".")[0] == base}
            for name, job in states.items():
                if job is None or _is_over(job):
                    found[name] = f"its job {job_id(name)} ended: {await self._reason(job_id(name))}"
            waiting = [name for name, job in states.items() if job is not None and job["Status"] == "pending"]
            if waiting:
                since[base] = self._waiting.get(base, time.monotonic())
                if time.monotonic() - since[base] >= self._unfit:
                    reason = await self._misfit(job_id(waiting[0]))  # their jobs are equal
                    found |= dict.fromkeys(waiting, reason) if reason else {}
        self._waiting = since
        return found

    async def _reason(self, job: str) -> str:
        allocations = await self._client.allocations(job)
        if not allocations:
            return "somebody has removed it"
        last = max(allocations, key=lambda each: int(each["CreateIndex"]))
        where = f"on node {last['NodeName']}"
        for task, state in (last.get("TaskStates") or {}).items():
            told = [event for event in state["Events"] or [] if event["Type"] not in _AFTERWARDS]
            if told and last["ClientStatus"] in ("complete", "failed"):
                words = await self._last_words(last["ID"], task) if told[-1]["Type"] == "Terminated" else ""
                return f"{told[-1]['Type']} {where}: {told[-1]['DisplayMessage']}{words}"
        return f"{last['ClientStatus']} {where}: {last.get('DesiredDescription') or last.get('ClientDescription')}"

    async def _last_words(self, allocation: str, task: str) -> str:
        try:
            lines = (await self._client.logs(allocation, task)).strip().splitlines()
        except BackendError:  # the node is gone, or the token may not read logs
            return ""
        return f": {lines[-1][:500]}" if lines else ""

    async def _misfit(self, job: str) -> str:
        """Why no node that is there may run a job; "" if it waits for room."""
        failed = [each for each in await self._client.evaluations(job) if each.get("FailedTGAllocs")]
        failed.sort(key=lambda each: int(each["ModifyIndex"]))
        for metric in failed[-1]["FailedTGAllocs"].values() if failed else ():
            seen, filters = metric["NodesEvaluated"], metric.get("ConstraintFiltered") or {}
            if metric["NodesFiltered"] >= seen:
                why = ", ".join(f"{what!r} excludes {count}" for what, count in filters.items())
                return f"no node may run it: {seen} ready in its datacenters{why and ', '}{why}"
        return ""

    async def stop(self, names: Collection[str]) -> None:
        """See `WorkerEngine.stop`."""
        await self._end({job_id(name) for name in names})

    async def reap(self, base: str, note: str) -> None:
        """See `WorkerEngine.reap`: by the name, as Nomad may have made what it has not answered for."""
        prefix = f"{job_id(base)}_"
        found = {job["ID"] for job in await self._client.jobs(prefix)}
        found |= {path.removeprefix(FOLDER) for path in await self._client.variables(FOLDER + prefix)}
        await self._end({job for job in found if re.fullmatch(r"\d+", job.removeprefix(prefix))})

    async def _end(self, jobs: Collection[str]) -> None:
        """All of them, whatever is wrong with one."""
        for error in await asyncio.gather(*map(self._end_one, jobs), return_exceptions=True):
            if error is not None:
                raise error

    async def _end_one(self, job: str) -> None:
        await self._client.deregister(job, purge=True)
        await self._client.delete_variable(FOLDER + job)
        end = time.monotonic() + _END  # the answers come before the tasks are dead
        while left := [each for each in await self._client.allocations(job) if each["ClientStatus"] not in _OVER]:
            if time.monotonic() > end:
                step = f"Next step: nomad alloc status {left[0]['ID']}"
                raise BackendError(f"job {job} does not end on node {left[0]['NodeName']}. {step}")
            await asyncio.sleep(0.25)

    async def close(self) -> None:
        await self._client.close()


def _is_over(job: Mapping[str, Any]) -> bool:
    counts = [*((job.get("JobSummary") or {}).get("Summary") or {}).values()]
    alive, gone = (
        sum(group.get(state, 0) for group in counts for state in states)
        for states in (("Queued", "Starting", "Running"), ("Complete", "Failed", "Lost", "Unknown"))
    )
    return bool(job["Status"] == "dead" or (gone and not alive))
