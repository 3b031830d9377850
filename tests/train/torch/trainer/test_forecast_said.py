"""A run that the CPU cannot carry says so before anything is sampled: real commands and a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lachesis_train.engine import start_engine
from lachesis_train.tinker_sdk import LOCAL_KEY, LoraShape, Service
from lachesis_train.trainer.forecast import Work, forecast
from tests.train.test_forecast import SMOLLM2, settings

ENVIRONMENT = f"{Path(__file__).parents[3] / 'support/ascii_env.py'}:AsciiEnv"
OTHER_ENGINES = ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")


def test_both_commands_refuse_a_step_that_cannot_fit_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    context = 1 << 24
    (model / "config.json").write_text(json.dumps({**SMOLLM2, "max_position_embeddings": context}))
    (model / "model.safetensors").write_bytes(b"")
    folder = tmp_path / "run"
    flags = {
        "training.base_model": str(model),
        "training.run_dir": str(folder),
        "training.num_steps": "3",
        "training.max_token_trainer_length": str(context),
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", value)]
    environ = {name: value for name, value in os.environ.items() if name not in OTHER_ENGINES}
    for command in (["lachesis", "train", "--env", ENVIRONMENT], ["lachesis_train.verbs.launch_training"]):
        done = subprocess.run(
            [sys.executable, "-m", *command, *given],
            capture_output=True,
            text=True,
            env=environ,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "a step does not fit into the memory of this machine" in done.stderr
        assert "lower training.max_token_trainer_length to" in done.stderr
        assert not folder.exists()


async def test_the_time_of_a_step_is_measured_and_a_long_one_is_a_warning(tmp_path: Path, monkeypatch) -> None:
    for name in OTHER_ENGINES:
        monkeypatch.delenv(name, raising=False)
    chosen = settings(Path("tiny"), 4096)
    async with start_engine("tiny", state_dir=tmp_path, log=tmp_path / "log") as url:
        training = await Service(url, LOCAL_KEY).train("tiny", LoraShape(rank=4))
        short = await forecast(training, chosen, Work(2, 32, 3))
        long = await forecast(training, chosen, Work(1 << 20, 4095, 3))
        unknown = await forecast(training, chosen)
    assert len(short) == 1
    assert short[0].startswith("3 steps of at most 2 sequences of 32 tokens: up to about ")
    assert "the longest step that the settings allow" in unknown[0]
    assert not any("warning" in line for line in unknown)
    assert "warning: a step may take" in long[1]
    assert "training.max_token_trainer_length" in long[1]
    assert "env.batch_size" in long[1]
