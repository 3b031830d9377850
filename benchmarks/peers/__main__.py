"""The CPU time of a rollout and of a tool turn: Lachesis beside its peers, each by its own command, in one run.

    python -m benchmarks.peers [NAME ...] [--turns 10] [--at-once 64] [--rounds 3] [--against CHECKOUT]

The server answers at once, in a process of its own that is not counted. The tool does nothing; in the second table it
is a command, `true`. CPU is that of a command and of all that it started. A short run is subtracted from a long one, so
that neither has imports and loading in it; the time of a tool turn is what rollouts of `--turns` tool turns cost more
than those of none. The sides take turns, in a new order each round; the medians are shown, and as multiples of a client
of aiohttp and orjson that has no agent, no record and no file.

What a side does for it differs, as its users have it: `lachesis process` writes groups, ShareGPT trajectories and a
report; Inspect and verifiers evaluate, and write their logs; atroposlib's `process` writes its file and plays one item
after the other; mini-swe-agent writes a file for each rollout, and runs commands without a sandbox.

Peers come from where `make test-guests` and `make test-programs` install them; one that is missing is named.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.agent_loop import tokenizer_folder
from benchmarks.instant_server import instant_server
from benchmarks.machine import disturbance, python_path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path("~/.cache/lachesis").expanduser()
GUESTS = Path(os.environ.get("GUESTS", CACHE / "guests"))
PROGRAMS = Path(os.environ.get("PROGRAMS", CACHE / "programs"))
OWN = Path(sys.executable).parent
"""Where the programs of this environment are."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One run of a side."""

    url: str
    rollouts: int
    at_once: int
    turns: int
    folder: Path
    """A new one, for what the run writes."""


Command = Callable[[Ask], Sequence[str | Path]]


@dataclass(frozen=True, slots=True)
class Side:
    """A peer, and the command by which its users play rollouts."""

    label: str
    command: Command
    tool: str = "noop"
    needs: Path | None = None
    package: str = ""
    """The distribution beside `needs` whose version is shown."""
    most: int = 1024
    """Rollouts of a long run: the slower the side, the fewer."""
    path: Path = ROOT
    """The checkout that is imported."""

    def name(self) -> str:
        if not self.package or not self.needs:
            return self.label
        folders = [str(path) for path in self.needs.parents[1].glob("lib/python*/site-packages")]
        return f"{self.label} {next(iter(distributions(name=self.package, path=folders))).version}"


def own(environment: str, *more: str) -> Command:
    def command(ask: Ask) -> Sequence[str | Path]:
        flags = {
            "-n": ask.rollouts,
            "-r": 1,
            "-c": ask.at_once,
            "-m": "instant",
            "-b": ask.url,
            "-o": ask.folder / "out",
            "--max-turns": ask.turns + 1,
        }
        given = [str(part) for pair in flags.items() for part in pair]
        return [OWN / "lachesis", "process", f"{HERE / 'ours.py'}:{environment}", *given, *more]

    return command


def floor(ask: Ask) -> Sequence[str | Path]:
    return [sys.executable, "-m", "benchmarks.peers.floor", ask.url, str(ask.rollouts), str(ask.at_once)]


def atropos(ask: Ask) -> Sequence[str | Path]:
    settings = {
        "env.group_size": ask.at_once,
        "env.total_steps": ask.rollouts // ask.at_once,
        "env.use_wandb": False,
        "env.include_messages": True,
        "env.ensure_scores_are_not_same": False,
        "env.tokenizer_name": tokenizer_folder(ask.folder),
        "env.data_path_to_save_groups": ask.folder / "groups.jsonl",
        "openai.base_url": ask.url,
        "openai.api_key": "none",
        "openai.model_name": "instant",
        "openai.health_check": False,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "benchmarks.peers.atropos", "process", *flags]


def inspect(ask: Ask) -> Sequence[str | Path]:
    task = [f"{HERE / 'inspect_task.py'}@conversation", "-T", f"count={ask.rollouts}"]
    model = ["--model", "openai-api/instant/instant", "--model-base-url", ask.url]
    limits = ["--max-connections", str(ask.at_once), "--max-samples", str(ask.at_once)]
    output = ["--display", "none", "--log-dir", str(ask.folder)]
    return [GUESTS / "inspect/bin/inspect", "eval", *task, *model, *limits, *output]


def verifiers(ask: Ask) -> Sequence[str | Path]:
    settings: dict[str, object] = {
        "--env.agent.harness.id": "null",
        "--env.agent.runtime.type": "subprocess",
        "--env.interception.type": "server",
        "--client.base-url": ask.url,
        "--client.api-key-var": "INSTANT_API_KEY",
        "--model": "instant",
        "-n": ask.rollouts,
        "--num-rollouts": 1,
        "-c": ask.at_once,
        "--output-dir": ask.folder,
    }
    flags = [part for name, value in settings.items() for part in (name, str(value))]
    return [GUESTS / "verifiers/bin/vf-eval", "verifiers_noop", *flags, "--no-push", "--rich", "None"]


