"""Two environments in one run of `lachesis train`, in real processes."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from lachesis_train.trainer.checkpoints import Checkpoint
from tests.train.torch.test_whole_path import KILLS, ROOT, Run, check_that_nothing_is_lost_or_doubled

ASCII = f"{ROOT / 'tests/support/ascii_env.py'}:AsciiEnv"
ENDING = f"{ROOT / 'tests/support/ascii_env.py'}:EndingEnv"


def config(folder: Path, *entries: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (file := folder / "settings.yaml").write_text(yaml.safe_dump({"environments": [*entries]}))
    return file


async def test_both_learn_by_their_weights_and_nothing_is_lost_whichever_process_is_killed(tmp_path: Path) -> None:
    entries = (
        {"env": ASCII, "name": "long", "weight": 2},
        {"env": ASCII, "name": "short", "settings": {"max_token_length": 8}, "training": {"loss": "ppo"}},
    )
    victims = ["api", "trainer", "long", "short"] * KILLS
    random.shuffle(victims)
    run = Run(
        tmp_path / "run",
        steps=3 * len(victims) + 3,
        learning_rate=0.01,
        interval=2,
        config=config(tmp_path, *entries),
        env__batch_size="48",
        env__steps_per_eval="4",
        env__eval_items="4",
    )

    async def kill() -> None:
        for number, name in enumerate(victims):
            while len(run.metrics) < 3 * number + 2 or name not in run.supervisor.running:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(random.uniform(0.0, 0.3))
            run.supervisor.running[name].signal(signal.SIGKILL)

    killing = asyncio.create_task(kill())
    await run.ended()
    await killing
    assert run.supervisor.restarts == dict.fromkeys(("api", "trainer", "long", "short"), KILLS)
    check_that_nothing_is_lost_or_doubled(run)
    metrics = run.metrics
    sequences: Counter[str] = Counter()
    for groups in run.groups().values():
        for group in groups:
            of = group["samples"][0]["spans"][0]["sampling"]["max_tokens"]
            sequences["short" if of == 8 else "long"] += len(group["samples"])
    share = sequences["long"] / sequences.total()
    # Each kill of the API, and each start of an environment, forgets at most what a batch was rounded by.
    assert abs(share - 2 / 3) < (2 + len(victims)) * 8 / sequences.total(), sequences
    assert share == pytest.approx(sum(step["train/long/share"] for step in metrics) / len(metrics))
    assert sum(step["train/long/tokens"] + step["train/short/tokens"] for step in metrics) == sum(
        step["train/tokens"] for step in metrics
    )
    for name in ("long", "short"):
        rewards = [step[f"train/{name}/reward"] for step in metrics if f"train/{name}/reward" in step]
        assert rewards[-1] > rewards[0] + 0.2, (name, rewards)
        (evaluated, *_) = (run.folder / "eval" / name).glob("step-*/metrics.json")
        figures = json.loads(evaluated.read_text())["results"]["all"]
        assert figures["eval/avg_reward_low"] <= figures["eval/avg_reward"] <= figures["eval/avg_reward_high"]
        assert (run.folder / "logs" / f"{name}.log").stat().st_size
    page = (run.folder / "report.html").read_text()
    assert page.index("Reward by environment") < page.index("Evaluations")
    assert "Share of the sequences" in page, "a chart, or among the figures that never changed"
    for entry in ("step 4: long ", "step 4: short "):
        assert entry in page


async def test_the_run_goes_on_without_an_environment_that_has_no_more_items(tmp_path: Path) -> None:
    entries = ({"env": ENDING, "name": "few", "settings": {"items": 4}}, {"env": ASCII, "weight": 3})
    run = Run(tmp_path / "run", steps=24, learning_rate=1e-4, config=config(tmp_path, *entries), env__batch_size="32")
    said: list[str] = []
    run.plan.say = said.append
    await run.ended()
    assert said == ["few has ended on its own (its last line says why); the run continues with AsciiEnv"]
    few = [round(32 * step.get("train/few/share", 0.0)) for step in run.metrics]
    assert sum(few) == 4 * 8, "all of its groups are trained"
    assert few[-1] == 0
    checkpoint = Checkpoint.read(run.folder)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.settings.get("environments.few.loss")) == (24, None)
