"""What `lachesis view` needs for 100,000 rollouts: MB/s of CPU time of its index, memory, first page, search.

    python -m benchmarks.view [--rollouts 100000] [--folder KEPT]

A small run with tokens is played against the fake model server. Its groups are written again and again with other
rewards, times and words: five runs, the first with samples. All figures are of one process of `lachesis view`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import orjson

from benchmarks.fake_process import ToolScript
from benchmarks.machine import cpu_seconds, disturbance
from lachesis import Reward
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.settings.server_settings import ServerConfig
from lachesis_testing.fake_server import FakeServer
from lachesis_testing.fake_server.policies import WORDS

GROUP, TURNS, RUNS = 8, 4, 5
INDEX_MB, A_PAGE = 20.0, 1.0
"""MB a second of CPU time at least; seconds of any page at most."""


class Tasks(HermesAgentBaseEnv):
    """Tasks whose rewards are drawn, with components."""

    name = "viewed"

    async def setup(self) -> None:
        self.draw = Random(0)
        self.items = itertools.count()

    async def get_next_item(self) -> Any:
        return f"task {next(self.items)}: " + " ".join(self.draw.choices(WORDS, k=60))

    def format_prompt(self, item: Any) -> str:
        return str(item)

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Reward:
        right = float(self.draw.random() < 0.4)
        return Reward(right, {"right": right, "brief": self.draw.random(), "polite": self.draw.random()})


async def play(folder: Path, groups: int) -> list[dict[str, Any]]:
    """A few groups as `process` writes them, with samples."""
    async with FakeServer(ToolScript(TURNS, names=["todo"]), vary=True, keep_requests=0) as model:
        model.tokenizer.save_pretrained(str(folder / "tokenizer"))
        server = ServerConfig(
            base_url=model.base_url, model_name="fake", server_type="vllm", tokenizer_name=str(folder / "tokenizer")
        )
        config = Tasks.env_config_cls(
            total_steps=groups,
            group_size=GROUP,
            enabled_toolsets=["todo"],
            max_token_length=1024,
            max_agent_turns=TURNS + 2,
            data_path_to_save_groups=str(folder / "played" / "groups.jsonl"),
        )
        await Tasks(config, [server]).process_manager()
    return [json.loads(line) for line in (folder / "played" / "groups.jsonl").read_text().splitlines()]


def written(groups: list[dict[str, Any]], root: Path, rollouts: int) -> None:
    """Write runs of `rollouts` together."""
    draw = Random(1)
    texts = [orjson.dumps(group).decode() for group in groups]
    for run in range(RUNS):
        path = root / f"run-{run}" / "groups.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for number in range(rollouts // GROUP // RUNS):
                group = orjson.loads(texts[number % len(texts)])
                if run:
                    group["samples"] = []
                group |= {"number": number, "item_key": f"{run:08x}{number:08x}-1", "timestamp": _stamp(run, number)}
                for n, rollout in enumerate(group["rollouts"]):
                    rollout["reward"] = float(draw.random() < 0.2 + 0.5 * number * RUNS * GROUP / rollouts)
                    for message in group["messages"][n]:
                        if isinstance(message["content"], str):
                            message["content"] += f" word{draw.randrange(10**6)}"
                file.write(orjson.dumps(group) + b"\n")


def _stamp(run: int, number: int) -> str:
    seconds = 86400 * run + 2 * number
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_790_000_000 + seconds))


class Viewer:
    """A process of `lachesis view`, with a new index."""

    def __init__(self, root: Path, index: Path) -> None:
        code = "import sys; from lachesis.cli import main; sys.exit(main(['view', *sys.argv[1:]]))"
        command = [sys.executable, "-c", code, str(root), "--port", "0", "--index", str(index)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def get(self, path: str) -> tuple[str, float]:
        """A page, and its seconds."""
        before = time.perf_counter()
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            text = answer.read().decode()
        return text, time.perf_counter() - before

    def total(self, path: str) -> int:
        found = re.search(r'id="total">([\d,]+)<', self.get(path)[0])
        assert found is not None
        return int(found[1].replace(",", ""))

    def peak_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM:"))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)  # a shell in the background has its children ignore SIGINT
        self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the runs are written, and stay")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = folder / "runs"
        if not root.exists():
            written(asyncio.run(play(folder, 16)), root, arguments.rollouts)
        for path in folder.glob("index.*"):
            path.unlink()
        size = sum(path.stat().st_size for path in root.rglob("*.jsonl")) / 1e6
        count = arguments.rollouts // GROUP // RUNS * RUNS * GROUP
        slower = disturbance()
        began = time.perf_counter()
        viewer = Viewer(root, folder / "index.sqlite")
        stack.callback(viewer.stop)
        address = time.perf_counter() - began
        _, first = viewer.get("")
        idle = cpu_seconds(viewer.process.pid)
        while viewer.total("rollouts") < count:
            time.sleep(0.5)
        spent = cpu_seconds(viewer.process.pid) - idle
        print(f"{count} rollouts, {size:.0f} MB; disturbance {slower:.2f}")
        print(f"address after {address:.2f} s, first page while it indexes {1000 * first:.0f} ms")
        print(f"index: {size / spent:.0f} MB a second of CPU time, the pages that watched it included")
        print(f"index file {(folder / 'index.sqlite').stat().st_size / 1e6:.0f} MB, memory {viewer.peak_mb():.0f} MB")
        pages = {
            "runs": "",
            "curves of a run": "curves?runs=run-0&over=groups",
            "rollouts, latest first": "rollouts",
            "rollouts by reward, page 100": "rollouts?sort=reward&page=100",
            "search for a rare word": "rollouts?q=word123456",
            "search for a common word": "rollouts?q=water",
            "a rollout with neighbours": "rollout/run-1/5/3?q=water&sort=-reward",
        }
        slowest = first
        for name, path in pages.items():
            seconds = min(viewer.get(path)[1] for _ in range(3))
            slowest = max(slowest, seconds)
            print(f"{name}: {1000 * seconds:.0f} ms")
        ok = size / spent >= INDEX_MB and slowest < A_PAGE
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