def mini(ask: Ask) -> Sequence[str | Path]:
    python = PROGRAMS / "mini-swe-agent/bin/python"
    return [python, HERE / "mini_agent.py", ask.url, str(ask.rollouts), str(ask.at_once), ask.folder]


SIDES = {
    "floor": Side("aiohttp and orjson alone", floor, most=4096),
    "lachesis": Side("lachesis process", own("Noop")),
    "atropos": Side("atroposlib, process", atropos, needs=OWN / "python", package="atroposlib", most=192),
    "inspect": Side("Inspect, eval", inspect, needs=GUESTS / "inspect/bin/inspect", package="inspect_ai", most=192),
    "verifiers": Side(
        "verifiers, eval", verifiers, needs=GUESTS / "verifiers/bin/vf-eval", package="verifiers", most=96
    ),
    "shell": Side("lachesis process, sandboxed", own("Shell", "--backend", "local"), tool="terminal", most=256),
    "mini": Side(
        "mini-swe-agent, no sandbox",
        mini,
        tool="bash",
        needs=PROGRAMS / "mini-swe-agent/bin/python",
        package="mini-swe-agent",
        most=128,
    ),
}


def cpu(side: Side, port: int, rollouts: int, at_once: int, turns: int) -> float:
    """CPU seconds of one run, and of all processes that it started and waited for."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{port}/{side.tool}/{turns}/v1"
        command = [str(part) for part in side.command(Ask(url, rollouts, at_once, turns, Path(folder)))]
        paths = os.pathsep.join([python_path(side.path), str(HERE), str(ROOT)])
        given = {**os.environ, "PYTHONPATH": paths, "INSTANT_API_KEY": "none", "MSWEA_SILENT_STARTUP": "1"}
        output = Path(folder, "output.txt")
        with output.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=given, cwd=folder)
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said = output.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{' '.join(command[:4])} ended with {process.returncode}:\n{said}")
        return used.ru_utime + used.ru_stime


def measure(side: Side, port: int, at_once: int, turns: int) -> tuple[float, float]:
    """CPU milliseconds of a rollout without tools, and of a tool turn."""

    def rollout(turns: int) -> float:
        few = at_once
        many = max(side.most, 2 * few)
        used = cpu(side, port, many, at_once, turns) - cpu(side, port, few, at_once, turns)
        return 1e3 * used / (many - few)

    bare = rollout(0)
    return bare, (rollout(turns) - bare) / turns


def show(title: str, found: dict[str, list[tuple[float, float]]], floor: tuple[float, float] | None) -> None:
    table = Table(title=title)
    for column in ("CPU ms", "a rollout", "times the client", "a tool turn", "times the client"):
        table.add_column(column, justify="left" if column == "CPU ms" else "right")
    for name, runs in found.items():
        cells = []
        for place in range(2):
            value = statistics.median(run[place] for run in runs)
            spread = "" if len(runs) == 1 else f" ({min(r[place] for r in runs):.2f}-{max(r[place] for r in runs):.2f})"
            cells += [f"{value:.2f}{spread}", f"{value / floor[place]:.1f}" if floor else ""]
        table.add_row(name, *cells)
    Console(width=140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *SIDES], default=[], metavar="NAME", help=", ".join(SIDES))
    parser.add_argument("--turns", type=int, default=10, help="tool turns of the longer rollouts")
    parser.add_argument("--at-once", type=int, default=64, help="rollouts in flight")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="the folder of another commit's checkout, measured too")
    given = parser.parse_args()
    sides = {name: SIDES[name] for name in given.names or SIDES}
    for name, side in list(sides.items()):
        if side.needs and not side.needs.exists():
            print(f"{side.label}: not installed, {side.needs} is not there (see make test-guests, make test-programs)")
            del sides[name]
    if given.against:
        other = given.against.resolve()
        for name in ("lachesis", "shell"):
            if name in sides:
                label = f"{SIDES[name].label}, {other.name}"
                sides[f"{name}, other"] = replace(SIDES[name], label=label, path=other)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    before = disturbance()
    with instant_server() as port:
        for number in range(given.rounds):
            for name in random.sample(sorted(sides), len(sides)):
                found[name].append(measure(sides[name], port, given.at_once, given.turns))
                print(f"round {number + 1}, {name}: {found[name][-1][0]:.2f} and {found[name][-1][1]:.2f}", flush=True)
    floor = found.get("floor")
    least = (statistics.median(run[0] for run in floor), statistics.median(run[1] for run in floor)) if floor else None
    for title, shell in (("a tool that does nothing", False), ("a command, `true`", True)):
        rows = {sides[name].name(): runs for name, runs in found.items() if (sides[name].tool != "noop") is shell}
        if rows:
            show(f"{title}; {given.at_once} at once, {given.rounds} rounds", rows, None if shell else least)
    print(f"fixed work takes {before:.2f} and {disturbance():.2f} times its best")
    return 0


if __name__ == "__main__":
    sys.exit(main())
