"""A run of a million rollouts and the commands that read it: CPU time, memory and disk, and whether they stay flat.

    python -m benchmarks.million [--rollouts 1000 10000 100000] [--phase 1 2] [--at-once 64] [--folder KEPT]

`--rollouts 1000000` is the run of the name; on two quiet cores it takes about half an hour in Phase 1. Each command is
a process of its own: `lachesis process` against a model server that answers at once, whose cost is not counted; the
same command again, which finds everything done; `export`, `trajectories validate`, and in Phase 2, where there are
samples, `verify`; and `lachesis view`, until its index has all rollouts.

CPU is of the process and its children, memory its peak. What bends is named at the end: a command that needs `BENDS`
times the CPU for a rollout, or `GROWS` MB for each 100,000 rollouts more, than at the size before.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fake_process import ToolScript, fake_process
from benchmarks.instant_server import instant_server
from benchmarks.machine import cpu_seconds, disturbance
from benchmarks.view import Viewer
from lachesis.base_env import HermesAgentBaseEnv
from lachesis_testing.fake_server import fake_tokenizer

BENDS, GROWS = 1.25, 40.0


class Numbers(HermesAgentBaseEnv):
    """Questions without tools, a turn each."""

    name = "numbers"
    toolsets = ()

    async def setup(self) -> None:
        self.items = itertools.count()

    async def get_next_item(self) -> Any:
        return {"question": f"What is the square of {next(self.items)}?"}

    def format_prompt(self, item: Any) -> str:
        return str(item["question"])

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(len(item["question"]) % 2)


@dataclass(frozen=True)
class Cost:
    """Of one command."""

    cpu: float
    """Seconds."""
    memory: float
    """MB, at most."""
    wall: float
    """Seconds."""


def command(*arguments: object) -> Cost:
    """Run `lachesis ARGUMENTS` to its end. Raises RuntimeError with what it printed."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "lachesis", *map(str, arguments)], stdout=said, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            text = said.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"lachesis {arguments[0]} ended with {child.returncode}:\n{text}")
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, time.perf_counter() - began)


def view(folder: Path, rollouts: int) -> Cost:
    """`lachesis view`, from its start until it has counted all rollouts."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as index:
        viewer = Viewer(folder, Path(index) / "index.sqlite")
        try:
            while viewer.total("rollouts") < rollouts:
                time.sleep(0.5)
            return Cost(cpu_seconds(viewer.process.pid), viewer.peak_mb(), time.perf_counter() - began)
        finally:
            viewer.stop()


@contextmanager
def model(phase: int, folder: Path) -> Iterator[list[object]]:
    """A model server in its own process; yields the flags that name it."""
    if phase == 1:
        with instant_server() as port:
            yield ["-m", "instant", "-b", f"http://127.0.0.1:{port}/0/v1"]
        return
    tokenizer = folder / "tokenizer"
    fake_tokenizer().save_pretrained(str(tokenizer))
    with fake_process(ToolScript(0, tokens=20)) as server:
        of_server = {"server_type": "vllm", "tokenizer_name": tokenizer}
        flags = [part for name, value in of_server.items() for part in (f"--openai.{name}", value)]
        yield ["-m", "fake", "-b", server.base_url, *flags]


def played(phase: int, rollouts: int, at_once: int, folder: Path) -> Iterator[tuple[str, Cost]]:
    """The commands, one after another."""
    out = folder / "run"
    groups = out / "groups.jsonl"
    with model(phase, folder) as flags:
        process = ["process", f"{__file__}:Numbers", "-n", rollouts, "-r", 1, "-o", out, *flags]
        process += ["--env.max_num_workers", at_once, "--openai.num_max_requests_at_once", 4096]
        yield "process", command(*process)
        yield "process, again", command(*process)
    yield "export", command("export", groups, "--format", "openai", "--out", folder / "openai.jsonl")
    yield "validate", command("trajectories", "validate", out / "trajectory_samples.jsonl")
    if phase == 2:
        yield "verify", command("verify", groups)
    yield "view", view(folder, rollouts)


def bends(found: dict[tuple[int, str, int], Cost]) -> list[str]:
    """What grows faster than the rollouts, in words."""
    said = []
    for (phase, name, rollouts), cost in found.items():
        smaller = [size for of, other, size in found if (of, other) == (phase, name) and size < rollouts]
        if not smaller:
            continue
        before = found[phase, name, max(smaller)]
        # What a process costs before its first rollout is in the smallest run alone to be seen.
        start = found[phase, name, min(smaller)].cpu if len(smaller) > 1 else 0.0
        cpu, earlier = (cost.cpu - start) / rollouts, (before.cpu - start) / max(smaller)
        if len(smaller) > 1 and cpu > BENDS * earlier:
            said.append(
                f"Phase {phase}, {name}: {1e3 * cpu:.2f} ms a rollout of {rollouts}, before {1e3 * earlier:.2f}"
            )
        growth = (cost.memory - before.memory) / (rollouts - max(smaller)) * 100_000
        if growth > GROWS and cost.memory - before.memory > GROWS:
            said.append(f"Phase {phase}, {name}: {growth:.0f} MB of memory for each 100,000 rollouts more")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--phase", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--at-once", type=int, default=64, help="rollouts in flight")
    parser.add_argument("--folder", type=Path, help="where the runs are written, and stay")
    given = parser.parse_args()
    console = Console(width=100)
    console.print(f"disturbance {disturbance():.2f}")
    found: dict[tuple[int, str, int], Cost] = {}
    for phase, rollouts in itertools.product(given.phase, sorted(given.rollouts)):
        with ExitStack() as stack:
            root = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = root / f"phase-{phase}-{rollouts}"
            folder.mkdir(parents=True)
            table = Table("command", "CPU s", "ms a rollout", "memory MB", "wall s", box=None)
            for name, cost in played(phase, rollouts, given.at_once, folder):
                found[phase, name, rollouts] = cost
                each = f"{1e3 * cost.cpu / rollouts:.3f}"
                table.add_row(name, f"{cost.cpu:.1f}", each, f"{cost.memory:.0f}", f"{cost.wall:.1f}")
            sizes = {path.name: path.stat().st_size for path in (folder / "run").iterdir()}
            kept = ", ".join(
                f"{name} {size / rollouts / 1e3:.1f}" for name, size in sizes.items() if size > 100 * rollouts
            )
            console.print(f"\nPhase {phase}, {rollouts} rollouts; kB a rollout: {kept}")
            console.print(table)
    said = bends(found)
    console.print("\n" + ("\n".join(said) or "nothing bends"))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
