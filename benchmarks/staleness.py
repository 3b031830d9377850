"""What a cap on the age of groups costs, and whom it leaves out.

    python -m benchmarks.staleness

`serve`'s pipeline plays 400 items for a trainer at Atropos' `run-api` (a separate process). The time of a group is
log-normal: 50 ms in the middle, some 100 times as long for the slowest of 400; half of the variance is the item's, half
the attempt's. One play in twenty fails and is repeated. The trainer takes a batch of 4 groups and trains for 60 ms.

For each policy: the ages of the groups in batches, the distance between the durations that are trained and those of the
tasks (two-sample Kolmogorov-Smirnov; 0 if each item is trained as it was first drawn) with its p-value, what was left
out or played again, and the share of its time in which the trainer waited for a batch. Fails if `wait` exceeds its cap
or leaves anything out.
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.run_api import register, run_api
from lachesis.runs.decisions import Kept
from lachesis.runs.failures import FailureBrake
from lachesis.runs.pipeline import Pipeline
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_train.outbox import Outbox
from lachesis_train.relay import RelayPace
from lachesis_train.rollout_api import EnvDescription, RolloutApi
from lachesis_train.rollout_api_sink import RolloutApiSink
from lachesis_train.serve_result import ServeResult, age_quantile

ITEMS, GROUP_SIZE, GROUPS_A_BATCH, WORKERS = 400, 2, 4, 48
MEDIAN, SIGMA = 0.05, 1.5
TRAINING = 0.06
FAULTS = 0.05
POLICIES: tuple[dict[str, Any], ...] = (
    {"max_staleness": 4, "when_stale": "mark"},
    {"max_staleness": 8, "when_stale": "wait"},
    {"max_staleness": 4, "when_stale": "wait"},
    {"max_staleness": 4, "when_stale": "drop"},
    {"max_staleness": 4, "when_stale": "replay"},
)


def seconds(number: int, attempt: int) -> float:
    """Of a play of an item."""
    of_item, of_attempt = (random.Random(f"{number}/{part}").gauss() for part in ("item", attempt))
    return MEDIAN * math.exp(SIGMA * (of_item + of_attempt) / math.sqrt(2))


@dataclass
class Environment:
    """Plays a group by sleeping."""

    numbers: Any = field(default_factory=lambda: iter(range(ITEMS)))
    plays: Counter[int] = field(default_factory=Counter)
    faults: random.Random = field(default_factory=lambda: random.Random(0))

    async def next_item(self) -> dict[str, int] | None:
        number = next(self.numbers, None)
        return None if number is None else {"number": number}

    async def play(self, item: dict[str, int], key: str) -> list[tuple[int, float]]:
        if self.faults.random() < FAULTS:
            raise ConnectionError("injected")
        number = item["number"]
        self.plays[number] += 1
        taken = seconds(number, self.plays[number])
        await asyncio.sleep(taken)
        return [(number, taken)]


def build(played: tuple[int, float], info: Any) -> Kept:
    number, taken = played
    row = [number, 1, 2]
    group = {
        "tokens": [row] * GROUP_SIZE,
        "masks": [[-100, *row[1:]]] * GROUP_SIZE,
        "scores": [0.0, 1.0],
        "inference_logprobs": [[1.0, -0.5, -0.5]] * GROUP_SIZE,
        "group_overrides": {"seconds": taken},
    }
    return Kept(group, tokens=4, rewards=[0.0, 1.0])


class Trainer:
    """Takes batches from the API, and trains for a fixed time on each."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.durations: list[float] = []
        self.waited = 0.0
        self.ending = False

    async def register(self) -> None:
        await register(self._session, self._url, batch_size=GROUP_SIZE * GROUPS_A_BATCH, max_token_len=100)
        await self.step()

    async def step(self) -> bool:
        started = time.monotonic()
        async with self._session.get(f"{self._url}/batch") as answer:
            batch = (await answer.json())["batch"]
        if batch:
            self.durations += [group["group_overrides"]["seconds"] for group in batch]
            await asyncio.sleep(TRAINING)
            return True
        await asyncio.sleep(0.01)
        self.waited += time.monotonic() - started
        return False

    async def train(self) -> None:
        """Until there is nothing left, once `ending` is set."""
        ending = False
        while await self.step() or not ending:  # as it was before the step: the last batch may come after that
            ending = self.ending


async def run(session: aiohttp.ClientSession, url: str, policy: dict[str, Any]) -> tuple[ServeResult, Trainer, float]:
    async with session.get(f"{url}/reset_data") as answer:
        await answer.read()
    trainer, environment = Trainer(session, url), Environment()
    await trainer.register()
    console = Console(file=io.StringIO())
    with tempfile.TemporaryDirectory() as folder:
        sink: RolloutApiSink[tuple[int, float]] = RolloutApiSink(
            HermesAgentEnvConfig(total_steps=-1, steps_per_eval=0, max_batches_offpolicy=4, **policy),
            workers=WORKERS,
            build=build,
            api=RolloutApi(url),
            env=EnvDescription("staleness", max_token_length=100, group_size=GROUP_SIZE),
            outbox=Outbox(Path(folder) / "spool", {}),
            refused=Path(folder) / "refused.jsonl",
            console=console,
            item_pause=0.05,
            pace=RelayPace(poll=0.01),
        )
        pipeline = Pipeline(
            title="staleness",
            next_item=environment.next_item,
            play=environment.play,
            sink=sink,
            console=console,
            brake=FailureBrake(console, ITEMS),
        )
        started = time.monotonic()
        training = asyncio.create_task(trainer.train())
        await pipeline.run()
        taken = time.monotonic() - started
        trainer.ending = True
        await training
        return sink.result(pipeline), trainer, taken


def distance(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Kolmogorov and Smirnov's distance of two samples, and its asymptotic p-value (Smirnov 1948)."""
    one, two = sorted(first), sorted(second)
    found = max(abs(bisect_right(one, at) / len(one) - bisect_right(two, at) / len(two)) for at in (*one, *two))
    scaled = found * math.sqrt(len(one) * len(two) / (len(one) + len(two)))
    if scaled < 0.3:  # the series converges slowly here, and its value is 1
        return found, 1.0
    return found, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 100))


async def main() -> int:
    tasks = [seconds(number, 1) for number in range(ITEMS)]
    failed = False
    async with aiohttp.ClientSession() as session, run_api(session) as url:
        print(f"tasks: median {sorted(tasks)[ITEMS // 2]:.3f} s, slowest {max(tasks):.1f} s")
        print("cap  policy   age p50  p99  most  over cap  trained  left out  replayed   KS        p   waits     time")
        for policy in POLICIES:
            result, trainer, taken = await run(session, url, policy)
            found, p = distance(trainer.durations, tasks)
            cap, name = policy["max_staleness"], policy["when_stale"]
            ages, left_out = result.ages, result.refused.get("too old", 0)
            print(
                f"{cap:>3}  {name:<8} {age_quantile(ages, 0.5):>6} {age_quantile(ages, 0.99):>5} {max(ages):>5} "
                f"{result.over_age:>9} {len(trainer.durations):>8} {left_out:>9} "
                f"{sum(result.replayed.values()):>9} {found:>6.3f} {p:>8.4f} {trainer.waited / taken:>6.0%} "
                f"{taken:>6.1f} s",
                flush=True,
            )
            if name == "wait":
                failed |= max(ages) > cap or Counter(trainer.durations) != Counter(tasks)
    return int(failed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
