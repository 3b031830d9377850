"""Whether `eval` is honest where 20 % of the samples are lost: its mean, and how often its interval holds it.

    python -m benchmarks.evaluation_coverage [--seeds 200] [--items 40]

Each seed is a whole evaluation with its own items, model server, folder and metrics.json. An item's chance of a pass is
drawn from 0.2 to 0.9. Of ten samples one is lost to the model server, which answers 503, and one to its sandbox, which
is gone when the reward looks into it; neither depends on the item or the outcome. Fails if the mean of all evaluations
is further than three standard errors from the truth, or if fewer than 93 or more than 99 % of the intervals hold the
mean of all possible items. The mean of the items at hand is held more often: the interval allows for other items.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends import Availability, SandboxInfo, SandboxLost, SandboxSpec
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.settings.server_settings import ServerConfig
from lachesis_testing.scripted_server import ScriptedServer, say

LOWEST, HIGHEST, LOST = 0.2, 0.9, 0.1
TRUTH = (LOWEST + HIGHEST) / 2


class Sandbox:
    """Has one file, which is empty, or is gone when that is read."""

    id, workdir, home, python = "sandbox", "/workspace", "/home/agent", None

    def __init__(self, lost: bool) -> None:
        self.lost = lost

    def leased(self, guard: Any) -> Sandbox:
        return self

    async def read_bytes(self, path: str, *, limit: int | None = None) -> bytes:
        if self.lost:
            raise SandboxLost("the sandbox is gone")
        return b""

    async def close(self) -> None:
        pass


class Flaky:
    """A backend that loses one sandbox in ten."""

    name = "flaky"

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(f"sandboxes {seed}")

    async def check(self) -> Availability:
        return Availability(True, "flaky")

    async def create(self, spec: SandboxSpec) -> Any:
        return Sandbox(self.random.random() < LOST / (1 - LOST))  # of all samples: the model server comes before

    async def sandboxes(self) -> list[SandboxInfo]:
        return []

    async def reap(self, *, run_id: str | None = None, everyone: bool = False) -> list[SandboxInfo]:
        return []


class Chances(HermesAgentBaseEnv):
    """Items that are passed with the chance that they name."""

    name = "chances"
    toolsets: ClassVar[Sequence[str]] = ()
    number = 0
    """Of the evaluation: its items are drawn with it."""
    outcomes = random.Random()

    async def get_next_item(self) -> Any:
        return None

    async def get_eval_items(self) -> Sequence[Any]:
        drawn = random.Random(f"items {self.number}")
        return [{"number": n, "chance": drawn.uniform(LOWEST, HIGHEST)} for n in range(self.config.eval_items)]

    def format_prompt(self, item: Any) -> str:
        return f"Item {item['number']}."

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        await ctx.read_bytes("answer")
        return float(self.outcomes.random() < item["chance"])


@dataclass
class Evaluation:
    truth: float
    """Of its items."""
    mean: float
    low: float
    high: float
    lost: float

    def holds(self, truth: float) -> bool:
        return self.low <= truth <= self.high


async def evaluation(seed: int, items: int, samples: int, folder: Path) -> Evaluation:
    dice = random.Random(f"server {seed}")
    async with ScriptedServer(lambda _: 503 if dice.random() < LOST else say("Done.")) as server:
        config = Chances.env_config_cls(
            eval_items=items,
            eval_samples=samples,
            eval_temperature=1.0,
            enabled_toolsets=[],
            terminal_backend="benchmarks.evaluation_coverage:Flaky",
            terminal_options={"seed": seed},
            data_dir_to_save_evals=str(folder),
            max_failed_groups=1000,
            max_infra_retries=0,
        )
        servers = [ServerConfig(base_url=server.base_url, model_name="scripted", api_key="x", max_retries=0)]
        env = Chances(config, servers)
        env.number = seed
        env.outcomes = random.Random(f"outcomes {seed}")
        env.console = Console(file=io.StringIO())
        await env._run_evaluate()
        chances = [item["chance"] for item in await env.get_eval_items()]
    figures = json.loads((folder / "metrics.json").read_text())["results"]["all"]
    names = ("eval/avg_reward", "eval/avg_reward_low", "eval/avg_reward_high", "eval/left_out_rollouts")
    mean, low, high, lost = (figures[name] for name in names)
    return Evaluation(fmean(chances), mean, low, high, lost / items / samples)


async def measure(seeds: int, items: int, samples: int) -> bool:
    found = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(await evaluation(seed, items, samples, Path(folder)))
    means, errors = [each.mean for each in found], [each.mean - each.truth for each in found]
    inside = sum(each.holds(TRUTH) for each in found) / seeds
    unbiased = all(
        abs(fmean(values) - truth) < 3 * pstdev(values) / math.sqrt(seeds)
        for values, truth in ((means, TRUTH), (errors, 0.0))
    )
    print(
        f"{items} items x {samples}: {100 * fmean(each.lost for each in found):.1f} % lost; mean {fmean(means):.4f} "
        f"+- {pstdev(means) / math.sqrt(seeds):.4f}, truth {TRUTH:.4f}; against the items' own "
        f"{fmean(errors):+.4f} +- {pstdev(errors) / math.sqrt(seeds):.4f}; {100 * inside:.1f} % of {seeds} intervals "
        f"hold the truth, {100 * sum(each.holds(each.truth) for each in found) / seeds:.1f} % that of the items",
        flush=True,
    )
    return unbiased and (seeds < 200 or 0.93 <= inside <= 0.99)


async def main(options: argparse.Namespace) -> int:
    return 0 if all([await measure(options.seeds, options.items, samples) for samples in (1, 4)]) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--items", type=int, default=40)
    sys.exit(asyncio.run(main(parser.parse_args())))
