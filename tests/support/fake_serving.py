"""`serve` over a made-up environment whose rollouts take a moment and whose groups name themselves in their tokens.

Run as a program it is the environment process that tests kill: `python -m tests.support.fake_serving URL FOLDER ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from lachesis.runs.decisions import Kept
from lachesis.runs.failures import FailureBrake
from lachesis.runs.pipeline import Pipeline
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_train.outbox import Outbox
from lachesis_train.relay import RelayPace
from lachesis_train.rollout_api import EnvDescription, RolloutApi
from lachesis_train.rollout_api_sink import RolloutApiSink
from lachesis_train.serve_result import ServeResult

GROUP_SIZE = 2
LENGTH = 40
PACE = RelayPace(poll=0.05, longest_delay=0.3)


def payload(number: int, *, group_size: int = GROUP_SIZE, length: int = LENGTH) -> dict[str, Any]:
    """Group `number`: its number is the first token of every sequence, and all of it is a function of the number."""
    draw = random.Random(number)
    tokens = [[number, *(draw.randrange(50_000) for _ in range(length - 1))] for _ in range(group_size)]
    return {
        "tokens": tokens,
        "masks": [[-100, -100, *row[2:]] for row in tokens],
        "scores": [float(index) for index in range(group_size)],
        "inference_logprobs": [[1.0, 1.0, *(-draw.random() for _ in row[2:])] for row in tokens],
        "messages": [[{"role": "user", "content": f"item {number}"}] for _ in tokens],
        "group_overrides": {},
        "generation_params": {"temperature": 1.0},
    }


def number_of(group: dict[str, Any]) -> int:
    number: int = group["tokens"][0][0]
    return number


class Items:
    """0, 1, 2, ... up to `count`."""

    def __init__(self, count: int) -> None:
        self.left = iter(range(count))

    async def __call__(self) -> dict[str, int] | None:
        number = next(self.left, None)
        return None if number is None else {"number": number}


async def play(item: dict[str, int], key: str) -> int:
    await asyncio.sleep(0.002 + 0.01 * random.random())
    return item["number"]


def build(number: int, info: Any) -> Kept:
    return Kept(payload(number), tokens=GROUP_SIZE * (LENGTH - 2), rewards=[0.0, 1.0])


class DeadlyApi(RolloutApi):
    """Kills its process right before or right after group `at` was sent: when nobody here knows whether it arrived."""

    def __init__(self, url: str, *, when: str, at: int) -> None:
        super().__init__(url)
        self.when = when
        self.left = at

    async def send(self, body: bytes, *, connection: int) -> int:
        self.left -= 1
        if self.left == 0 and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        buffer = await super().send(body, connection=connection)
        if self.left == 0 and self.when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return buffer


class ServeRun(Pipeline[int]):
    """The pipeline of `serve`, with its result."""

    sink: RolloutApiSink[int]

    async def serve(self) -> ServeResult:
        await self.run(signals=True)
        return self.sink.result(self)


OF_THE_PIPELINE = ("next_item", "play", "on_group", "timeout", "grace_period")


def make_run(url: str, folder: Path, count: int, *, api: RolloutApi | None = None, **changes: Any) -> ServeRun:
    """A run over `count` groups; `changes` replace arguments or settings of the pipeline and its sink."""
    console = changes.pop("console", Console(stderr=True, width=200))
    pipeline = {"next_item": Items(count), "play": play, "grace_period": 5.0}
    pipeline |= {name: changes.pop(name) for name in list(changes) if name in OF_THE_PIPELINE}
    play_one = pipeline["play"]

    async def play_item(item: Any, key: str) -> list[int]:
        return [await play_one(item, key)]

    pipeline["play"] = play_item
    settings = {"total_steps": -1, "steps_per_eval": 0}
    settings |= {name: changes.pop(name) for name in list(changes) if name in HermesAgentEnvConfig.model_fields}
    arguments: dict[str, Any] = {
        "build": build,
        "api": api or RolloutApi(url),
        "env": EnvDescription("fake", max_token_length=LENGTH, group_size=GROUP_SIZE),
        "outbox": Outbox(folder / "spool", {"group_size": GROUP_SIZE}),
        "refused": folder / "groups.refused.jsonl",
        "config": HermesAgentEnvConfig(**settings),
        "workers": 8,
        "item_pause": 0.05,
        "console": console,
        "pace": PACE,
    }
    sink, brake = RolloutApiSink(**(arguments | changes)), FailureBrake(console, count + 1)
    return ServeRun(title="fake", sink=sink, console=console, brake=brake, **pipeline)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("--when", default="never")
    parser.add_argument("--at", type=int, default=0)
    given = parser.parse_args()
    api = DeadlyApi(given.url, when=given.when, at=given.at)
    result = asyncio.run(make_run(given.url, given.folder, given.count, api=api).serve())
    print(f"{result.sent} {result.waiting} {result.reason}", flush=True)


if __name__ == "__main__":
    main()
