"""What it costs to branch a sandbox: checkpoints, children, restores, warm leases, beside a plain create in one run.

    python benchmarks/checkpoints.py [--rounds 20] [--forks 1000]

Every figure is the median of wall-clock and of CPU milliseconds, all processes and the kernel's work for them included
(those of a control group, as in `sandbox_cost.py`). A round measures each operation once, in a new order each time.
At the end, `--forks` children in a row are made, used and closed, and what is left of them is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends import Lease, SandboxSpec, WarmSandboxes, create_backend
from backends.host.records import folder
from benchmarks.sandbox_cost import control_group, cpu_ms

FILES, BYTES, CHILDREN = 1_000, 50_000, 8
FILL = f"mkdir -p data && cd data && for i in $(seq {FILES}); do head -c {BYTES} /dev/zero > $i; done; cd .."
WRITE = "date +%N > now"
SPEC = SandboxSpec()
CHILD_RATIO = 1.3
"""A child may cost so many times a create."""


def shared_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) / 1024
    return 0.0


def left() -> dict[str, int]:
    """What could be left of sandboxes: descriptors and mounts of this process, folders, control groups."""
    groups = sum(1 for path in Path("/sys/fs/cgroup").glob("*/**/lachesis/*") if path.is_dir())
    places = folder()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "folders": len(list(places.iterdir())) if places.is_dir() else 0,
        "control groups": groups,
        "MB of files in memory": round(shared_mb()),
    }


class Operations:
    """What is measured, on one parent with `FILES` files."""

    def __init__(self, backend: Any, parent: Any, idle: Any) -> None:
        self.backend, self.parent, self.idle = backend, parent, idle
        self.warm = WarmSandboxes(backend, 1)
        self.lent: Lease | None = None

    async def begin(self) -> None:
        self.base = await self.idle.checkpoint()
        self.checkpoint = await self.parent.checkpoint()
        await (await self.warm.lease(SPEC)).release()

    def parts(self) -> dict[str, tuple[Callable[[], Awaitable[Any]], Callable[[], Awaitable[Any]]]]:
        """What is done before each measurement, and what is measured."""

        async def nothing() -> None:
            pass

        async def write() -> None:
            await self.parent.exec(WRITE, timeout=60)

        async def fill() -> None:
            self.full = await self.backend.create(SPEC)
            await self.full.exec(FILL, timeout=60)

        async def first() -> None:
            await self.full.checkpoint()

        async def create() -> None:
            await (await self.backend.create(SPEC)).close()

        async def child() -> None:
            await (await self.parent.fork(self.checkpoint)).close()

        async def warm_child() -> None:
            await self.idle.restore(self.checkpoint)

        async def used() -> None:
            await self.idle.restore(self.base)
            await self.idle.exec(WRITE, timeout=60)

        async def reset() -> None:
            await self.idle.reset(self.base)

        async def lease() -> None:
            self.lent = await self.warm.lease(SPEC)

        async def lent() -> None:
            if self.lent is not None:
                await self.lent.sandbox.exec(WRITE, timeout=60)
                await self.lent.release()

        return {
            "create, close": (nothing, create),
            f"checkpoint of {FILES} files, {FILES * BYTES // 10**6} MB": (fill, first),
            "checkpoint after a command": (write, self.parent.checkpoint),
            "checkpoint, nothing new": (nothing, self.parent.checkpoint),
            "child, close": (nothing, child),
            "child in an idle sandbox": (used, warm_child),
            "reset after a command": (used, reset),
            "warm lease": (lent, lease),
        }


async def measure(rounds: int, forks: int) -> int:
    group = control_group(1)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    backend = create_backend("local")
    parent: Any = await backend.create(SPEC)
    idle: Any = await backend.create(SPEC)
    await parent.exec(FILL, timeout=60)
    operations = Operations(backend, parent, idle)
    await operations.begin()
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        parts = list(operations.parts().items())
        random.shuffle(parts)
        for name, (prepare, act) in parts:
            await prepare()
            gc.collect()
            await asyncio.sleep(0.05)
            cpu, begin = cpu_ms(group), time.perf_counter()
            await act()
            wall = time.perf_counter() - begin
            await asyncio.sleep(0.05)
            found.setdefault(name, []).append((wall * 1000, cpu_ms(group) - cpu))
            if name.startswith("checkpoint of"):
                await operations.full.close()
    middle = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    print(f"{'ms, median of ' + str(rounds):40}{'wall':>8}{'CPU':>8}")
    for name in operations.parts():
        print(f"{name:40}{middle[name][0]:8.1f}{middle[name][1]:8.1f}")
    ratio = middle["child, close"][1] / middle["create, close"][1]
    print(f"a child costs {ratio:.2f} times the CPU of a create (goal: {CHILD_RATIO})")
    checkpoint = await parent.checkpoint()
    before = shared_mb()
    children = [await parent.fork(checkpoint) for _ in range(CHILDREN)]
    for one in children:
        await one.exec("cat data/* | wc -c; " + WRITE, timeout=60)
    print(f"{CHILDREN} children of one parent take {shared_mb() - before:.1f} MB of files in memory")
    for one in children:
        await one.close()
    lost = await leaks(parent, forks)
    for sandbox in (parent, idle):
        await sandbox.close()
    await operations.warm.close()
    return int(lost or ratio > CHILD_RATIO)


async def leaks(parent: Any, forks: int) -> bool:
    await (await parent.fork()).close()
    before = left()
    for number in range(forks):
        child = await parent.fork()
        await child.exec(WRITE, timeout=60)
        await child.close()
        if number % 50 == 49 and sys.stderr.isatty():
            print(f"\r{number + 1} of {forks} children", end="", file=sys.stderr)
    gc.collect()
    await asyncio.sleep(0.5)
    after = left()
    print(f"left of {forks} children, each used and closed: before {before}, after {after}")
    return any(after[name] > before[name] for name in before if not name.startswith("MB"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--forks", type=int, default=1_000)
    given = parser.parse_args()
    return asyncio.run(measure(given.rounds, given.forks))


if __name__ == "__main__":
    raise SystemExit(main())
