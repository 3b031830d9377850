"""`lachesis eval regrade`: today's verifier on yesterday's artifacts, in real sandboxes."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lachesis.cli import main
from lachesis_messages.records.jsonl import read_lines
from tests.envs.environments.test_harbor_env import ARTIFACT, CHECK, evaluated, task_at, two_steps


def regrade(data: Path, *more: str) -> int:
    return main(["eval", "regrade", str(data), "--env.task_images", "false", *more])


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def played(tmp_path: Path, tasks: Path, **settings: Any) -> Path:
    """The folder of an evaluation."""
    asyncio.run(evaluated(tmp_path, tasks, **{"agent": "oracle", **settings}))
    return tmp_path / "eval"


def test_todays_verdict_is_in_a_new_file_and_the_old_one_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_at(tmp_path / "task", ARTIFACT)
    data = played(tmp_path, task)
    before = files(data)
    (task / "tests/test.sh").write_text(CHECK.replace("42", "43"))
    capsys.readouterr()
    assert regrade(data) == 0
    printed = capsys.readouterr().out
    assert "1 rollout graded again" in printed and ": 1.0 -> 0.0" in printed and "changed: 1 reward" in printed
    new = data / "samples.regraded.jsonl"
    assert files(data) == {**before, new: new.read_bytes()}
    (group,) = read_lines(new)
    (rollout,) = group["rollouts"]
    assert (group["scores"], rollout["reward"], rollout["regraded"]["reward"]) == ([0.0], 0.0, 1.0)
    assert rollout["verifier"]["artifacts"] == rollout["regraded"]["verifier"]["artifacts"]
    (task / "tests/test.sh").write_text(CHECK)
    assert regrade(data / "samples.jsonl") == 0
    assert "changed: 0 rewards" in capsys.readouterr().out
    assert {path.name for path in files(data).keys() - before.keys()} == {
        "samples.regraded.jsonl",
        "samples.regraded-2.jsonl",
    }
    assert main(["report", str(new)]) == 0


def test_a_verifier_that_was_broken_gives_the_rollouts_that_it_lost_a_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_at(tmp_path / "task", ARTIFACT, **{"tests/test.sh": "exit 3\n"})
    data = played(tmp_path, task)
    assert not list(read_lines(data / "samples.jsonl"))
    (task / "tests/test.sh").write_text(CHECK)
    assert regrade(data) == 0
    printed = capsys.readouterr().out
    assert "invalid: 1 before, 0 now" in printed and "None -> 1.0" in printed
    (group,) = read_lines(data / "samples.regraded.jsonl")
    (rollout,) = group["rollouts"]
    assert (group["scores"], rollout["place"], len(group["messages"])) == ([1.0], 0, 1)
    assert (rollout["outcome"], rollout["regraded"]["outcome"]) == ("completed", "infra_error")
    (task / "tests/test.sh").write_text("exit 3\n")
    assert regrade(data / "samples.regraded.jsonl") == 0
    (group,) = read_lines(data / "samples.regraded.regraded.jsonl")
    (rollout,) = group["rollouts"]
    assert (group["scores"], rollout["reward"], rollout["outcome"]) == ([], None, "infra_error")
    assert rollout["verifier"]["cause"] == "no_reward_file" and rollout["messages"]


def test_each_step_is_graded_anew(tmp_path: Path) -> None:
    task = two_steps(tmp_path / "task", 'artifacts = ["/app/answer.txt", "/app/second.txt"]\n')
    (task / "steps/second/solution").mkdir()
    (task / "steps/second/solution/solve.sh").write_text("#!/bin/bash\necho 42 > second.txt\n")
    data = played(tmp_path, task)
    (group,) = read_lines(data / "samples.jsonl")
    assert group["scores"] == [1.0]
    (task / "steps/second/tests/test.sh").write_text(CHECK.replace("42", "43").replace("answer", "second"))
    assert regrade(data) == 0
    (group,) = read_lines(data / "samples.regraded.jsonl")
    assert group["scores"] == [0.5]


def test_what_cannot_be_graded_anew_is_refused_before_the_first_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_at(tmp_path / "task", ARTIFACT)
    data = played(tmp_path, task)
    toml = (task / "task.toml").read_text()

    def refused(said: str) -> None:
        before = files(data)
        assert regrade(data) == 1
        error = capsys.readouterr().err
        assert "1 of 1 rollouts cannot be graded again" in error and said in error
        assert files(data) == before

    (task / "task.toml").write_text(toml.replace(ARTIFACT, ""))
    refused("its tests look at the whole sandbox of the agent")
    (task / "task.toml").write_text(toml.replace('"/app/answer.txt"', '"/app/answer.txt", "/app/other.txt"'))
    refused("declares /app/other.txt, which the run did not keep")
    (task / "task.toml").write_text(toml)
    manifest = next(data.rglob("manifest.json"))
    for wrong in ("5", '["/app/answer.txt"]', "[{}]", "["):
        manifest.write_text(wrong)
        refused("manifest.json is not a list of artifacts")
    manifest.unlink()
    refused("manifest.json does not exist")
    shutil.rmtree(data / "artifacts")
    refused("its artifacts are missing")
    text = (data / "samples.jsonl").read_text()
    (data / "samples.jsonl").write_text(re.sub('"artifacts": ?"[^"]*"', '"artifacts": null', text))
    refused("its artifacts were not kept")


def test_a_folder_without_a_run_and_a_wrong_setting_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert regrade(tmp_path) == 2
    assert "name the folder of a finished run" in capsys.readouterr().err
    (tmp_path / "samples.jsonl").touch()
    for wrong in ("5", "{}", '{"settings": 5}', "{"):
        (tmp_path / "samples.run.json").write_text(wrong)
        assert regrade(tmp_path) == 1
        assert "samples.run.json: no manifest of a run" in capsys.readouterr().err
    (tmp_path / "samples.run.json").unlink()
    assert regrade(tmp_path) == 1
    assert "nothing can be graded again" in capsys.readouterr().err
    assert regrade(tmp_path, "--env.terminal_memory", "much") == 2
    assert "--env.terminal_memory" in capsys.readouterr().err


JUDGED = """
[metadata.lachesis.judge]
kind = "pytest"
sources = ["calc.py"]
tests = "files"
expect = ["test_calc.py::test_twice"]
python = "PYTHONPATH=.:/opt/pytest python3 -B"
"""


@pytest.mark.slow
def test_the_judge_judges_the_kept_sources_again(tmp_path: Path, python_image: Path) -> None:
    hidden = "from calc import twice\n\n\ndef test_twice():\n    assert twice(3) == 6\n"
    solution = "#!/bin/bash\nprintf 'def twice(n):\\n    return n + n\\n' > calc.py\n"
    task = task_at(tmp_path / "task", JUDGED, **{"tests/files/test_calc.py": hidden, "solution/solve.sh": solution})
    (python_image / "app").mkdir()
    data = played(tmp_path, task, terminal_image=str(python_image))
    (group,) = read_lines(data / "samples.jsonl")
    assert (group["scores"], group["rollouts"][0]["verifier"]["grading"]) == ([1.0], "judge")
    assert regrade(data) == 0
    (group,) = read_lines(data / "samples.regraded.jsonl")
    assert (group["scores"], group["rollouts"][0]["verifier"]["grading"]) == ([1.0], "judge")
    (task / "tests/files/test_calc.py").write_text(hidden.replace("== 6", "== 9"))
    assert regrade(data) == 0
    (group,) = read_lines(data / "samples.regraded-2.jsonl")
    assert (group["scores"], group["rollouts"][0]["regraded"]["reward"]) == ([0.0], 1.0)
    (data / "artifacts" / group["rollouts"][0]["rollout_id"] / "artifacts").rename(tmp_path / "away")
    assert regrade(data) == 1
