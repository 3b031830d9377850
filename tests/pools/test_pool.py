"""A real pool with real workers: leases, kills of every process, workers that cannot start, drains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from backends import BackendError, BackendUnavailable, SandboxLost, SandboxSpec, create_backend
from lachesis_pools.engines.engine import StartLedger, WorkerCommand
from lachesis_pools.engines.processes import ProcessEngine
from lachesis_pools.places import publish
from lachesis_pools.pool import Pool, Profile
from lachesis_pools.slots import Scale
from lachesis_pools.stream import connect
from lachesis_pools.wire import PASSED, message, new_lease
from lachesis_view import app as viewer
from lachesis_view.index import Index
from tests.support.pool_engine import PoolEngine, pool_engine, workers

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolEngine]:
    folder = tmp_path_factory.mktemp("pool")
    with pool_engine(folder, "--slots", "3", "--least", "1", "--most", "3", "--warm", "--idle", "3600") as engine:
        engine.ready(1)
        yield engine
    assert engine.workers() == set()


def ours(engine: PoolEngine) -> list[int]:
    """Its workers' processes."""
    return [pid for worker in engine.status()["workers"] for pid in workers(worker["name"])]


async def settled(engine: PoolEngine, **wanted: int) -> dict[str, Any]:
    """Wait until the pool has so many leases in these states."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        said = await asyncio.to_thread(engine.status)
        if all(said["slots"][state] == count for state, count in wanted.items()):
            return said
        await asyncio.sleep(0.1)
    raise AssertionError(said)


async def test_a_full_pool_starts_workers_and_makes_the_others_wait(pool: PoolEngine) -> None:
    backend = create_backend("pool", **pool.options)
    made = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(9)))
    assert len({sandbox.id for sandbox in made}) == 9
    late = asyncio.create_task(backend.create(SandboxSpec()))
    await asyncio.sleep(0.3)
    said = await settled(pool, executing=9)
    assert said["waiting"] == 1 and len(said["workers"]) == 3 and not late.done()
    outputs = await asyncio.gather(*(each.exec(f"echo {n} > f; cat f", timeout=30) for n, each in enumerate(made)))
    assert [each.stdout for each in outputs] == [f"{n}\n".encode() for n in range(9)]
    await made[0].close()
    last = await late
    assert (await last.exec("ls", timeout=20)).stdout == b"", "a slot is used again, and its files are not"
    await asyncio.gather(*(each.close() for each in (*made, last)))
    await settled(pool, available=9)


async def test_a_lease_that_is_cancelled_while_it_waits_or_starts_takes_no_slot(pool: PoolEngine) -> None:
    backend = create_backend("pool", **pool.options)
    chance = random.Random(4)
    for _ in range(20):
        call = asyncio.create_task(backend.create(SandboxSpec()))
        await asyncio.sleep(chance.uniform(0, 0.05))
        call.cancel()
        for each in await asyncio.gather(call, return_exceptions=True):
            if not isinstance(each, BaseException):
                await each.close()
    await settled(pool, acquired=0, executing=0, releasing=0)


async def test_no_slot_is_lost_by_creates_that_are_cut_short_at_any_time(pool: PoolEngine) -> None:
    backend = create_backend("pool", **pool.options)
    chance = random.Random(5)

    async def one() -> None:
        try:
            async with asyncio.timeout(chance.uniform(0.001, 0.3)):
                sandbox = await backend.create(SandboxSpec())
        except (TimeoutError, BackendError):
            return
        child = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.uniform(0.001, 0.1)):
                    child = await sandbox.fork()  # type: ignore[attr-defined]
        finally:
            await asyncio.gather(sandbox.close(), *([child.close()] if child is not None else []))

    for _ in range(12):
        await asyncio.gather(*(one() for _ in range(8)))
    said = await settled(pool, acquired=0, executing=0, releasing=0, error=0)
    assert said["waiting"] == 0


@pytest.mark.slow
async def test_a_run_that_does_not_read_costs_the_others_nothing(pool: PoolEngine) -> None:
    code = (
        "import asyncio, json, sys\nfrom backends import SandboxSpec, create_backend\n"
        "async def main():\n"
        "    sandbox = await create_backend('pool', **json.loads(sys.argv[1])).create(SandboxSpec())\n"
        "    await sandbox.exec('head -c 50000000 /dev/zero > big', timeout=60)\n"
        "    calls = [asyncio.create_task(sandbox.read_bytes('big')) for _ in range(4)]\n"
        "    await asyncio.sleep(0.01)\n"
        "    print('ready', flush=True)\n    await asyncio.gather(*calls)\nasyncio.run(main())\n"
    )
    other = await create_backend("pool", **pool.options).create(SandboxSpec())
    arguments = [sys.executable, "-c", code, json.dumps(pool.options)]
    owner = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None and await owner.stdout.readline() == b"ready\n"
    owner.send_signal(signal.SIGSTOP)
    try:
        for _ in range(30):
            assert (await other.exec("echo on", timeout=5)).stdout == b"on\n"
            await asyncio.sleep(0.1)
    finally:
        owner.kill()
        await owner.wait()
    await other.close()
    await settled(pool, executing=0, releasing=0)


async def test_a_worker_that_is_killed_loses_its_sandboxes_and_nothing_else(pool: PoolEngine) -> None:
    backend = create_backend("pool", **pool.options)
    for _ in range(3):
        made = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(4)))
        running = [asyncio.create_task(each.exec("sleep 3; echo done", timeout=60)) for each in made]
        await asyncio.sleep(0.2)
        busy = [worker["name"] for worker in pool.status()["workers"] if worker["busy"]]
        os.kill(workers(random.choice(busy))[0], signal.SIGKILL)
        ended = await asyncio.gather(*running, return_exceptions=True)
        lost = [each for each in ended if isinstance(each, SandboxLost)]
        assert lost and len(lost) < 4 and all("worker" in str(each) for each in lost)
        assert all(each.stdout == b"done\n" for each in ended if not isinstance(each, BaseException))
        for sandbox, end in zip(made, ended, strict=True):
            if isinstance(end, SandboxLost):
                with pytest.raises(SandboxLost):
                    await sandbox.exec("true", timeout=20)
        await asyncio.gather(*(each.close() for each in made))
        await settled(pool, executing=0)


async def test_a_run_that_is_killed_gives_its_slots_back(pool: PoolEngine) -> None:
    code = (
        "import asyncio, json, sys\nfrom backends import SandboxSpec, create_backend\n"
        "async def main():\n"
        "    backend = create_backend('pool', **json.loads(sys.argv[1]))\n"
        "    made = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(2)))\n"
        "    await asyncio.gather(*(each.start('sleep 1000') for each in made))\n"
        "    print('ready', flush=True)\n    await asyncio.sleep(1000)\nasyncio.run(main())\n"
    )
    arguments = [sys.executable, "-c", code, json.dumps(pool.options)]
    owner = await asyncio.create_subprocess_exec(*arguments, cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None and await owner.stdout.readline() == b"ready\n"
    await settled(pool, executing=2)
    owner.kill()
    await owner.wait()
    await settled(pool, executing=0, releasing=0)


async def test_a_wrong_key_is_refused(pool: PoolEngine, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("wrong")
    backend = create_backend("pool", url=pool.place["url"], token_file=str(key))
    assert not (await backend.check()).ok
    with pytest.raises(BackendUnavailable, match=r"has another key\. Next step: set LACHESIS_POOL_TOKEN"):
        await backend.create(SandboxSpec())
    arguments = ["worker", "--connect", pool.place["url"], "--slots", "1"]
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "lachesis_pools", *arguments],
        env={**os.environ, "LACHESIS_POOL_TOKEN": "wrong"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "the pool's key is another one" in done.stderr


async def test_messages_that_are_none_cost_the_run_that_sent_them_and_nobody_else(pool: PoolEngine) -> None:
    backend = create_backend("pool", **pool.options)
    other = await backend.create(SandboxSpec())
    place = pool.place
    spec = {"image": None, "lifetime": 60.0}
    for bad in (
        {"fields": {}},
        {"id": 1},
        {"id": 1, "op": "exec", "patience": 5.0, "room": 1, "fields": []},
        {"cancel": []},
        {"post": "cancel"},
    ):
        bad_run = await create_backend("pool", **pool.options).create(SandboxSpec())
        bad_run._own.stream.post(message(bad_run._own.lease, bad))  # type: ignore[attr-defined]
        with contextlib.suppress(BackendError):
            await bad_run.exec("true", timeout=20)
        await bad_run.close()
    for asked in (
        {"do": "acquire", "spec": spec, "kind": ["x"], "profile": "", "labels": {}},
        {"do": "acquire", "spec": spec, "kind": "x", "profile": {}, "labels": {}},
        {"do": "acquire"},
    ):
        stream = await connect(place["url"], "run", place["token"], lambda *_: None, run="bad")
        stream.post(message(new_lease(), asked))
        await asyncio.wait_for(asyncio.shield(stream.ended), 20)
    stream = await connect(place["url"], "run", place["token"], lambda *_: None, run="bad")
    drain = bytearray(message(other._own.lease, {"do": "drain", "now": True}))  # type: ignore[attr-defined]
    drain[16] = PASSED
    stream.post(bytes(drain))
    await asyncio.sleep(0.2)
    stream.close()
    assert (await other.exec("echo on", timeout=20)).stdout == b"on\n"
    await other.close()
    await settled(pool, executing=0, acquired=0, releasing=0, error=0)


async def test_sandboxes_of_other_kinds_make_room_for_each_other(pool: PoolEngine) -> None:
    backend = create_backend("pool", **pool.options)
    for _ in range(3):
        made = await asyncio.gather(*(backend.create(SandboxSpec(pids=100 + number)) for number in range(3)))
        await asyncio.gather(*(each.close() for each in made))
    for worker in ours(pool):
        children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        assert len(children) <= 4, "no more sandboxes than slots, and what starts them"


async def test_what_is_seen_from_outside_is_counted(pool: PoolEngine) -> None:
    place = pool.place
    headers = {"Authorization": f"Bearer {place['token']}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{place['url']}/metrics") as answer,
    ):
        text = await answer.text()
    assert 'lachesis_pool_slots{state="available"} ' in text and "lachesis_pool_leases_total " in text
    assert "leases wait" in pool.run("status", pool.name)
    assert json.loads(pool.run("status", pool.name, "--json")) | {"slots": 0} == pool.status() | {"slots": 0}


async def test_the_viewer_shows_the_pools_of_this_machine(
    pool: PoolEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(pool.folder))
    publish("gone", "http://127.0.0.1:1", "key")
    sandbox = await create_backend("pool", **pool.options).create(SandboxSpec())
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}pools") as answer:
            text = await answer.text()
        assert answer.status == 200
        assert pool.name in text and 'title="executing"' in text and ours_names(pool)[0] in text
        assert "http://127.0.0.1:1 cannot be reached" in text
    finally:
        await runner.cleanup()
        index.close()
        await sandbox.close()
        (pool.folder / "lachesis/pools/gone.json").unlink()


def ours_names(engine: PoolEngine) -> list[str]:
    return [worker["name"] for worker in engine.status()["workers"]]


# --- pools of their own ----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_pool_that_is_killed_leaves_no_worker_and_its_runs_find_their_sandboxes_lost(tmp_path: Path) -> None:
    engine = PoolEngine(tmp_path, "--slots", "2", "--least", "2", "--most", "2")
    engine.ready(2)
    pids = ours(engine)
    backend = create_backend("pool", **engine.options)
    sandbox = await backend.create(SandboxSpec())
    running = asyncio.create_task(sandbox.exec("sleep 100", timeout=200))
    await asyncio.sleep(0.2)
    engine.process.kill()
    with pytest.raises(SandboxLost, match="connection to the pool"):
        await running
    await sandbox.close()
    for _ in range(200):
        if not {*pids} & engine.workers():
            break
        await asyncio.sleep(0.1)
    assert not {*pids} & engine.workers(), "a worker ends with the pool that has started it"
    engine.process.wait()
    engine.start()
    assert len(engine.ready(2)["workers"]) == 2
    assert "nothing is left" in await asyncio.to_thread(engine.end)


async def test_a_name_is_that_of_one_pool(tmp_path: Path) -> None:
    with pool_engine(tmp_path, "--engine", "none") as pool:
        arguments = [sys.executable, "-m", "lachesis_pools", "up", "--name", pool.name, "--engine", "none"]
        done = await asyncio.to_thread(
            subprocess.run, arguments, env=pool.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2 and "runs already. Next step: --name another" in done.stderr
        assert pool.status()["pool"] == pool.name


def test_a_pool_that_is_named_goes_before_the_variables(tmp_path: Path) -> None:
    env = {"LACHESIS_POOL_URL": "http://127.0.0.1:1", "LACHESIS_POOL_TOKEN": "other"}
    engine = PoolEngine(tmp_path, "--engine", "none")
    try:
        engine.env |= env
        assert "0 workers" in engine.run("status", engine.name)
        assert "have ended" in engine.run("down", engine.name)
        assert engine.process.wait(20) == 0
    finally:
        engine.process.kill()


@pytest.mark.slow
async def test_workers_that_cannot_start_end_the_pool_with_the_reason(tmp_path: Path) -> None:
    options = ["--backend", "docker", "--options", '{"url": "unix:///nowhere"}']
    engine = PoolEngine(tmp_path, "--least", "4", "--most", "4", *options)
    code = await asyncio.to_thread(engine.process.wait, 120)
    said = (tmp_path / "log").read_text()
    assert code == 1 and "workers did not start" in said and "docker" in said and "Next step" in said


async def test_a_worker_that_is_told_to_end_finishes_what_runs(tmp_path: Path) -> None:
    with pool_engine(tmp_path, "--slots", "2", "--least", "1", "--most", "1") as engine:
        engine.ready(1)
        [pid] = ours(engine)
        sandbox = await create_backend("pool", **engine.options).create(SandboxSpec())
        running = asyncio.create_task(sandbox.exec("sleep 1; echo done", timeout=60))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        assert (await running).stdout == b"done\n"
        assert (await sandbox.exec("echo still", timeout=20)).stdout == b"still\n"
        await sandbox.close()
        for _ in range(100):
            if pid not in engine.workers():
                break
            await asyncio.sleep(0.1)
        assert pid not in engine.workers()


class Unsteady(ProcessEngine):
    """An engine that cannot be asked now and then, and whose first start fails halfway."""

    def __init__(self, worker: WorkerCommand) -> None:
        super().__init__(worker)
        self.questions = self.starts = 0

    async def start(self, base: str, count: int) -> str:
        self.starts += 1
        await super().start(base, 1 if self.starts == 1 else count)
        if self.starts == 1:
            raise BackendError("the second worker was refused")
        return ""

    async def ended(self, names: Collection[str]) -> Mapping[str, str]:
        self.questions += 1
        if self.questions % 2:
            raise BackendError("the engine does not answer")
        return await super().ended(names)


async def test_an_engine_that_fails_now_and_then_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    engine = Unsteady(WorkerCommand(url, "key", slots=1, warm=False))
    pool = Pool("key", {"": Profile(Scale(0, 2, 1, attempts=20), engine)}, ledger=StartLedger("unsteady"))
    runner = web.AppRunner(pool.application())
    await runner.setup()
    await web.SockSite(runner, listening).start()
    keeping = asyncio.create_task(pool.keep())
    monkeypatch.setenv("LACHESIS_POOL_TOKEN", "key")
    backend = create_backend("pool", url=url)
    try:
        made = await asyncio.gather(*(backend.create(SandboxSpec()) for _ in range(2)))
        assert engine.starts > 1 and engine.questions > 1
        assert len(pool.slots.workers) + len(pool.slots.starting) <= 2
        await asyncio.gather(*(each.close() for each in made))
    finally:
        pool.stop()
        await keeping
        await runner.cleanup()


async def test_no_slot_in_time_is_an_error_of_the_infrastructure(tmp_path: Path) -> None:
    with pool_engine(tmp_path, "--engine", "none") as engine:
        backend = create_backend("pool", **engine.options, start_timeout=0.5)
        with pytest.raises(BackendError, match=r"given no slot within 0\.5 s"):
            await backend.create(SandboxSpec())
        assert engine.status()["waiting"] == 0
