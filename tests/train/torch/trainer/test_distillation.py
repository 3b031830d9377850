"""On-policy distillation through the whole path: the divergence from a teacher is right, and falls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if not os.environ.get("LACHESIS_NEED_TORCH"):
    pytest.importorskip("torch", reason="make test-train installs torch")
    pytest.importorskip("tinker", reason="make test-train installs the SDK of Tinker")

ROOT = Path(__file__).parents[4]
HIDDEN = ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
ENVIRON = {k: v for k, v in os.environ.items() if k not in HIDDEN} | {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}


def train(folder: Path, steps: int, **more: Any) -> list[dict[str, Any]]:
    """The metrics of each step."""
    settings: dict[str, Any] = {
        "training.run_dir": folder,
        "training.base_model": "tiny",
        "training.num_steps": steps,
        "training.learning_rate": 0.03,
        "training.lora_rank": 8,
        "training.advantage": "normalised",
        "env.group_size": 4,
        "env.batch_size": 32,
        "env.steps_per_eval": 0,
        "env.max_batches_offpolicy": 1,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    environment = f"{ROOT / 'tests/support/ascii_env.py'}:AsciiEnv"
    command = [sys.executable, "-m", "lachesis", "train", "--env", environment, *flags]
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRON, capture_output=True, text=True, check=False, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def teacher(folder: Path, *flags: str) -> Iterator[str]:
    command = [sys.executable, "-m", "lachesis", "policy", "--run-dir", str(folder), "--port", "0", *flags]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRON, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def test_a_model_comes_closer_to_its_teacher_and_does_not_diverge_from_itself(tmp_path: Path) -> None:
    train(tmp_path / "teacher", 5)
    with teacher(tmp_path / "teacher", "--base") as itself:
        first = train(tmp_path / "same", 1, training__teacher_url=itself, training__reward_weight=0)
    assert first[0]["train/teacher_divergence"] == pytest.approx(0.0, abs=1e-4)
    with teacher(tmp_path / "teacher") as trained:
        of_teacher = {"training__teacher_url": trained, "training__reward_weight": 0}
        # Near its teacher a student learns from noise, of which Adam makes whole steps: larger ones throw it far off.
        student = train(tmp_path / "student", 12, training__learning_rate=0.004, **of_teacher)
    divergence = [step["train/teacher_divergence"] for step in student]
    assert divergence[0] > 0.05, "the teacher has learned something else than what the model began with"
    assert sum(divergence[-3:]) / 3 < 0.85 * divergence[0], divergence  # on a busy machine its rollouts are older
