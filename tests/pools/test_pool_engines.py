"""The same rollouts on workers that each engine has placed; and what is left when each part of it is killed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends import SandboxLost, SandboxSpec, create_backend
from tests.support.chats import records
from tests.support.pool_engine import PoolEngine, pool_engine, workers
from tests.support.slurm_engine import NEEDS_SLURM, slurm_engine
from tests.support.ssh_engine import ssh_engine

NEEDS_RAY = [
    pytest.mark.skipif("LACHESIS_NEED_RAY" not in os.environ, reason="`make test-ray` asks for it"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]


@contextmanager
def by_ssh(folder: Path, *arguments: str) -> Iterator[PoolEngine]:
    with ssh_engine() as sshd:
        key, known = sshd.options["client_keys"][0], sshd.options["known_hosts"]
        options = f"-F none -p {sshd.port} -i {key} -o UserKnownHostsFile={known}"
        given = ["--engine-option", f"hosts={sshd.user}@127.0.0.1,{sshd.user}@127.0.0.1", "--engine-option"]
        with pool_engine(folder, "--engine", "ssh", *given, f"options={options}", *arguments) as pool:
            yield pool


STARTED: list[subprocess.Popen[bytes]] = []
"""Daemons in the place of killed ones."""


@contextmanager
def by_slurm(folder: Path, *arguments: str) -> Iterator[PoolEngine]:
    with (
        slurm_engine(folder / "slurm", processors=64, nodes=2) as variables,
        pool_engine(folder / "pool", "--engine", "slurm", *arguments, env=variables) as pool,
    ):
        yield pool
        pool.end()
        queue = subprocess.run(["squeue", "--noheader"], env=variables, capture_output=True, text=True, check=True)
        logs = "\n".join(
            f"{path.name}: {path.read_text()[-800:]}" for path in folder.glob("pool/lachesis/pools/logs/*")
        )
        while STARTED:
            STARTED[-1].terminate()
            STARTED.pop().wait()
        assert queue.stdout == "", f"a job is left; {logs}; {(folder / 'pool/log').read_text()[-1000:]}"


@contextmanager
def by_ray(folder: Path, *arguments: str) -> Iterator[PoolEngine]:
    temporary = tempfile.mkdtemp(prefix="ray")  # not of pytest: the names of sockets may have 107 characters
    variables = {"RAY_TMPDIR": temporary, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        with pool_engine(folder, "--engine", "ray", *arguments, env=variables) as pool:
            yield pool
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


ENGINES = [
    pytest.param(pool_engine, id="processes"),
    pytest.param(by_ssh, id="ssh"),
    pytest.param(by_slurm, id="slurm", marks=NEEDS_SLURM),
    pytest.param(by_ray, id="ray", marks=NEEDS_RAY),
]


async def gone(pool: PoolEngine, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while pool.workers() and time.monotonic() < end:  # noqa: ASYNC110  (other processes end)
        await asyncio.sleep(0.1)
    return not pool.workers()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
async def test_rollouts_are_played_on_workers_of_each_engine(tmp_path: Path, engine: object) -> None:
    make = engine
    with make(tmp_path / "e", "--slots", "2", "--least", "2", "--most", "2") as pool:  # type: ignore[operator]
        assert len(pool.ready(2)["workers"]) == 2
        out = tmp_path / "out"
        command = [sys.executable, "-m", "lachesis", "process", "terminal", "-n", "2", "-r", "2", "-m", "reference"]
        command += ["--env.terminal_backend", "pool", "-o", str(out)]
        done = await asyncio.to_thread(
            subprocess.run, command, env=pool.env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        groups = records(out)
        assert [group["scores"] for group in groups] == [[1.0, 1.0], [1.0, 1.0]]
        said = pool.status()
        assert said["leases"] >= 4 and said["lost"] == 0 and said["slots"]["available"] == 4
        # A worker that is killed is replaced, and what it had is lost and not continued elsewhere.
        sandbox = await create_backend("pool", **pool.options).create(SandboxSpec())
        running = asyncio.create_task(sandbox.exec("sleep 100", timeout=200))
        await asyncio.sleep(0.5)
        for worker in said["workers"]:
            for pid in workers(worker["name"]):
                with_name = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"ssh" not in with_name.split(b"\0")[0]:
                    os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await running
        await sandbox.close()
        assert len(pool.ready(2)["workers"]) == 2
    assert await gone(pool), "a worker is left"


@pytest.mark.parametrize("engine", [each for each in ENGINES if each.id in ("slurm", "ray")])
async def test_gsm8k_and_swe_are_played_on_two_nodes_with_the_same_file(tmp_path: Path, engine: object) -> None:
    make = engine
    (tmp_path / "pool.yaml").write_text("env: {terminal_backend: pool, group_size: 2}\n")
    on_each = ("--engine-option", "sbatch=--cpus-per-task=64") if engine is by_slurm else ()
    with make(tmp_path / "e", "--slots", "4", "--least", "2", "--most", "2", *on_each) as pool:  # type: ignore[operator]
        names = {worker["name"] for worker in pool.ready(2)["workers"]}
        nodes = {variable_of(workers(name)[-1], "SLURMD_NODENAME") for name in names}
        assert nodes in ({"node1", "node2"}, {""}), "Ray has one node here"
        for environment, items in (("gsm8k", 4), ("swe", 2)):
            command = [sys.executable, "-m", "lachesis", "process", environment, "-n", str(items), "-m", "reference"]
            command += ["--config", str(tmp_path / "pool.yaml"), "-o", str(tmp_path / environment)]
            done = await asyncio.to_thread(
                subprocess.run, command, env=pool.env, capture_output=True, text=True, timeout=500, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert [group["scores"] for group in records(tmp_path / environment)] == [[1.0, 1.0]] * items
        said = pool.status()
        assert said["lost"] == 0 and {worker["name"] for worker in said["workers"]} == names
    assert await gone(pool), "a worker is left"


def variable_of(pid: int, name: str) -> str:
    pairs = (pair.partition("=") for pair in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"))
    return next((value for key, _, value in pairs if key == name), "")


ROUNDS, WORKERS, SLOTS = (20, 4, 16) if os.environ.get("LACHESIS_TESTS") == "all" else (2, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("victim", ["worker", "pool", "slurmd", "actor"])
async def test_rollouts_are_played_to_their_end_whatever_is_killed(
    tmp_path: Path, engine: object, victim: str, request: pytest.FixtureRequest
) -> None:
    """Each rollout is scored once, by a sandbox that it had from its beginning to its end."""
    name = request.node.callspec.id
    if (victim == "slurmd" and "slurm" not in name.split("-")[-1]) or (victim == "actor" and "ray" not in name):
        pytest.skip("the engine has no such part")
    if name != "worker-processes" and not {"LACHESIS_NEED_RAY", "LACHESIS_NEED_SLURM"} & {*os.environ}:
        pytest.skip("`make test-pools` kills it")
    make, chance = engine, random.Random(name)
    scale = ("--slots", str(SLOTS), "--least", str(WORKERS), "--most", str(WORKERS))
    with make(tmp_path / "e", *scale) as pool:  # type: ignore[operator]
        pool.ready(WORKERS)
        out = tmp_path / "out"
        command = [sys.executable, "-m", "lachesis", "process", "terminal", "-n", str(40 * ROUNDS), "-r", "1"]
        command += [
            "-m",
            "reference",
            "--env.terminal_backend",
            "pool",
            "-o",
            str(out),
            "--env.max_num_workers",
            str(WORKERS * SLOTS),
        ]
        run = await asyncio.create_subprocess_exec(
            *command, env=pool.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        saying = asyncio.create_task(run.communicate())
        while not (await asyncio.to_thread(pool.status))["leases"] and not saying.done():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        killed = 0
        while killed < ROUNDS and not saying.done():
            await asyncio.sleep(chance.uniform(0.5, 2.0))
            killed += await asyncio.to_thread(kill, pool, victim, chance)
        said, _ = await asyncio.wait_for(saying, 900)
        assert run.returncode == 0, said.decode()[-3000:]
        scores = [score for group in records(out) for score in group["scores"]]
        assert scores == [1.0] * 40 * ROUNDS, said.decode()[-3000:]
        assert killed, "the run was over before anything was killed"
    assert await gone(pool), "a worker is left"


def kill(pool: PoolEngine, victim: str, chance: random.Random) -> int:
    """Kill it, and wait until the pool has its workers again. Returns how many were killed."""
    if victim == "pool":
        pool.process.kill()
        pool.process.wait()
        pool.start()
        pool.ready(WORKERS)
        return 1
    if victim == "slurmd":
        pid = chance.choice(
            [int(place.name) for place in Path("/proc").glob("[0-9]*") if _runs(place, "slurmd")] or [0]
        )
    elif victim == "actor":
        pool.ready(WORKERS)  # one that starts would count as a start that failed
        pid = chance.choice([int(p.name) for p in Path("/proc").glob("[0-9]*") if _runs(p, "ray::_Holder")] or [0])
    else:
        pid = chance.choice([each for name in pool.status()["workers"] for each in workers(name["name"])] or [0])
    if not pid:
        return 0
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    os.kill(pid, signal.SIGKILL)
    if victim == "slurmd":  # what started it starts it again
        time.sleep(0.5)
        nothing = subprocess.DEVNULL
        STARTED.append(subprocess.Popen(command, env=pool.env, stdout=nothing, stderr=nothing))
    return 1


def _runs(place: Path, program: str) -> bool:
    try:
        return (place / "cmdline").read_bytes().split(b"\0")[0].decode().rpartition("/")[2].startswith(program)
    except (OSError, UnicodeDecodeError):
        return False
