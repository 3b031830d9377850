"""Pools: what a sandbox of a worker costs beside one of this machine, and a thousand slots on a simulated clock.

    python benchmarks/pools.py [--rounds 300] [--slots 64]

First, a real pool of one worker on this machine: a command beside one of a local sandbox, in turn; the
wait for a warm slot; the memory and the CPU time of a worker with `--slots` idle warm sandboxes. Then the waits for
a slot in bursts of 500 rollouts on 1,000 slots whose workers take 1 to 60 s to start, of which 5 % fail; then the same
with 20 % of the workers dying. Last, a real pool with workers that answer without sandboxes: 10,000 leases of 20 runs,
and commands on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends import Sandbox, SandboxSpec, create_backend
from benchmarks.machine import cpu_seconds
from lachesis_pools.slots import Scale
from lachesis_pools.stream import PoolStream, connect
from lachesis_pools.wire import message, opened
from tests.pools.test_slots import Simulation
from tests.support.pool_engine import PoolEngine, pool_engine, workers

EXEC_RATIO, ACQUIRE_MS, IDLE_MB, IDLE_CORE = 1.5, 10.0, 150.0, 0.01
"""Goals: a command beside a local one; a warm slot; a worker of 64 idle slots."""
ENDED = {"execution": "e1", "exit_code": 0, "timed_out": False, "stdout": 1000, "stdout_elided": 0}
ENDED |= {"stderr_elided": 0, "duration": 0.1, "waited": None, "waited_in_all": 0.0}
"""What an executor answers."""


def memory_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


async def seconds(sandbox: Sandbox) -> float:
    begin = time.perf_counter()
    await sandbox.exec("true", timeout=60)
    return time.perf_counter() - begin


def below(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")  # threads start processes, too
    children = [int(each) for task in tasks for each in task.read_text().split()]
    return [found for child in children for found in (child, *below(child))]


async def real(engine: PoolEngine, rounds: int, slots: int) -> bool:
    [worker] = [pid for each in engine.status()["workers"] for pid in workers(each["name"])]
    made = cpu_seconds(worker, *below(worker))
    backend, local = create_backend("pool", **engine.options), create_backend("local")
    far, near = await backend.create(SandboxSpec()), await local.create(SandboxSpec())
    taken: dict[str, list[float]] = {"local": [], "pool": []}
    of_pool = cpu_seconds(engine.process.pid)
    for number in range(rounds):
        for name, sandbox in sorted({"local": near, "pool": far}.items(), reverse=bool(number % 2)):
            await asyncio.sleep(0.02)
            taken[name].append(await seconds(sandbox))
    middle = {name: 1000 * statistics.median(found) for name, found in taken.items()}
    ratio = middle["pool"] / middle["local"]
    both = f"local {middle['local']:.2f} ms, pool {middle['pool']:.2f} ms"
    ratios = sorted(pool / local for pool, local in zip(taken["pool"], taken["local"], strict=True))
    low, high = (ratios[int(share * len(ratios))] for share in (0.25, 0.75))
    alone = 1000 * (cpu_seconds(engine.process.pid) - of_pool) / rounds
    print(f"a command: {both}, {ratio:.2f} times (goal {EXEC_RATIO})", end="; ")
    print(f"half of the pairs {low:.2f} to {high:.2f}; {alone:.2f} ms of the pool's processor time")
    await far.close()
    await near.close()
    waits = []
    for _ in range(30):
        begin = time.perf_counter()
        sandbox = await backend.create(SandboxSpec())
        waits.append(1000 * (time.perf_counter() - begin))
        await sandbox.exec("date > f", timeout=60)
        await sandbox.close()
    wait = statistics.median(waits)
    print(f"a warm slot: {wait:.1f} ms, the longest of 30 {max(waits):.1f} (goal {ACQUIRE_MS:g})")
    await asyncio.sleep(2.0)
    before = cpu_seconds(worker)
    await asyncio.sleep(20.0)
    core, memory = (cpu_seconds(worker) - before) / 20, memory_mb(worker)
    print(f"a worker with {slots} idle warm sandboxes: {memory:.0f} MB, {100 * core:.2f} % of a core", end=" ")
    print(f"(goals {IDLE_MB:g} MB, {100 * IDLE_CORE:g} %)")
    each = sum(map(memory_mb, below(worker))) / slots
    print(f"each of these: {each:.1f} MB; making them took {made:.1f} s of processor time")
    return ratio <= EXEC_RATIO and wait <= ACQUIRE_MS and memory <= IDLE_MB and core <= IDLE_CORE


def simulated(deaths: float) -> bool:
    simulation = Simulation(11, Scale(0, 1000, 1, starting=128), failing=0.05, deaths=deaths)
    rollouts = itertools.count()

    def burst(run: str) -> None:
        for _ in range(500):
            simulation.ask(run, next(rollouts))

    for number in range(8):
        simulation.after(60 * number, lambda number=number: burst(f"run {number % 4}"))
    simulation.run(4000)
    waits = sorted(wait for found in simulation.waits.values() for wait in found)
    high = waits[int(0.99 * len(waits))]
    by_run = [statistics.median(found) for found in simulation.waits.values()]
    print(
        f"{100 * deaths:.0f} % of workers die: {len(simulation.finished)} of 4000 rollouts finished, each once; "
        f"{simulation.lost} leases lost; waits p50 {statistics.median(waits):.1f} s, p99 {high:.0f} s; medians of runs "
        f"{min(by_run):.1f} to {max(by_run):.1f} s; at most {simulation.most} workers, {simulation.created} started"
    )
    return simulation.most <= 1000 and not simulation.pool.leases


class Answers:
    """A worker that has no sandboxes: it says at once that it has made one, and that a command has ended."""

    async def join(self, engine: PoolEngine, name: str, slots: int) -> PoolStream:
        facts = {"name": name, "slots": str(slots)}
        return await connect(engine.place["url"], "worker", engine.place["token"], self._take, **facts)

    def _take(self, stream: PoolStream, data: bytes) -> None:
        lease, header = data[:16], opened(data)[0]
        if header.get("do") == "acquire":
            facts = {"workdir": "/w", "python": None, "home": "/w", "sandbox": lease.hex()[:12]}
            stream.post(message(lease, {"do": "acquired", **facts, "powers": [False, False], "shared": False}))
        elif header.get("do") == "release":
            stream.post(message(lease, {"do": "released"}))
        elif "id" in header:
            stream.post(message(lease, {"id": header["id"], **ENDED}, b"x" * 1000))


async def crowd(engine: PoolEngine, leases: int, slots: int = 64, runs: int = 20) -> None:
    answers, pool = Answers(), engine.process.pid
    streams = [await answers.join(engine, f"w{number}", slots) for number in range(-(-leases // slots))]
    empty, cpu = memory_mb(pool), cpu_seconds(pool)
    begin = time.perf_counter()
    backends = [create_backend("pool", **engine.options) for _ in range(runs)]
    # Many at once, as of the groups of a step; each run has one connection.
    sandboxes = await asyncio.gather(*(backends[at % runs].create(SandboxSpec()) for at in range(leases)))
    took, spent = time.perf_counter() - begin, cpu_seconds(pool) - cpu
    print(f"{leases} leases of {runs} runs: {took:.1f} s, {1000 * spent / leases:.2f} ms of the pool each", end="; ")
    print(f"the pool has {empty:.0f} MB, then {memory_mb(pool):.0f} MB")
    cpu = cpu_seconds(pool)
    for _ in range(3):
        await asyncio.gather(*(sandbox.exec("true", timeout=60) for sandbox in sandboxes))
    each = (cpu_seconds(pool) - cpu) / (3 * leases)
    print(f"{3 * leases} commands: {1000 * each:.3f} ms of the pool each, {1 / each:.0f} a second at most")
    for stream in streams:
        stream.abort()
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--leases", type=int, default=10_000, help="of a pool without sandboxes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as folder:
        options = ("--slots", str(given.slots), "--least", "1", "--warm")
        with pool_engine(Path(folder), *options) as engine:
            engine.ready(1)
            met = asyncio.run(real(engine, given.rounds, given.slots))
        with pool_engine(Path(folder), "--engine", "none") as engine:
            asyncio.run(crowd(engine, given.leases))
    return int(not all([met, simulated(0.0), simulated(0.2)]))


if __name__ == "__main__":
    raise SystemExit(main())
