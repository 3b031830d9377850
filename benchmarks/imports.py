"""The import time of each room, in CPU seconds of a fresh interpreter, without the interpreter's start.

python benchmarks/imports.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

RUNS = 7
ROOMS = (
    *("lachesis", "lachesis_messages.history", "lachesis_tools", "backends", "tool_call_parsers", "lachesis_client"),
    "lachesis_tools, lachesis_messages.history",
)
LIMIT = 0.3
"""The limit in seconds for a leaf."""


def cpu_seconds(code: str) -> float:
    """User and system time of one fresh interpreter that runs `code`."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main() -> int:
    bare = statistics.median(cpu_seconds("pass") for _ in range(RUNS))
    print(f"bare interpreter {bare:.3f} s; medians of {RUNS} runs, above that:")
    late = []
    for room in ROOMS:
        cpu_seconds(f"import {room}")  # writes the byte code
        taken = statistics.median(cpu_seconds(f"import {room}") for _ in range(RUNS)) - bare
        print(f"  import {room:<22} {taken:.3f} s")
        if (
            room in ("lachesis_messages.history", "lachesis_tools", "lachesis_tools, lachesis_messages.history")
            and taken > LIMIT
        ):
            late.append(room)
    if late:
        print(f"over {LIMIT} s: {', '.join(late)}")
    return bool(late)


if __name__ == "__main__":
    sys.exit(main())
