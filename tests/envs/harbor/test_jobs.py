"""Job folders and trajectories as Harbor's own models and its viewer read them (`make test-harbor`)."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from lachesis.cli import main
from lachesis_messages.history import MessageHistory
from lachesis_messages.responses import ChatResponse
from tests.data.test_atif import only, record
from tests.envs.harbor.test_configs import HARBOR, pytestmark
from tests.run import some
from tests.support.conversation_strategies import conversations
from tests.support.job_groups import job_run
from tests.tokens.trajectories.test_samples_of_histories import rollouts

__all__ = ["pytestmark"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    out = tmp_path / "jobs" / "mixed"
    assert main(["export", str(job_run(tmp_path)), "--format", "harbor", "--out", str(out)]) == 0
    return out


def harbors(program: str, *arguments: object, given: str = "") -> Any:
    command = [HARBOR, Path(__file__).with_name(program), *map(str, arguments)]
    ran = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_harbors_models_read_every_file_and_count_the_same(job: Path) -> None:
    found = harbors("read_job.py", job)
    assert all(found["same"].values()), found["same"]
    trials = found["trials"]
    assert trials["a-1__a-1-0"] == {
        "rewards": {"reward": 1.0, "style": 0.5},
        "valid": True,
        "cause": None,
        "steps": 3,
        "manifest": ["/logs/artifacts"],
    }
    assert (trials["a-1__a-1-3"]["rewards"], trials["a-1__a-1-3"]["cause"]) == (None, "verifier_failed")
    assert [name for name, trial in trials.items() if not trial["valid"]] == ["a-1__a-1-3", "b-1__b-1-1", "c-1__c-1-0"]


def test_harbors_model_accepts_the_trajectories_of_random_conversations() -> None:
    lines: list[Any] = []

    @settings(max_examples=some(150), deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(rollouts())
    def histories(drawn: tuple[MessageHistory, list[ChatResponse]]) -> None:
        lines.append(only(record(drawn[0])).content)

    @settings(max_examples=some(150), deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(conversations())
    def hostile(messages: list[dict[str, Any]]) -> None:
        if messages:
            lines.append(only(record(messages)).content)

    histories()
    hostile()
    assert len(lines) > some(150)
    assert harbors("read_trajectories.py", given=json.dumps(lines)) == lines


@pytest.fixture
def viewer(job: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [HARBOR.with_name("harbor"), "view", job.parent, "--port", str(port), "--jobs"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}/api"
        for _ in range(600):
            assert process.poll() is None, "the viewer ended"
            try:
                assert get(f"{address}/health")
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        data = answer.read()
    return json.loads(data) if data[:1] in (b"{", b"[") else data


def test_harbors_viewer_shows_each_rollout_and_averages_no_failure_as_0(viewer: str) -> None:
    (job,) = get(f"{viewer}/jobs")["items"]
    assert (job["name"], job["n_total_trials"], job["n_errored_trials"]) == ("mixed", 9, 3)
    (figures,) = job["evals"].values()
    assert figures["metrics"] == [{"reward": 0.625, "style": 0.5}]
    tasks = {task["task_name"]: task["avg_reward"] for task in get(f"{viewer}/jobs/mixed/tasks")["items"]}
    assert tasks == {"a-1": None, "b-1": None, "c-1": None, "d-1": 0.75}
    trial = f"{viewer}/jobs/mixed/trials/a-1__a-1-0"
    steps = get(f"{trial}/trajectory")["steps"]
    image = steps[0]["message"][1]["source"]["path"]
    assert get(f"{trial}/files/agent/{image}").startswith(b"\x89PNG")
    assert get(f"{trial}/verifier-output")["stdout"] == "1 passed\n"
    artifacts = get(f"{trial}/artifacts")
    assert [file["path"] for file in artifacts["files"]] == ["logs/artifacts/out.txt"]
    assert b"a note" in get(f"{trial}/files/trial.log")
    assert get(f"{viewer}/jobs/mixed/trials/b-1__b-1-1")["exception_info"]["exception_type"] == "infra_error"
