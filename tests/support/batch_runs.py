"""Batch runs over a scripted server, in this process; and, as a program, runs that are killed at random moments."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.cli import main as lachesis
from lachesis_data.verbs.batch import main
from tests.support.scripted_server import Answer, say


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def flags(rows: Path | str, out: Path, base_url: str, *more: str, run: str = "run", size: int = 7) -> list[str]:
    """The arguments of a run without tools."""
    given = ["--dataset_file", str(rows), "--batch_size", str(size), "--run_name", run, "--output", str(out)]
    given += ["--model", "scripted", "--base_url", base_url, "--api_key", "x", "--openai.max_retries", "0"]
    chosen = (
        []
        if any(each.startswith(("--distribution", "--env.enabled")) for each in more)
        else ["--env.enabled_toolsets", "[]"]
    )
    return [*given, "--env.max_infra_retries", "0", *chosen, *more]


def entries(folder: Path) -> list[dict[str, Any]]:
    """The lines of all batch files."""
    paths = sorted(folder.glob("batch_*_output.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def keys(folder: Path, kind: str = "") -> list[str]:
    """Of the samples that were kept, `discarded` or `failed`."""
    path = folder / f"groups{'.' * bool(kind)}{kind}.jsonl"
    return [json.loads(line)["item_key"] for line in path.read_text(encoding="utf-8").splitlines()]


def thinks(request: Mapping[str, Any]) -> Answer:
    """A model that reasons, except where the prompt says `no thought`, and that refuses what says `refuse`."""
    prompt = request["messages"][-1]["content"]
    if "refuse" in prompt:
        return 400
    return say(f"An answer to {prompt}", **({} if "no thought" in prompt else {"reasoning_content": f"About {prompt}"}))


def kill_at_random(seed: int, kills: int, arguments: Sequence[str]) -> None:
    """Start the run so many times and kill each start, then let it end. Forks, as starts of Python take seconds."""
    from lachesis_compat.atropos import player as atropos_player  # noqa: F401
    from lachesis_data.batch import prompts, rows, run  # noqa: F401 (imported once, and not by every child)

    gc.freeze()  # a start collects garbage: not among the modules again
    moments = random.Random(seed)
    begun = Path(arguments[arguments.index("--output") + 1], "run", "checkpoint.json")
    for number in range(kills + 1):
        before = _changed(begun)
        if not (child := os.fork()):
            os._exit(main(arguments))
        if number < kills:
            while number % 5 and _changed(begun) == before:  # every fifth is killed while it starts
                time.sleep(0.005)
            time.sleep(moments.uniform(0.0, 0.3))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def on_a_full_disk(arguments: Sequence[str]) -> None:
    """Run on a file system that is too small, then make room and run again, then where nothing can be written."""
    folder = arguments[arguments.index("--output") + 1]

    def mount(*options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "none", folder], check=True)

    mount("size=72k")
    print("full", lachesis(["batch", *arguments]), flush=True)
    written = b"".join(path.read_bytes() for path in Path(folder, "run").glob("*.jsonl"))
    print("whole", all(json.loads(line) for line in written.splitlines()) and written[-1:] == b"\n", flush=True)
    mount("remount", "size=64m")
    print("room", lachesis(["batch", *arguments]), flush=True)
    print("lines", sum(text.count(b"\n") for text in (path.read_bytes() for path in Path(folder).glob("run/batch_*"))))
    mount("remount", "ro")
    print("read-only", lachesis(["batch", *arguments, "--samples", "2"]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "full":
        on_a_full_disk(sys.argv[2:])
    else:
        kill_at_random(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
