"""Megabytes a second of CPU time that files of trajectories are read, converted and checked at, and the memory for it.

    python benchmarks/trajectories.py [--entries 100000] [--megabytes 30]

Speed: a file of long trajectories (four tool turns and reasoning, 10 kB each), the best of three rounds. Memory: the
peak of a whole process with each command, over `--entries` short entries.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import disturbance
from lachesis_data.files.entry_files import convert_entries, deduplicate, read_entries
from lachesis_data.files.file_statistics import FileStatistics
from lachesis_data.files.formats import CONVERTIBLE, converter
from lachesis_data.files.validation import validate_entry
from lachesis_messages.records.entries import to_trajectory_entry
from lachesis_messages.records.jsonl import JsonlWriter

CONVERSION_MB = 20.0
"""MB of input a second of CPU time, at least, where nothing else runs."""
MEMORY_MB = 200.0
ROUNDS = 3

COMMAND = """
import sys
from benchmarks.machine import memory_mb
from lachesis.cli import main
code = main(["trajectories", *sys.argv[1:]])
print("peak", memory_mb("VmHWM"), file=sys.stderr)
sys.exit(code)
"""


def entries(count: int, turns: int, words: int) -> Iterator[dict[str, Any]]:
    """Trajectories of random words, every tenth twice."""
    draw = random.Random(0)
    known = [f"word{number}" for number in range(5000)]

    def text(size: int) -> str:
        return " ".join(draw.choices(known, k=size))

    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    names = ("terminal", "read_file", "write_file")
    functions = [{"name": name, "description": text(12), "parameters": parameters} for name in names]
    tools = [{"type": "function", "function": function} for function in functions]
    for number in range(count):
        messages: list[dict[str, Any]] = [{"role": "user", "content": text(words)}]
        for turn in range(turns):
            function = {"name": "terminal", "arguments": json.dumps({"command": text(15)})}
            call = {"id": f"call_{number}_{turn}", "type": "function", "function": function}
            thought = text(words)
            messages.append({"role": "assistant", "content": text(10), "reasoning": thought, "tool_calls": [call]})
            result = json.dumps({"output": text(words), "exit_code": 0, "error": None})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        messages.append({"role": "assistant", "content": text(30), "reasoning": text(words)})
        entry = to_trajectory_entry(
            messages, tools, model="m", completed=True, reward=1.0, rollout_id=str(number)
        ).entry
        yield entry
        if number % 10 == 9:
            yield entry


def write(path: Path, count: int, turns: int, words: int) -> float:
    """Write the file; its size in MB."""
    with JsonlWriter(path) as writer:
        batch = []
        for entry in entries(count, turns, words):
            batch.append(entry)
            if len(batch) == 500:
                writer.write_all(batch)
                batch = []
        writer.write_all(batch)
    return path.stat().st_size / 1e6


def speed(megabytes: float, work: Callable[[], object]) -> float:
    """MB a second of CPU time, the best of some rounds."""
    best = 0.0
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        best = max(best, megabytes / (time.process_time() - started))
    return best


def speeds(folder: Path, megabytes: int) -> dict[str, float]:
    path, out = folder / "long.jsonl", folder / "out"
    size = write(path, megabytes * 95, 4, 60)

    def stats() -> None:
        found = FileStatistics()
        for line in read_entries([path]):
            found.add(line.entry)

    def validate() -> None:
        for line in read_entries([path]):
            assert not validate_entry(line.entry)

    def conversion(to: str) -> Callable[[], object]:
        return lambda: convert_entries(read_entries([path]), out, converter(to))

    work: dict[str, Callable[[], object]] = {f"convert to {to}": conversion(to) for to in CONVERTIBLE}
    work |= {"stats": stats, "validate": validate, "dedup": lambda: deduplicate(read_entries([path]), out)}
    return {name: speed(size, run) for name, run in work.items()}


def peaks(folder: Path, count: int) -> dict[str, float]:
    """The peak memory of the process of each command, in MB."""
    path = folder / "many.jsonl"
    size = write(path, count, 1, 5)
    print(f"memory: {count + count // 10} entries, {size:.0f} MB")
    commands = {
        "stats": ["stats", path, "--json"],
        "validate": ["validate", path],
        "convert to trl": ["convert", path, "--to", "trl", "--out", folder / "out.jsonl"],
        "convert to parquet": ["convert", path, "--to", "parquet", "--out", folder / "out.parquet"],
        "dedup": ["dedup", path, "--out", folder / "out.jsonl"],
    }
    found = {}
    for name, command in commands.items():
        run = [sys.executable, "-c", COMMAND, *map(str, command)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        ran = subprocess.run(run, capture_output=True, text=True, check=True, env=environment)
        found[name] = float(ran.stderr.split("peak")[1])
        print(f"{name:26} {found[name]:7.0f} MB", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--megabytes", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        disturbed = disturbance()
        print(f"a fixed piece of work costs {disturbed:.2f} times its best")
        found = speeds(Path(name), given.megabytes)
        for what, rate in found.items():
            print(f"{what:26} {rate:7.1f} MB/s", flush=True)
        memory = peaks(Path(name), given.entries)
    slow = {name: rate for name, rate in found.items() if rate < CONVERSION_MB}
    large = {name: size for name, size in memory.items() if size > MEMORY_MB}
    for what in (*slow, *large):
        print(f"over its limit: {what}")
    return int(bool(slow or large))


if __name__ == "__main__":
    raise SystemExit(main())
