"""A stock `run-api` and a stock Atropos environment, both unchanged, train through our trainer."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from lachesis_messages.records.jsonl import read_lines
from tests.support.ports import free_port
from tests.support.stock_run_api import StockRunApi
from tests.train.torch.trainer.conftest import RunningEngine

STEPS = 24
HERE = Path(__file__).parent


async def test_a_stock_environment_at_a_stock_api_learns(tmp_path: Path, engine: RunningEngine) -> None:
    tokenizer, port = str(Path.home() / ".cache/lachesis/models/tiny-qwen3-1"), free_port()
    async with StockRunApi() as api:
        trainer = {
            "env.rollout_server_url": api.url,
            "env.group_size": 8,
            "env.batch_size": 32,
            "env.tokenizer_name": tokenizer,
            "training.base_model": "tiny",
            "training.num_steps": STEPS,
            "training.lora_rank": 8,
            "training.learning_rate": 2e-2,
            "training.uncertified": "allow",
            "training.port": port,
            "training.run_dir": tmp_path / "run",
            "training.max_importance_ratio": 2.0,
        }
        environment = {
            "env.rollout_server_url": api.url,
            "env.tokenizer_name": tokenizer,
            "env.ensure_scores_are_not_same": "false",  # once it has learned, all are right, and the steps go on
            "openai.base_url": f"http://127.0.0.1:{port}/v1",
            "openai.model_name": "tiny",
            "openai.tokenizer_name": tokenizer,
        }
        with (tmp_path / "log").open("wb") as log:
            environ = {**os.environ, **engine.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
            training = await asyncio.create_subprocess_exec(
                *(sys.executable, "launch_training.py", *_flags(trainer)), env=environ, stdout=log, stderr=log
            )
            async with asyncio.timeout(250):
                while b"waiting for a batch" not in (tmp_path / "log").read_bytes():  # a stock environment gives up
                    assert training.returncode is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.1)
            serving = await asyncio.create_subprocess_exec(
                *(sys.executable, HERE / "stock_environment.py", "serve", *_flags(environment)),
                env=environ,
                stdout=log,
                stderr=log,
            )
            try:
                ends = [asyncio.ensure_future(process.wait()) for process in (training, serving)]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=250)
                assert training.returncode == 0, (tmp_path / "log").read_text()[-5000:]
            finally:
                for process in (training, serving):
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
    rewards = [line["train/reward"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    print([round(reward, 3) for reward in rewards])
    assert len(rewards) == STEPS
    assert max(rewards) > rewards[0] + 0.2  # later it may get worse again: the stock environment's samples are old


def _flags(settings: dict[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]
