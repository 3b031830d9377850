"""The CPU time of a tool turn in a whole `process`, and the time that its event loop keeps others waiting.

    python benchmarks/process_lag.py [--at-once 64 1000] [--phase 1 2] [--latency 0-2] [--sandbox] [--against CHECKOUT]

Each run is a separate process: the command line, an environment whose tool and reward cost nothing, every group,
trajectory and the report written to disk, and the model server in another process. Rollouts have 10 tool turns, and
groups 8 rollouts. With `--against`, the folder of another commit's checkout is played in the same rounds, in a new
order each time.

CPU is that of all threads from the first item to the written report, for each turn. The wait of the loop is measured
in two ways: by a task, from one of its turns to the next, and by a thread, from `call_soon_threadsafe` to the call.
Each is given as CPU time of the loop's own thread, which a busy machine does not change; as CPU time of the process,
which adds the threads that may have held the interpreter; and as wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fake_process import ToolScript, fake_process, observation
from benchmarks.instant_server import instant_server
from benchmarks.machine import disturbance, python_path
from benchmarks.process_worker import CLOCKS
from lachesis_testing.fake_server import Codec, fake_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TURNS = 10
GROUP = 8
LIMITS = {"turn": 0.5, "p99": 20.0, "longest": 60.0}
"""Milliseconds, at 1,000 rollouts: CPU of a turn in Phase 1, and the wait by the CPU time of the loop's thread."""


def run(
    checkout: Path,
    arguments: list[str],
    folder: Path,
    at_once: int,
    groups: int,
    **of_worker: Any,
) -> dict[str, Any]:
    """The figures of one run in a separate process."""
    out = folder / f"run-{time.monotonic_ns()}"
    env = {
        "total_steps": groups,
        "group_size": GROUP,
        "max_num_workers": at_once // GROUP,
        "data_path_to_save_groups": out / "groups.jsonl",
        "max_agent_turns": of_worker["turns"] + 1,
        "max_token_length": 1024,
    }
    flags = [part for name, value in env.items() for part in (f"--env.{name}", str(value))]
    flags += ["--openai.num_max_requests_at_once", "4096", "--openai.timeout", "600"]
    given = {
        "arguments": ["process", *flags, *arguments],
        **of_worker,
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "process_worker.py"), json.dumps(given)]
    environment = {**os.environ, "PYTHONPATH": python_path(checkout)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:2])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return found


def show(label: str, runs: list[dict[str, Any]]) -> dict[str, float]:
    """Print the medians of the runs, and the longest wait of all. Returns what the limits are about."""

    def median(name: str) -> float:
        return float(statistics.median(run[name] for run in runs))

    print(
        f"{label}: {median('CPU'):.3f} ms of CPU a turn, {median('loop CPU'):.3f} of them in the loop's thread; "
        f"{median('collections'):.3f} of garbage collection, {median('full collections'):.0f} full ones, the longest "
        f"{median('longest collection'):.1f} ms; {median('turns'):.0f} turns in {median('seconds'):.1f} s"
    )
    worst: dict[str, float] = {"turn": median("CPU"), "p99": 0.0, "longest": 0.0}
    for by in ("task", "thread"):
        for phase in ("start", "play", "end"):
            cells = []
            for clock in CLOCKS:
                of_runs = [run[f"{by}, {phase}, {clock}"] for run in runs]
                p50, p99 = (statistics.median(found[at] for found in of_runs) for at in (0, 1))
                longest = max(found[2] for found in of_runs)
                cells.append(f"{clock} {p50:6.1f} {p99:7.1f} {longest:7.1f}")
                if clock == "loop CPU" and phase != "start":
                    worst = worst | {"p99": max(worst["p99"], p99), "longest": max(worst["longest"], longest)}
            print(f"    by a {by:<6}  {phase:<5}  {'   '.join(cells)}")
    sys.stdout.flush()
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="+", default=[64, 1000], help="rollouts in flight")
    parser.add_argument("--phase", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--turns", type=int, default=TURNS, help="tool turns of a rollout, before its answer")
    parser.add_argument("--latency", default="0-0", help="seconds of the model for a turn: LOW-HIGH")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=3, help="rollouts of a run, as a multiple of those in flight")
    parser.add_argument("--against", type=Path, help="the folder of another commit's checkout")
    parser.add_argument("--only", type=Path, help="the folder of a checkout to measure instead of this one")
    parser.add_argument("--sandbox", action="store_true", help="every rollout starts a local sandbox")
    given = parser.parse_args()
    low, _, high = given.latency.partition("-")
    latency = float(low), float(high or low)
    checkouts = {"this checkout": given.only or ROOT} | ({"the other": given.against} if given.against else {})
    print(f"fixed work takes {disturbance():.2f} times its best; p50, p99 and longest wait in ms")
    ok = True
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for phase in given.phase:
            if phase == 1:
                port = stack.enter_context(instant_server(latency))
                url, observed = f"http://127.0.0.1:{port}/{given.turns}/v1", "done"
                server = ["--openai.base_url", url, "--openai.model_name", "instant"]
            else:
                tokenizer = fake_tokenizer()
                observed = observation(Codec(tokenizer))
                tokenizer.save_pretrained(str(folder / "tokenizer"))
                policy = ToolScript(given.turns, names=("noop",))
                settings = stack.enter_context(fake_process(policy, vary=True, latency=latency))
                server = ["--openai.base_url", settings.base_url, "--openai.model_name", settings.model_name]
                server += ["--openai.server_type", "vllm", "--openai.tokenizer_name", str(folder / "tokenizer")]
            for at_once in given.at_once:
                groups = given.times * max(at_once, 256) // GROUP
                runs: dict[str, list[Any]] = {name: [] for name in checkouts}
                for _ in range(given.rounds):
                    for name in random.sample(sorted(runs), len(runs)):
                        path = checkouts[name].resolve()
                        options = {"observation": observed, "sandbox": given.sandbox, "turns": given.turns}
                        runs[name].append(run(path, server, folder, at_once, groups, **options))
                for name, of_checkout in runs.items():
                    worst = show(f"Phase {phase}, {at_once} at once, {name}", of_checkout)
                    if name == "this checkout" and at_once == 1000:
                        print(json.dumps({name: round(value, 2) for name, value in worst.items()} | {"limits": LIMITS}))
                        ok = ok and all(worst[name] <= limit for name, limit in LIMITS.items() if phase == 1)
    print(f"fixed work takes {disturbance():.2f} times its best")
    return not ok


if __name__ == "__main__":
    sys.exit(main())
