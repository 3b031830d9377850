"""What `lachesis view` needs for 100,000 rollouts: MB/s of CPU time of its index, memory, first page, search.

    python -m benchmarks.view [--rollouts 100000] [--folder KEPT]

A small run with tokens is played against the fake model server, whose groups are then written again and again with other
rewards, times and words. The server of the pages is a process of its own, as `lachesis view` is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import orjson

from benchmarks.fake_process import ToolScript
from benchmarks.machine import disturbance
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.runs.server_settings import ServerConfig
from lachesis.testing.fake_server import FakeServer
from lachesis.testing.fake_server.policies import WORDS
from lachesis.view.index import Index

GROUP, TURNS, RUNS = 8, 4, 5
INDEX_MB, FIRST_PAGE = 20.0, 1.0
"""MB a second of CPU time at least; seconds of the first page at most."""


class Tasks(HermesAgentBaseEnv):
    """Tasks whose rewards are drawn."""

    name = "viewed"

    async def setup(self) -> None:
        self.draw = Random(0)
        self.items = itertools.count()

    async def get_next_item(self) -> Any:
        return f"task {next(self.items)}: " + " ".join(self.draw.choices(WORDS, k=60))

    def format_prompt(self, item: Any) -> str:
        return str(item)

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return float(self.draw.random() < 0.4)


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


def written(groups: list[dict[str, Any]], root: Path, rollouts: int) -> float:
    """Write runs of `rollouts` together; their size in MB."""
    draw = Random(1)
    texts = [orjson.dumps(group).decode() for group in groups]
    size = 0
    for run in range(RUNS):
        path = root / f"run-{run}" / "groups.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for number in range(rollouts // GROUP // RUNS):
                group = orjson.loads(texts[number % len(texts)])
                group |= {"number": number, "item_key": f"{run:08x}{number:08x}-1", "timestamp": _stamp(run, number)}
                for n, rollout in enumerate(group["rollouts"]):
                    rollout["reward"] = float(draw.random() < 0.2 + 0.5 * number * RUNS * GROUP / rollouts)
                    for message in group["messages"][n]:
                        if isinstance(message["content"], str):
                            message["content"] += f" word{draw.randrange(10**6)}"
                size += file.write(orjson.dumps(group) + b"\n")
    return size / 1e6


def _stamp(run: int, number: int) -> str:
    seconds = 86400 * run + 2 * number
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_790_000_000 + seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the runs are written, and stay")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = folder / "runs"
        if not root.exists():
            size = written(asyncio.run(play(folder, 16)), root, arguments.rollouts)
        size = sum(path.stat().st_size for path in root.rglob("*.jsonl")) / 1e6
        before = time.process_time()
        index = Index(root, folder / "index.sqlite")
        index.refresh()
        spent = time.process_time() - before
        index.close()
        print(f"{size:.0f} MB, index {(folder / 'index.sqlite').stat().st_size / 1e6:.0f} MB")
        print(f"{size / spent:.1f} MB a second of CPU time ({spent:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
