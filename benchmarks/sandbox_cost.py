"""What a sandbox costs in CPU time and memory, all its processes and the kernel's work for them included.

    python benchmarks/sandbox_cost.py [--against CHECKOUT] [--backend local] [--image FOLDER] [--rounds 40]

The CPU time of a control group, in which one process makes sandboxes: `create` with `close`, the same with a first
command, a further command, one every 20 ms as a model's, and a `fresh` one as a reward's. With `--against`, the folder
of another commit's checkout is the second candidate, and each round measures both, in a new order each time, so that
other load hits both alike. MB are the PSS of the sandboxes that one process has open. Needs root, or a control group
that may be written to.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and "--worker" not in sys.argv:  # a worker runs the code of another checkout
    sys.path.insert(0, str(ROOT))

COMMANDS, OPEN, PAUSE = 20, 8, 0.02
"""Commands in a row, sandboxes that are open at once, and the seconds between two paced commands."""
PARTS = ("create, close", "create, exec, close", "exec", "paced exec", "fresh exec", "MB each")
LIMIT_MS = 40.0
"""Of `create` with `close`, for `local`."""


def control_group(number: int) -> Path:
    """A new group below that of this process, for CPU time."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpuacct" in controllers.split(","):
            place = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), f"sandbox-cost-{os.getpid()}-{number}")
            try:
                place.mkdir()
            except OSError:
                continue
            return place
    raise SystemExit("no control group can be made for CPU time: run this as root, or with systemd-run --user --scope")


def cpu_ms(group: Path) -> float:
    if (group / "cpuacct.usage").exists():
        return int((group / "cpuacct.usage").read_text()) / 1e6
    return int((group / "cpu.stat").read_text().split()[1]) / 1e3


def pss_mb(group: Path) -> float:
    total = 0
    for pid in (group / "cgroup.procs").read_text().split():
        if int(pid) != os.getpid():
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                total += int(line.split()[1]) if line.startswith("Pss:") else 0
    return total / 1024


async def work(group: Path, backend_name: str, image: str | None) -> None:
    """In a worker: one round for each line of standard input."""
    from backends import SandboxSpec, create_backend

    backend, spec = create_backend(backend_name), SandboxSpec(image=image)
    for line in sys.stdin:
        gc.collect()
        figures: list[float] = []
        for commands in (0, 1):
            before = cpu_ms(group)
            sandbox = await backend.create(spec)
            for _ in range(commands):
                await sandbox.exec("true", timeout=60)
            await sandbox.close()
            await asyncio.sleep(0.05)
            figures.append(cpu_ms(group) - before)
        sandbox = await backend.create(spec)
        await sandbox.exec("true", timeout=60)
        await asyncio.sleep(0.05)
        for pause, fresh in ((0.0, False), (PAUSE, False), (0.0, True)):
            before = cpu_ms(group)
            for _ in range(COMMANDS):
                await sandbox.exec("true", timeout=60, fresh=fresh)
                await asyncio.sleep(pause)
            figures.append((cpu_ms(group) - before) / COMMANDS)
            await asyncio.sleep(0.05)
        await sandbox.close()
        if line.strip() == "memory":
            before = pss_mb(group)
            sandboxes = [await backend.create(spec) for _ in range(OPEN)]
            for sandbox in sandboxes:
                await sandbox.exec("true", timeout=60)
            await asyncio.sleep(0.5)
            figures.append((pss_mb(group) - before) / OPEN)
            for sandbox in sandboxes:
                await sandbox.close()
        print(json.dumps(figures), flush=True)


class Worker:
    """A process with a control group of its own that runs a checkout's code."""

    def __init__(self, checkout: Path, given: argparse.Namespace, number: int) -> None:
        from benchmarks.machine import python_path

        self.group = control_group(number)
        arguments = ["--worker", str(self.group), "--backend", given.backend]
        arguments += ["--image", given.image] if given.image else []
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            env={**os.environ, "PYTHONPATH": python_path(checkout)},
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rounds: list[list[float]] = []

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        for _ in range(100):  # its helper may take a moment longer
            try:
                self.group.rmdir()
                return
            except OSError:
                time.sleep(0.05)

    def round(self, word: str, keep: bool = True) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("a worker has ended")
        if keep:
            self.rounds.append(json.loads(answer))


def report(workers: dict[str, Worker]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    print(f"{'CPU ms, median':<24}" + "".join(f"{part:>20}" for part in PARTS))
    for name, worker in workers.items():
        columns = [[of[at] for of in worker.rounds if len(of) > at] for at in range(len(PARTS))]
        found[name] = {part: statistics.median(column) for part, column in zip(PARTS, columns, strict=True)}
        print(f"{name:<24}" + "".join(f"{found[name][part]:>20.2f}" for part in PARTS))
    if len(workers) == 2:
        here, there = (worker.rounds for worker in workers.values())
        paired = [
            [mine[at] / other[at] for mine, other in zip(here, there, strict=True) if len(mine) > at]
            for at in range(len(PARTS))
        ]
        found["ratio"] = {part: statistics.median(column) for part, column in zip(PARTS, paired, strict=True)}
        print(f"{'ratio of a round':<24}" + "".join(f"{found['ratio'][part]:>20.2f}" for part in PARTS))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the folder of another commit's checkout")
    parser.add_argument("--backend", default="local")
    parser.add_argument("--image", help="the image of the sandboxes")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        (given.worker / "cgroup.procs").write_text("0")
        asyncio.run(work(given.worker, given.backend, given.image))
        return 0
    from benchmarks.machine import disturbance

    print(f"fixed work takes {disturbance():.2f} times its best")
    checkouts = {"this checkout": ROOT} | ({"the other": given.against.resolve()} if given.against else {})
    workers = {name: Worker(path, given, number) for number, (name, path) in enumerate(checkouts.items())}
    try:
        for worker in workers.values():
            worker.round("memory", keep=False)
        for number in range(given.rounds):
            for name in random.sample(sorted(workers), len(workers)):
                workers[name].round("memory" if number % 10 == 0 else "time")
        found = report(workers)
    finally:
        for worker in workers.values():
            worker.close()
    print(f"fixed work takes {disturbance():.2f} times its best")
    print(json.dumps({name: {part: round(value, 2) for part, value in of.items()} for name, of in found.items()}))
    return int(given.backend == "local" and found["this checkout"]["create, close"] > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
