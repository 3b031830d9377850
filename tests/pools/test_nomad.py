"""Workers as jobs of Nomad, by a fake agent that runs their processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends import BackendError, SandboxLost, SandboxSpec, create_backend
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_compat.tool_backends.engines import NomadToolBackend, create_tool_backend
from lachesis_pools.engines import nomad_client
from lachesis_pools.engines.engine import WorkerCommand
from lachesis_pools.engines.nomad import NomadEngine
from lachesis_pools.engines.nomad_client import NomadClient
from tests.support.nomad_server import Fault, NomadServer
from tests.support.pool_engine import PoolEngine, pool_engine, workers

KEY = 'a "key" \\ of $more than letters'
BASE = "p-1a2b3c4d-7"


@pytest.fixture
def nomad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NomadServer]:
    with NomadServer(tmp_path / "nomad") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(nomad_client, "_PAUSES", (0.01, 0.02, 0.03))
        yield server


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """A shell script in the place of a worker's interpreter."""

    def write(script: str = "exec sleep 100") -> str:
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


def engine(python: str, **options: Any) -> NomadEngine:
    command = WorkerCommand("http://127.0.0.1:1", KEY, 2, python=python)
    return NomadEngine(command, **{"driver": "raw_exec", **options})


async def until(wanted: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What it says once that is true."""
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < end, "it does not come"
        await asyncio.sleep(0.05)
    return found


async def until_ended(made: NomadEngine, names: list[str]) -> dict[str, str]:
    end = time.monotonic() + 20.0
    while not (found := await made.ended(names)):
        assert time.monotonic() < end, "it does not end"
        await asyncio.sleep(0.05)
    return dict(found)


async def test_a_worker_is_a_job_that_has_its_key_from_a_variable(
    nomad: NomadServer, tmp_path: Path, program: Callable[[str], str]
) -> None:
    drains = f'cd {tmp_path}; trap "sleep 0.3; echo over >>$7; exit" TERM; echo "$LACHESIS_POOL_TOKEN" >$7'
    made = engine(program(f"{drains}; while :; do sleep 0.05; done"))
    assert await made.start(BASE, 2) == ""
    assert sorted(nomad.jobs) == ["p-1a2b3c4d-7_1", "p-1a2b3c4d-7_2"]
    assert {*nomad.variables} == {f"nomad/jobs/{job}" for job in nomad.jobs}
    assert "of $more" not in json.dumps([*nomad.jobs.values()])
    said = [tmp_path / f"{BASE}.{number}" for number in (1, 2)]
    await until(lambda: [each.exists() and each.read_text() for each in said] == [f"{KEY}\n"] * 2)
    assert await made.ended([f"{BASE}.1", f"{BASE}.2"]) == {}
    await made.stop([f"{BASE}.1", f"{BASE}.2", f"{BASE}.3"])
    assert [each.read_text() for each in said] == [f"{KEY}\nover\n"] * 2, "it waits until they have ended"
    assert not nomad.jobs and not nomad.variables and all(each.ended for each in nomad.allocations)
    await made.close()


async def test_a_worker_that_does_not_end_is_killed(nomad: NomadServer, program: Callable[[str], str]) -> None:
    soon = {"TaskGroups": [{"Tasks": [{"KillTimeout": 300_000_000}]}]}
    made = engine(program('trap "" TERM; while :; do sleep 0.05; done'), job=soon)
    await made.start(BASE, 1)
    [placed] = nomad.allocations
    process = await until(lambda: placed.process)
    await asyncio.sleep(0.3)  # until it has its trap
    await made.stop([f"{BASE}.1"])
    assert process.returncode == -signal.SIGKILL and placed.ended
    await made.close()


async def test_what_was_done_without_an_answer_is_not_done_twice(
    nomad: NomadServer, program: Callable[[str], str]
) -> None:
    made = engine(program())
    for call in ("PUT /v1/var", "POST /v1/jobs", "DELETE /v1/job", "DELETE /v1/var"):
        nomad.faults.append(Fault(call, lost=True, times=2))
    await made.start(BASE, 1)
    assert nomad.requests.count("POST /v1/jobs") == 3
    await until(lambda: nomad.of("p-1a2b3c4d-7_1")[0].process)
    assert len(nomad.allocations) == 1
    await made.stop([f"{BASE}.1"])
    assert not nomad.jobs and not nomad.variables
    await made.close()


async def test_a_later_process_finds_what_an_answerless_start_has_left(
    nomad: NomadServer, program: Callable[[str], str]
) -> None:
    first = engine(program())
    nomad.faults.append(Fault("POST /v1/jobs", lost=True, times=4))
    with pytest.raises(BackendError, match=r"POST .*/v1/jobs: .*Next step"):
        await first.start(BASE, 1)
    await first.close()
    second = engine(program())
    for other in ("p-1a2b3c4d-70", "p-1a2b3c4d-7_x", "p-1a2b3c4d"):
        await second.start(other, 1)
    await second.start(BASE, 10)  # 1 and 10 as well
    nomad.variables[f"nomad/jobs/{BASE}_11"] = {"key": "of a job that was never made"}
    await second.reap(BASE, "")
    assert (
        {*nomad.jobs}
        == {"p-1a2b3c4d-70_1", "p-1a2b3c4d-7_x_1", "p-1a2b3c4d_1"}
        == {path.removeprefix("nomad/jobs/") for path in nomad.variables}
    )
    assert {each.job["ID"] for each in nomad.allocations if not each.ended} == {*nomad.jobs}
    await second.reap(BASE, "")  # there is nothing
    await second.close()


async def test_it_says_why_a_worker_has_ended(nomad: NomadServer, program: Callable[[str], str]) -> None:
    names = [f"{BASE}.1"]
    made = engine(program("echo no bubblewrap here >&2; exit 3"))
    await made.start(BASE, 1)
    assert await until_ended(made, names) == {
        f"{BASE}.1": "its job p-1a2b3c4d-7_1 ended: Terminated on node vm: Exit Code: 3: no bubblewrap here"
    }
    nomad.faults.append(Fault("GET /v1/client/fs/logs", status=403, text="Permission denied"))
    assert "Exit Code: 3" in (await made.ended(names))[names[0]]
    assert len(nomad.allocations) == 1, "Nomad has started it again"
    await made.stop(names)
    assert "Exit Code: 3" in (await made.ended(names))[names[0]]
    await made.close()

    nomad.unpullable.add("team/none:1")
    made = engine("", driver="docker", image="team/none:1")
    await made.start("d-1-1", 1)
    [reason] = (await until_ended(made, ["d-1-1.1"])).values()
    assert "Driver Failure on node vm: Failed to pull `team/none:1`" in reason and "manifest unknown" in reason
    await made.stop(["d-1-1.1"])
    await made.start("d-1-2", 1)
    nomad.jobs.clear()
    nomad.allocations.clear()
    assert await made.ended(["d-1-2.1"]) == {"d-1-2.1": "its job d-1-2_1 ended: somebody has removed it"}
    await made.close()


@pytest.mark.parametrize("version", ["1.8", "1.7"])
async def test_a_worker_of_a_lost_node_has_ended(
    nomad: NomadServer, program: Callable[[str], str], version: str
) -> None:
    made = engine(program())
    await made.start(BASE, 1)
    [first] = nomad.allocations
    await until(lambda: first.process)
    assert first.group["Disconnect"] == {"Replace": False}
    first.lose("unknown" if version == "1.8" else "lost")
    if version == "1.8":
        why = "unknown on node vm: alloc is unknown since its node is disconnected"
        assert await made.ended([f"{BASE}.1"]) == {f"{BASE}.1": f"its job p-1a2b3c4d-7_1 ended: {why}"}
        assert len(nomad.allocations) == 1
    else:  # it has placed the worker elsewhere, and stop ends that one
        assert await made.ended([f"{BASE}.1"]) == {} and len(nomad.allocations) == 2
    await made.stop([f"{BASE}.1"])
    assert all(each.ended for each in nomad.allocations) and not nomad.jobs
    await made.close()


async def test_what_waits_for_room_has_not_ended(nomad: NomadServer, program: Callable[[str], str]) -> None:
    made = engine(program(), unfit="0")
    nomad.room = 1
    await made.start(BASE, 2)
    for _ in range(3):
        assert await made.ended([f"{BASE}.1", f"{BASE}.2"]) == {}
    await made.stop([f"{BASE}.1"])  # there is room now
    await until(lambda: nomad.of("p-1a2b3c4d-7_2"))
    await made.stop([f"{BASE}.2"])
    nomad.misfit = "missing drivers"
    await made.start("q-1-1", 2)
    reason = "no node may run it: 1 ready in its datacenters, 'missing drivers' excludes 1"
    assert await made.ended(["q-1-1.1", "q-1-1.2"]) == {"q-1-1.1": reason, "q-1-1.2": reason}
    await made.reap("q-1-1", "")
    patient = engine(program())
    await patient.start("q-1-2", 1)
    assert await patient.ended(["q-1-2.1"]) == {}, "a node may be added"
    await patient.reap("q-1-2", "")
    await made.close()
    await patient.close()


async def test_errors_of_the_agent_name_it_and_the_next_step(
    nomad: NomadServer, program: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(program())
    nomad.faults.append(Fault("GET /v1/status/leader", status=500, text="No cluster leader", times=2))
    await made.start(BASE, 1)  # an election passes
    nomad.faults.append(Fault("GET /v1/status/leader", status=500, text="No cluster leader", times=9))
    with pytest.raises(BackendError, match=r"500 No cluster leader. Next step: nomad server members"):
        await made.start("q-1-1", 1)
    assert [*nomad.jobs] == ["p-1a2b3c4d-7_1"]
    for status, tries in ((500, 1), (503, 4), (429, 4)):
        nomad.requests.clear()
        nomad.faults[:] = [Fault("GET /v1/jobs", status=status, text="it is as it is", times=9)]
        with pytest.raises(BackendError, match=f"GET http://127.0.0.1:.*/v1/jobs: {status} it is as it is"):
            await made.ended([f"{BASE}.1"])
        assert len(nomad.requests) == tries
    nomad.faults.clear()
    assert await made.ended([f"{BASE}.1"]) == {}
    await made.stop([f"{BASE}.1"])
    await made.close()
    monkeypatch.setenv("NOMAD_TOKEN", "another")
    refused = engine(program())
    with pytest.raises(BackendError, match=r"403 Permission denied. Next step: a token in NOMAD_TOKEN"):
        await refused.start(BASE, 1)
    await refused.close()
    absent = engine(program(), address="http://127.0.0.1:9")
    with pytest.raises(BackendError, match=r"Cannot connect.*Next step: set NOMAD_ADDR"):
        await absent.start(BASE, 1)
    await absent.close()


async def test_a_limit_of_time_is_that_of_one_call(nomad: NomadServer) -> None:
    client = NomadClient(timeout=0.5)
    nomad.faults.append(Fault("GET /v1/status/leader", stall=0.3, times=4))
    assert {await client.leader() for _ in range(4)} == {"127.0.0.1:4647"}
    nomad.faults.append(Fault("GET /v1/jobs", stall=0.7, times=1))
    assert await client.jobs() == []  # at the second try
    assert nomad.requests.count("GET /v1/jobs") == 2
    with pytest.raises(BackendError, match="404 job not found"):
        await client.job("none")
    with pytest.raises(BackendError, match="404 alloc not found"):
        await client.allocation("none")
    await client.close()


def test_options_are_strings_or_what_yaml_makes_of_them(tmp_path: Path) -> None:
    over = {
        "Constraints": [{"LTarget": "${attr.kernel.name}", "RTarget": "linux", "Operand": "="}],
        "TaskGroups": [{"Tasks": [{"Config": {"privileged": True}, "Resources": {"MemoryMaxMB": 4096}}]}],
    }
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"Job": over}))
    given: list[dict[str, Any]] = [
        {"cpu": "4000", "memory": "2048", "datacenters": "dc1,dc2", "job": str(file)},
        {"cpu": 4000, "memory": 2048.0, "datacenters": ["dc1", "dc2"], "job": over},
    ]
    first, second = (
        engine("", driver="docker", image="team/l:1", **each)._jobs.made(BASE, f"{BASE}.1") for each in given
    )
    assert first == second
    assert first["Datacenters"] == ["dc1", "dc2"] and first["Constraints"] == over["Constraints"]
    [group] = first["TaskGroups"]
    [task] = group["Tasks"]
    assert task["Resources"] == {"CPU": 4000, "MemoryMB": 2048, "MemoryMaxMB": 4096}
    assert task["Config"]["privileged"] and task["Config"]["entrypoint"] == ["python3"] and task["Config"]["init"]
    assert len(task["Templates"]) == 1 and group["RestartPolicy"] == {"Attempts": 0, "Mode": "fail"}
    sif = engine("", driver="singularity", image="/images/l.sif")._jobs.made(BASE, f"{BASE}.1")
    [task] = sif["TaskGroups"][0]["Tasks"]
    assert task["Driver"] == "raw_exec" and task["Config"]["args"][:4] == ["exec", "/images/l.sif", "python3", "-m"]
    assert sif["Datacenters"] == ["*"]
    for wrong, message in (
        ({"driver": "podman"}, "no driver 'podman'"),
        ({"driver": "docker"}, "docker needs an image"),
        ({"image": "team/l:1"}, "raw_exec has no image"),
        ({"cpu": "much"}, "cpu='much' is no number"),
        ({"job": str(tmp_path / "none")}, "is no job: .*No such file"),
        ({"job": "/dev/null"}, "is no job"),
    ):
        with pytest.raises(BackendError, match=message):
            engine("", **wrong)
    with pytest.raises(TypeError, match="images"):
        engine("", images="team/l:1")


async def ready(pool: PoolEngine, count: int, *, without: Any = ()) -> list[str]:
    """The workers, once there are so many others than these."""

    def joined() -> list[str] | None:
        found = [each["name"] for each in pool.status()["workers"] if each["name"] not in without]
        return found if len(found) == count else None

    found: list[str] = await until(joined, 60.0)
    return found


@pytest.mark.slow
async def test_sandboxes_of_workers_that_nomad_has_placed(nomad: NomadServer, tmp_path: Path) -> None:
    options = ("--engine", "nomad", "--engine-option", "driver=docker", "--engine-option", "image=team/lachesis:1")
    with pool_engine(tmp_path / "pool", *options, "--slots", "2", "--least", "2", "--most", "2") as pool:
        first = await ready(pool, 2)
        backend = create_backend("pool", **pool.options)
        sandbox = await backend.create(SandboxSpec())
        assert (await sandbox.exec("echo $((6 * 7))", timeout=20)).stdout == b"42\n"

        # One that crashes is lost with its sandboxes, and another one takes its place.
        [of] = [each["name"] for each in pool.status()["workers"] if each["busy"]]
        [pid] = workers(of)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await sandbox.exec("sleep 30", timeout=60)
        await sandbox.close()
        await ready(pool, 1, without=first)

        # One that gets SIGTERM ends with its last rollout.
        sandbox = await backend.create(SandboxSpec())
        [of] = [each["name"] for each in pool.status()["workers"] if each["busy"]]
        [placed] = nomad.of(of.replace(".", "_"))
        assert placed.process is not None
        placed.process.send_signal(signal.SIGTERM)
        assert (await sandbox.exec("sleep 0.5; echo done", timeout=20)).stdout == b"done\n"
        await sandbox.close()
        await until(lambda: placed.ended)
        assert placed.body["ClientStatus"] == "complete" and pool.status()["lost"] == 1

        # A pool that is killed leaves jobs; the next one ends them, and does not count on their goodwill.
        before = {*await ready(pool, 2)}
        jobs = {*nomad.jobs}
        pool.process.kill()
        pool.process.wait()
        assert {*nomad.jobs} == jobs and len(jobs) >= 2
        pool.start()
        assert not before & {*await ready(pool, 2)}
        assert not jobs & {*nomad.jobs}
        assert "nothing is left" in await asyncio.to_thread(pool.end)
    assert not nomad.jobs and not nomad.variables and not workers(pool.name)
    assert all(each.ended for each in nomad.allocations)
    placed_jobs = [each.job["ID"] for each in nomad.allocations]
    assert len(placed_jobs) == len({*placed_jobs}), "Nomad has started one again"


async def test_the_tool_backend_of_the_old_settings_has_slots_of_nomad(
    nomad: NomadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = HermesAgentEnvConfig(
        tool_pool_mode="nomad",
        nomad_address=nomad.env["NOMAD_ADDR"],
        slots_per_container=2,
        max_containers=1,
        privileged=True,
        allow_network=False,
    )
    backend = create_tool_backend(settings)
    assert isinstance(backend, NomadToolBackend)
    try:
        slots = await asyncio.gather(backend.acquire("one"), backend.acquire("two"))
        results = await backend.execute_batch([(slot, "bash", {"command": "echo $PPID"}) for slot in slots])
        assert all(result.success for result in results) and slots[0].slot_id != slots[1].slot_id
        [allocation] = nomad.allocations
        [task] = allocation.job["TaskGroups"][0]["Tasks"]
        assert task["Config"]["image"] == "atropos-sandbox:local" and task["Config"]["privileged"] is True
    finally:
        await backend.stop(purge=True)
    assert not nomad.jobs and not nomad.variables
