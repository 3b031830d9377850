"""`launch_training.py --sft` over the embedded engine: the loss falls, the model changes, no step is trained twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("LACHESIS_NEED_TORCH"):
    pytest.importorskip("torch", reason="make test-train installs torch")
    pytest.importorskip("tinker", reason="make test-train installs the SDK of Tinker")

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `process` wrote of a real environment, played by its reference policy, and a line that is none."""
    folder = tmp_path_factory.mktemp("dump")
    process = [sys.executable, "environments/tool_call_env.py", "process", "--openai.model_name", "reference"]
    flags = {"total_steps": 48, "group_size": 1, "data_path_to_save_groups": folder / "groups.jsonl"}
    subprocess.run(
        [*process, *(part for name, value in flags.items() for part in (f"--env.{name}", str(value)))],
        check=True,
        cwd=ROOT,
        capture_output=True,
    )
    # One turn is all that this environment allows, so its rollouts end with max_turns, not with completed.
    path = folder / "failed_trajectories.jsonl"
    with path.open("a") as file:
        file.write('{"conversations": [\n')
    return path


def command(dump: Path, run_dir: Path, **more: Any) -> list[str]:
    settings = {
        "training.base_model": "tiny",
        "training.run_dir": run_dir,
        "training.learning_rate": 0.003,  # at 0.005 the order of the lines decides whether it overshoots
        "training.lora_rank": 8,
        "training.grad_clip_norm": 1.0,
        "training.save_checkpoint_interval": 3,
        "training.keep_checkpoints": 2,
        "sft.completed_only": "false",
        "sft.min_reward": 1,
        "sft.batch_size": 8,
        "sft.validation_share": 0.15,
        "sft.epochs": 2,
        **more,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "launch_training.py", "--sft", str(dump), *flags]


def environ() -> dict[str, str]:
    hidden = ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
    return {**{k: v for k, v in os.environ.items() if k not in hidden}, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that was not disturbed, and what it said."""
    run_dir = tmp_path_factory.mktemp("run")
    ended = subprocess.run(command(dump, run_dir), cwd=ROOT, env=environ(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return run_dir, ended.stderr


def test_the_loss_falls_also_on_what_is_held_out(finished: tuple[Path, str]) -> None:
    found = steps(finished[0])
    assert [line["step"] for line in found] == list(range(len(found)))
    losses = [line["train/loss"] for line in found[1:]]
    measured = [line["eval/loss"] for line in found if "eval/loss" in line]
    assert len(measured) == 3, "before the first step, and after each epoch"
    assert all(0 < line["train/samples"] <= 8 for line in found[1:]), "those of its batch"
    assert measured[0] == pytest.approx(losses[0], abs=0.2), "the random model is as bad on either"
    assert measured[0] > 5.0, "about log 272, the size of its vocabulary"
    assert measured[-1] < measured[1] < measured[0] - 1.0
    assert losses[-1] < losses[0] - 1.0
    assert 'aria-label="Loss"' in (finished[0] / "report.html").read_text()


def test_every_line_is_trained_or_named(finished: tuple[Path, str], dump: Path) -> None:
    run_dir, said = finished
    assert "49 lines: 48 examples with " in said
    assert f"{dump}:49: not JSON" in said
    (refused,) = map(json.loads, (run_dir / "refused.jsonl").read_text().splitlines())
    assert (refused["source"], refused["reason"]) == (f"{dump}:49", "not_json")
    tokens = [line["train/tokens"] for line in steps(run_dir)[1:]]
    half = len(tokens) // 2
    assert sum(tokens[:half]) == sum(tokens[half:]), "each epoch trains every token of the model once"


def test_the_engine_keeps_the_last_checkpoints(finished: tuple[Path, str]) -> None:
    last = steps(finished[0])[-1]["step"]
    for kind in ("weights", "sampler_weights"):
        kept = {path.stem for path in (finished[0] / "engine").glob(f"*/{kind}/step-*.safetensors")}
        assert kept == {f"step-{last:05d}", f"step-{(last - 1) // 3 * 3:05d}"}


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    finished: tuple[Path, str], dump: Path, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command(dump, tmp_path / "run"), cwd=ROOT, env=environ(), stdout=log, stderr=log)
    try:
        until = time.monotonic() + 240
        while len(steps(tmp_path / "run") if (tmp_path / "run" / "metrics.jsonl").exists() else []) < 6:
            assert first.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.05)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    again = [*command(dump, tmp_path / "run"), "--resume"]
    ended = subprocess.run(again, cwd=ROOT, env=environ(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "continues after step " in ended.stderr
    undisturbed, killed = steps(finished[0]), steps(tmp_path / "run")
    assert [line["step"] for line in killed] == [line["step"] for line in undisturbed]
    for name in ("train/loss", "eval/loss"):
        expected = [line[name] for line in undisturbed if name in line]
        assert [line[name] for line in killed if name in line] == pytest.approx(expected, abs=1e-4), name


def test_a_finished_run_does_nothing_and_other_data_is_refused(finished: tuple[Path, str], dump: Path) -> None:
    run_dir, _ = finished
    before = (run_dir / "metrics.jsonl").read_text()
    other = dump.with_name("other.jsonl")
    other.write_text("".join(dump.read_text().splitlines(keepends=True)[:20]))
    ended = subprocess.run(
        command(other, run_dir), cwd=ROOT, env=environ(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "is a run with other settings: sft.data: " in " ".join(ended.stderr.split())
    assert (run_dir / "metrics.jsonl").read_text() == before


def test_another_run_begins_with_its_weights(finished: tuple[Path, str], dump: Path, tmp_path: Path) -> None:
    more = {"training.init_from": finished[0], "training.num_steps": 1}
    ended = subprocess.run(
        command(dump, tmp_path / "next", **more), cwd=ROOT, env=environ(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert steps(tmp_path / "next")[0]["eval/loss"] == pytest.approx(steps(finished[0])[-1]["eval/loss"], abs=1e-5)


async def test_the_trained_model_writes_calls_where_the_random_one_writes_noise(
    finished: tuple[Path, str], dump: Path
) -> None:
    from transformers import AutoTokenizer

    from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts
    from lachesis_tokens.prompts.model_folders import model_folder
    from lachesis_train.engine import start_engine
    from lachesis_train.sft.readers import read_dataset
    from lachesis_train.sft.settings import SftSettings
    from lachesis_train.tinker_sdk import LOCAL_KEY, LoraShape, Service

    tokenizer = AutoTokenizer.from_pretrained(str(model_folder("tiny")))
    (example, *_) = read_dataset([dump], DatasetPrompts(tokenizer), SftSettings(completed_only=False)).examples
    prompt = list(example.tokens[: example.trained[0]])
    said = [example.tokens[place] for place in example.trained]
    checkpoint = json.loads((finished[0] / "checkpoint.json").read_text())
    async with start_engine("tiny", state_dir=finished[0] / "engine") as url:
        service = await asyncio.to_thread(Service, url, LOCAL_KEY)
        untrained = await service.base_sampler("tiny")
        resumed = await service.resume(checkpoint["state"], "tiny", LoraShape(rank=8, seed=0))
        trained = await resumed.sampler()
        means = []
        for sampler in (untrained, trained):
            logprobs = await sampler.logprobs([*prompt, *said])
            means.append(sum(logprobs[len(prompt) :]) / len(said))
    assert means[1] > means[0] + 1.0, "the call is e times as likely a token"
