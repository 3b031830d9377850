"""Real tasks of others, played with their solution and with nobody: the rewards are those that their own tests give.

They are read from PyPI, and images are made of their Dockerfiles (`make test-harbor`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.harbor import HarborEnv
from tests.support.small_envs import rollouts

NEEDED = os.environ.get("LACHESIS_NEED_HARBOR") == "1"
CACHE = Path("~/.cache/lachesis/real-tasks").expanduser()
TASKS: dict[str, dict[str, float | str]] = {
    "benchflow-0.7.11/src/benchflow/demo_task": {"oracle": "no_solution", "nop": 0.0},
    "benchflow-0.7.11/tests/conformance/acp_smoke": {"oracle": 1.0, "nop": 0.0},
    "benchflow-0.7.11/tests/examples/hello-world-task": {"oracle": 1.0, "nop": 0.0},
    # Its tests are comments: they write no reward.
    "harbor/cli/template-task": {"oracle": "no_reward_file", "nop": "no_reward_file"},
}


def downloaded(*arguments: str, file: str) -> Path:
    """A distribution from PyPI, as pip gets it."""
    if not (CACHE / file).exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            pytest.skip(f"PyPI cannot be reached: {done.stderr[-500:]}")
    return CACHE / file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task folders of both packages."""
    if not NEEDED:
        pytest.skip("downloads tasks and makes images; make test-harbor does")
    found = tmp_path_factory.mktemp("tasks")
    source = ("--ignore-requires-python", "--no-binary", "benchflow", "benchflow==0.7.11")
    with tarfile.open(downloaded(*source, file="benchflow-0.7.11.tar.gz")) as archive:
        archive.extractall(found, filter="data")
    wheel = ("--python-version", "3.12", "--only-binary=:all:", "harbor==0.25.0")
    with zipfile.ZipFile(downloaded(*wheel, file="harbor-0.25.0-py3-none-any.whl")) as archive:
        archive.extractall(found)
    return found


@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("task", TASKS)
async def test_a_real_task_has_the_reward_of_its_own_tests(
    folder: Path, tmp_path: Path, task: str, agent: str, capsys: Any
) -> None:
    config: Any = {"dataset_name": str(folder / task), "agent": agent, "data_dir_to_save_evals": str(tmp_path)}
    env = HarborEnv(HarborEnv.env_config_cls(**config), [ServerConfig(model_name="reference")])
    async with env.running():
        result = await env.evaluate()
    (record,) = rollouts(result.files.groups) + rollouts(tmp_path / "samples.failed.jsonl")
    wanted = TASKS[task][agent]
    if isinstance(wanted, str):
        assert (record["outcome"], record["reward"]) == ("infra_error", None)
        assert record["verifier"]["cause"] == wanted
    else:
        assert record["reward"] == wanted
