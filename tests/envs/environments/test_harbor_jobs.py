"""`lachesis export --format harbor`: a run as a job folder. `make test-harbor` reads such folders with Harbor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.cli import main
from lachesis_messages.records.jsonl import JsonlWriter, read_lines
from lachesis_testing.export_suite import example_groups
from tests.support.job_groups import SECRET, job_run


def export(groups: Path, out: Path, *more: str) -> int:
    return main(["export", str(groups), "--format", "harbor", "--out", str(out), *more])


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def test_a_job_has_a_trial_for_each_rollout_with_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "jobs" / "mixed"
    assert export(job_run(tmp_path), job) == 0
    assert "9 lines from 9 rollouts of 4 groups" in capsys.readouterr().out
    assert len([path for path in job.iterdir() if path.is_dir()]) == 9
    trial = job / "a-1__a-1-0"
    assert {path.relative_to(trial).as_posix() for path in trial.rglob("*") if path.is_file()} == {
        *("config.json", "lock.json", "result.json", "trial.log", "agent/trajectory.json", "agent/changes.diff"),
        *("artifacts/manifest.json", "artifacts/logs/artifacts/out.txt"),
        *("verifier/test-stdout.txt", "verifier/reward.json"),
        *(path.relative_to(trial).as_posix() for path in trial.glob("agent/images/*.png")),
    }
    assert not (trial / "artifacts/logs/artifacts/passwords").is_symlink(), "a link out of the folder"
    assert read(trial / "result.json")["verifier_result"]["rewards"] == {"reward": 1.0, "style": 0.5}
    assert read(trial / "config.json")["environment"] == {"type": "docker"}


def test_a_rollout_without_a_reward_is_in_no_mean_and_has_no_end_that_harbor_would_average(tmp_path: Path) -> None:
    job = tmp_path / "job"
    assert export(job_run(tmp_path), job) == 0
    broken = read(job / "a-1__a-1-3" / "result.json")
    assert broken["verifier_result"] is None and "finished_at" not in broken
    assert broken["exception_info"]["exception_type"] == "RewardFileNotFoundError"
    assert (job / "a-1__a-1-3" / "verifier" / "test-stdout.txt").read_text() == "boom"
    summary = read(job / "result.json")
    (figures,) = summary["stats"]["evals"].values()
    assert (figures["n_trials"], figures["n_errors"], figures["metrics"]) == (6, 3, [{"reward": 0.625, "style": 0.5}])


def test_each_step_has_its_reward_its_files_and_the_conversation(tmp_path: Path) -> None:
    groups = job_run(tmp_path)
    lines = list(read_lines(groups))
    kept = tmp_path / "artifacts" / "a-1-0"
    for name in ("one", "two"):
        (tmp_path / "steps" / name / "verifier").mkdir(parents=True)
        (tmp_path / "steps" / name / "verifier/test-stdout.txt").write_text(name)
    kept.rename(tmp_path / "kept")
    (tmp_path / "steps").rename(kept)
    steps = [{"name": "one", "rewards": {"reward": 1.0}}, {"name": "two", "cause": "not_reached"}]
    lines[0]["rollouts"][0]["verifier"]["steps"] = steps
    groups.unlink()
    with JsonlWriter(groups) as writer:
        writer.write_all(lines)
    assert export(groups, tmp_path / "job") == 0
    trial = tmp_path / "job" / "a-1__a-1-0"
    assert read(trial / "result.json")["step_results"] == [
        {"step_name": "one", "verifier_result": {"rewards": {"reward": 1.0}}},
        {"step_name": "two", "verifier_result": None},
    ]
    for name in ("one", "two"):
        assert read(trial / "steps" / name / "agent/trajectory.json")["session_id"] == "a-1-0"
        assert (trial / "steps" / name / "verifier/test-stdout.txt").read_text() == name


def test_an_image_that_is_none_stays_as_it_was_sent(tmp_path: Path) -> None:
    groups = example_groups()
    url = "data:image/png;base64,A"
    groups[0]["messages"][0][0] = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with JsonlWriter(tmp_path / "groups.jsonl") as writer:
        writer.write_all(groups)
    assert export(tmp_path / "groups.jsonl", tmp_path / "job") == 0
    trajectory = read(tmp_path / "job" / "a-1__a-1-0" / "agent/trajectory.json")
    assert trajectory["steps"][0]["message"][0]["source"]["path"] == url


def test_no_key_of_a_server_is_written(tmp_path: Path) -> None:
    job = tmp_path / "job"
    assert export(job_run(tmp_path), job) == 0
    assert SECRET in (tmp_path / "groups.run.json").read_text()
    assert not [path for path in job.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_job_is_written_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups, job = job_run(tmp_path), tmp_path / "jobs" / "mixed"
    (tmp_path / "artifacts" / "a-1-0").rename(tmp_path / "elsewhere")
    assert export(groups, job) == 1
    assert "rollout a-1-0: its artifacts are missing" in capsys.readouterr().err
    assert list(job.parent.iterdir()) == []
    (tmp_path / "elsewhere").rename(tmp_path / "artifacts" / "a-1-0")
    assert export(groups, job) == 0
    before = sorted(job.rglob("*"))
    assert export(groups, job) == 1
    assert "exists; choose another name" in capsys.readouterr().err
    assert sorted(job.rglob("*")) == before
    assert export(groups, tmp_path / "other", "--options", "{token_ids: some}") == 2
    assert export(groups, tmp_path / "other", "--options", "{colour: red}") == 2
    assert not (tmp_path / "other").exists()


def test_names_of_items_and_links_of_an_agent_write_nothing_elsewhere(tmp_path: Path) -> None:
    groups = job_run(tmp_path)
    target = tmp_path / "target"
    (tmp_path / "artifacts/a-1-0/verifier/trial.log").symlink_to(target)
    (tmp_path / "artifacts/a-1-0/artifacts/manifest.json").unlink()
    (tmp_path / "artifacts/a-1-0/artifacts/manifest.json").symlink_to(target)
    lines = list(read_lines(groups))
    lines[1]["item_key"] = "../../b 1/\ud83d"
    groups.unlink()
    with JsonlWriter(groups) as writer:
        writer.write_all(lines)
    job = tmp_path / "jobs" / "job"
    assert export(groups, job) == 0
    assert not target.exists()
    assert {path.name for path in job.parent.iterdir()} == {"job"}
    assert (job / "b-1---__b-1-0").is_dir() or [path for path in job.iterdir() if path.name.endswith("__b-1-0")]


def test_a_run_without_groups_is_an_empty_job_and_no_success(tmp_path: Path) -> None:
    empty = tmp_path / "groups.jsonl"
    empty.touch()
    assert export(empty, tmp_path / "job") == 1
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["config.json"]
    with JsonlWriter(empty) as writer:
        writer.write({**example_groups()[0], "rollouts": [], "scores": [], "messages": []})
    assert export(empty, tmp_path / "other") == 1
