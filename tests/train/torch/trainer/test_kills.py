"""`kill -9` of the trainer: what it trained is in the weights once, as in a run that nobody killed."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis_messages.records.jsonl import read_lines
from lachesis_train.trainer.checkpoints import Checkpoint
from tests.run import ALL
from tests.train.torch.trainer.conftest import GROUP_SIZE, GROUPS_A_STEP, RunningEngine, filled_api

STEPS = 9
KILLS = 20 if ALL else 1


async def launch(run: Path, url: str, engine: RunningEngine | None, *more: str) -> asyncio.subprocess.Process:
    settings = {
        "env.rollout_server_url": url,
        "env.group_size": GROUP_SIZE,
        "env.batch_size": GROUP_SIZE * GROUPS_A_STEP,
        "training.base_model": "tiny",
        "training.num_steps": STEPS,
        "training.lora_rank": 4,
        "training.learning_rate": 1e-2,
        "training.save_checkpoint_interval": 3,
        "training.port": 0,
        "training.run_dir": run,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    with (run.parent / f"{run.name}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "launch_training.py",
            *flags,
            *more,
            env={**os.environ, **(engine.environ if engine else {})},
            stdout=log,
            stderr=log,
        )


def final(run: Path, engine: RunningEngine) -> tuple[Checkpoint, dict[str, Any]]:
    checkpoint = Checkpoint.read(run)
    assert checkpoint is not None
    assert checkpoint.sampler is not None
    return checkpoint, engine.tensors(checkpoint.sampler)


LOSSES = """
environments:
- {env: tool_call, name: one, training: {loss: ppo}}
- {env: tool_call, name: two, training: {loss: cispo, clip_high: 0.01}}
"""


@pytest.mark.parametrize("environments", [(), ("one", "two")])
async def test_a_killed_trainer_ends_with_the_weights_of_one_that_was_not_killed(
    tmp_path: Path, engine: RunningEngine, environments: tuple[str, ...]
) -> None:
    import torch

    groups = STEPS * GROUPS_A_STEP
    (tmp_path / "settings.yaml").write_text(LOSSES if environments else "")
    more = ("--config", str(tmp_path / "settings.yaml"))
    async with filled_api(tmp_path / "whole", groups, environments=environments) as api:
        process = await launch(tmp_path / "whole_run", api.url, engine, *more)
        assert await process.wait() == 0, (tmp_path / "whole_run.log").read_text()
    draw, kills, starts = random.Random(random.getrandbits(32)), 0, 0
    async with filled_api(tmp_path / "killed", groups, environments=environments) as api:
        while True:
            process = await launch(tmp_path / "killed_run", api.url, engine, *more)
            starts += 1
            if kills < KILLS:
                await _wait_for_work(tmp_path / "killed_run", process)
                await asyncio.sleep(draw.uniform(0, 1.0))
                if process.returncode is None:
                    process.kill()
                    kills += 1
            code = await process.wait()
            assert code in (0, -9), (tmp_path / "killed_run.log").read_text()
            if code == 0:
                break
        assert api.state.acknowledged == STEPS
        assert not api.state.waiting
    whole, of_whole = final(tmp_path / "whole_run", engine)
    killed, of_killed = final(tmp_path / "killed_run", engine)
    assert whole.step == killed.step == STEPS
    assert whole.group_ids == killed.group_ids == [f"g{at}" for at in range(groups)]
    assert of_whole.keys() == of_killed.keys()
    for name, tensor in of_whole.items():
        assert torch.equal(tensor, of_killed[name]), name
    for run in ("whole_run", "killed_run"):
        lines = list(read_lines(tmp_path / run / "metrics.jsonl"))
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        for name in environments:
            assert all(line[f"train/{name}/share"] == 0.5 and line[f"train/{name}/tokens"] for line in lines)
            assert all(f"train/{name}/reward_low" in line and line[f"train/{name}/refused"] == 0 for line in lines)
    print(f"{kills} kills, {starts} starts")


async def _wait_for_work(run: Path, process: asyncio.subprocess.Process) -> None:
    """Until this start has loaded its weights: before that, kills find nothing."""
    log = run.parent / f"{run.name}.log"
    begin = log.stat().st_size
    while True:
        if process.returncode is not None or b"is served at" in log.read_bytes()[begin:]:
            return
        await asyncio.sleep(0.05)
