"""`python -m benchmarks.gpu` without a GPU: it is skipped by name, and its rehearsal finds what it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
if not os.environ.get("LACHESIS_NEED_TORCH") and not all(map(find_spec, ("torch", "peft"))):
    pytest.skip("needs torch and peft", allow_module_level=True)


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_without_a_gpu_it_says_so_and_ends_well() -> None:
    done = gpu()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gpu: skipped, torch ")
    assert len(done.stdout.splitlines()) == 1


def test_the_rehearsal_finds_equal_weights_and_both_controls(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    small = ("--device", "cpu", "--model", "tiny", "--small", "--dtype", "float32", "--json", str(file))
    done = gpu(*small, "--only", "logprobs", "training")
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["figures"]
    assert json.loads(done.stdout.splitlines()[-1])["figures"] == figures
    found = {one["case"]: one["lachesis"] for one in figures}
    assert found["same weights"]["max"] < 1e-5
    assert min(found[f"control: one {what} later"]["mean"] for what in ("step", "token")) > 1e-3
    speeds = [one for one in figures if one["part"] == "training"]
    assert len(speeds) == 2 and all(min(one[side].values()) > 0 for one in speeds for side in ("lachesis", "plain"))
