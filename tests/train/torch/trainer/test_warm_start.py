"""`lachesis train --warm-start`: the reference policy plays, the model is fine-tuned on it, and the run goes on."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console

if not os.environ.get("LACHESIS_NEED_TORCH"):
    pytest.importorskip("torch", reason="make test-train installs torch")
    pytest.importorskip("tinker", reason="make test-train installs the SDK of Tinker")

from lachesis_tokens.samples.verification import verify
from lachesis_train.sft.settings import SftSettings
from lachesis_train.tinker_sdk import Service
from lachesis_train.trainer.checkpoints import Checkpoint
from lachesis_train.trainer.engine_link import EngineLink
from lachesis_train.verbs.launch_training import read_settings
from lachesis_train.verbs.sft_training import warm_start
from lachesis_train.verbs.training_parts import LazyTokenizer
from tests.train.torch.trainer.conftest import RunningEngine

ROOT = Path(__file__).parents[4]
ITEMS = 6


def train(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    settings: dict[str, Any] = {
        "training.run_dir": folder,
        "training.base_model": "tiny",
        "training.num_steps": 1,
        "training.learning_rate": 0.01,
        "training.lora_rank": 8,
        "sft.batch_size": 2,
        "env.group_size": 2,
        "env.batch_size": 4,
        "env.max_token_length": 8,
        "env.ensure_scores_are_not_same": "false",
        "env.steps_per_eval": 0,
        "env.ephemeral_system_prompt": "Be brief.",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "lachesis", "train", "--env", "tool_result", *flags, *more]
    hidden = ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
    environ = {k: v for k, v in os.environ.items() if k not in hidden} | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    ended = train(folder, "--warm-start", str(ITEMS))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]


def test_the_examples_are_what_the_policy_is_asked_in_training_and_are_no_samples_of_a_model(run: Path) -> None:
    examples = lines(run / "warm-start" / "groups.jsonl")
    assert len(examples) == ITEMS
    prompts = {}
    for group in examples:
        (sample,) = group["samples"]
        assert len(sample["spans"]) == 2, "the call, and the answer after its result"
        assert not verify(sample, on_policy=False)
        assert all("no model sampled it" in reason for reason in verify(sample)) and verify(sample)
        prompts[group["item"]["question"]] = sample["tokens"][: sample["spans"][0]["start"]]
    played = [json.loads(line) for file in (run / "rollouts").glob("*.jsonl") for line in file.open(newline="\n")]
    first = {tuple(each["tokens"][: each["spans"][0]["start"]]) for group in played for each in group["samples"]}
    assert first
    assert first <= {tuple(prompt) for prompt in prompts.values()}, "the items are the same, and so are their prompts"


def test_the_run_begins_with_the_weights_of_the_warm_start_and_a_new_optimizer(run: Path) -> None:
    from safetensors import safe_open

    warm, begun = Checkpoint.read(run / "warm-start"), Checkpoint.read(run)
    assert warm is not None and begun is not None
    assert (warm.step, begun.step) == (ITEMS // 2, 1)

    def weights(path: str) -> dict[str, list[float]]:
        with safe_open(run / "engine" / f"{path.removeprefix('tinker://')}.safetensors", "pt") as file:
            return {name: file.get_tensor(name).flatten().tolist() for name in file.keys()}  # noqa: SIM118

    of_warm, of_first = weights(warm.state), weights(begun.earlier[0][0])
    assert any(name.startswith("optimizer") for name in of_warm)
    assert not any(name.startswith("optimizer") for name in of_first)
    assert of_first == {name: value for name, value in of_warm.items() if not name.startswith("optimizer")}
    losses = [step["train/loss"] for step in lines(run / "warm-start" / "metrics.jsonl")[1:]]
    assert losses[-1] < losses[0]


class Link(EngineLink):
    """To an engine that runs already."""

    async def connect(self) -> Service:
        return Service()

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return ""


async def test_the_engine_keeps_nothing_of_the_warm_start_in_memory(
    run: Path, tmp_path: Path, to_engine: RunningEngine
) -> None:
    shutil.copytree(run / "warm-start", tmp_path / "warm-start", ignore=lambda *_: ["checkpoint.json", "metrics.jsonl"])
    training = {"run_dir": str(tmp_path), "base_model": "tiny", "num_steps": 1, "warm_start": ITEMS, "lora_rank": 4}
    settings = read_settings(None, {"training": training})
    tokenizer, console = LazyTokenizer(settings), Console(file=io.StringIO())
    assert await warm_start(settings, SftSettings(), Link(), tokenizer, console, asyncio.Event())  # type: ignore[arg-type]
    found = Checkpoint.read(tmp_path / "warm-start")
    assert found is not None
    model_id = found.state.removeprefix("tinker://").partition("/")[0]
    url, asked = f"{to_engine.url}/api/v1/get_info", {"model_id": model_id}
    async with aiohttp.ClientSession() as http, http.post(url, json=asked) as answer:
        assert (answer.status, "unknown" in await answer.text()) == (404, True)


def test_a_run_that_goes_on_plays_no_examples_again(run: Path) -> None:
    before = (run / "warm-start" / "groups.jsonl").stat()
    ended = train(run, "--warm-start", str(ITEMS), "--training.num_steps", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "warm start" not in ended.stdout
    assert (run / "warm-start" / "groups.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    other = train(run, "--training.num_steps", "3")
    assert other.returncode == 2 and "training.warm_start" in other.stdout, "it is another run without one"


def test_an_environment_without_a_reference_policy_says_what_to_do_instead(tmp_path: Path) -> None:
    ended = train(tmp_path / "run", "--warm-start", "4", "--env", f"{ROOT / 'tests/support/ascii_env.py'}:AsciiEnv")
    assert ended.returncode == 2
    assert "AsciiEnv has no reference_policy()" in ended.stderr and "--training.init_from" in ended.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "lachesis train --env NAME --warm-start N"),
        (("--resume",), "has no checkpoint to resume from"),  # before anything is fine-tuned
    ],
)
def test_without_examples_the_trainer_says_who_makes_them(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    flags = ("--training.base_model", "tiny", "--training.num_steps", "1", "--training.warm_start", "4", *more)
    command = [sys.executable, "launch_training.py", "--training.run_dir", str(tmp_path / "run"), *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 2
    assert said in " ".join(ended.stderr.split())
