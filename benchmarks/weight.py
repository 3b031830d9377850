"""How much of the project one rollout loads, and how often it moves between modules.

python -m benchmarks.weight

Plays one rollout of `terminal` with the reference policy (Phase 1) and with a token server (Phase 2), each in a process
of its own. Lines are those of the modules of ours that were imported by the end. A move is a call from one module of
ours into another one, from the start of the rollout on; going on after an `await` is none.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LIMITS = {"Phase 1": (30_590, 1_600), "Phase 2": (44_630, 5_000)}
"""Lines, and moves, that a change may not exceed. A busy machine adds some hundred moves: of timers, and of looks at
what killed runs left. So a rollout with more is played again, and the fewest count."""
TRIES = 4
CHILD = """
import json, sys, threading
OURS = ("backends", "environments", "lachesis", "tool_call_parsers")
def ours(name): top = name.partition(".")[0]; return top in OURS or top.startswith("lachesis_")
moves, playing = 0, 0
def profile(frame, event, _):
    global moves, playing
    name = frame.f_globals.get("__name__", "")
    if event != "call" or frame.f_lasti > 4 or not ours(name): return
    if name == "lachesis.loop.rollout_player" and not playing: playing = 1
    caller = frame.f_back
    while caller is not None and not ours(caller.f_globals.get("__name__", "")): caller = caller.f_back
    if playing and caller is not None and caller.f_globals["__name__"] != name: moves += 1
from lachesis.cli import main
sys.setprofile(profile); threading.setprofile(profile)
code = main(sys.argv[1:])
sys.setprofile(None); threading.setprofile(None)
files = {getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if ours(name)}
loaded = [path for path in files if path.endswith(".py")]
lines = sum(sum(1 for _ in open(path, "rb")) for path in loaded)
print(json.dumps({"code": code, "modules": len(loaded), "lines": lines, "moves": moves}))
"""
PLAYED = ("process", "terminal", "-n", "1", "-r", "1")


def lightest(folder: Path, phase: str, *arguments: str) -> dict[str, int]:
    found = weighed(folder, *arguments, "-o", f"{phase} 1")
    for number in range(2, TRIES + 1):
        if found["moves"] <= LIMITS[phase][1]:
            break
        found = min(found, weighed(folder, *arguments, "-o", f"{phase} {number}"), key=lambda each: each["moves"])
    return found


def weighed(folder: Path, *arguments: str) -> dict[str, int]:
    command = [sys.executable, "-c", CHILD, *PLAYED, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("code") == 0, done.stdout
    return found


def main() -> int:
    over = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weighed(folder, "-m", "reference", "-o", "first")  # on a new machine it prepares what sandboxes share
        rows = {"Phase 1": lightest(folder, "Phase 1", "-m", "reference")}
        server = [sys.executable, "-m", "lachesis", "fake-server", "--port", "0", "--policy", "tools"]
        with subprocess.Popen(
            [*server, "--save-tokenizer", "tokens"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            tokens = ("--openai.server_type", "vllm", "--openai.tokenizer_name", "tokens")
            rows["Phase 2"] = lightest(folder, "Phase 2", "-m", "fake", "-b", url, *tokens)
            process.terminate()
    for phase, row in rows.items():
        lines, moves = LIMITS[phase]
        print(
            f"{phase}: {row['modules']} modules, {row['lines']:,} lines of ours, {row['moves']} moves between modules"
        )
        if row["lines"] > lines or row["moves"] > moves:
            over.append(phase)
            print(f"  over the limit of {lines:,} lines or {moves:,} moves")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
