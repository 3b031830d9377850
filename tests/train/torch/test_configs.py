"""`lachesis train` reads every file in configs/ by the command that its comment shows, and that of the tutorial."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lachesis.runs.command_line import read_settings
from lachesis_envs.maze import MazeEnv
from lachesis_train.trainer.environments import RunEnvironment
from lachesis_train.verbs import train

ROOT = Path(__file__).resolve().parents[3]
COMMAND = re.compile(r"^#   lachesis train (.*)$", re.MULTILINE)
SHOWN = {path: COMMAND.findall(path.read_text("utf-8")) for path in sorted((ROOT / "configs").glob("train_*.yaml"))}


@pytest.mark.parametrize("path", [path for path, shown in SHOWN.items() if shown], ids=lambda path: path.name)
def test_the_command_in_a_config_plans_a_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = SHOWN[path]
    _, plan = train.planned([*shlex.split(command), "--training.run_dir", str(tmp_path)])
    assert f"--config {path.relative_to(ROOT)}" in command
    of_file = plan.settings.environments or [RunEnvironment(env="environment", name="environment")]
    assert plan.playing == {each.name for each in of_file}
    assert len(plan.examples) == (len(of_file) if plan.settings.training.warm_start else 0)


def test_the_command_of_the_tutorial_plans_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "tutorial-train.md").read_text("utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"^lachesis train (.*)$", text, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    _, plan = train.planned([*shlex.split(command), "--training.run_dir", str(tmp_path)])
    training = plan.settings.training
    assert (training.lora_rank, training.train_unembed, training.num_steps, len(plan.examples)) == (4, False, 24, 1)


@pytest.mark.parametrize(("given", "sent"), [([], True), (["--env.include_messages", "false"], False)])
def test_the_trainer_gets_the_messages_that_the_viewer_shows_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], sent: bool
) -> None:
    monkeypatch.chdir(ROOT)
    command = ["--env", "maze", "--config", "configs/train_maze.yaml", "--training.run_dir", str(tmp_path), *given]
    _, plan = train.planned(command)
    (environment,) = (part.command for part in plan.parts if part.name == "environment")
    _, settings = read_settings(MazeEnv, environment[environment.index("serve") :])
    assert settings["config"].include_messages is sent


def test_the_examples_of_a_warm_start_have_no_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    trees = ["--env.tree_at", "turns:2,4", "--env.group_size", "12", "--env.batch_size", "48"]
    command = ["--env", "maze", "--config", "configs/train_maze.yaml", *trees, "--training.run_dir", str(tmp_path)]
    _, plan = train.planned(command)
    (play,) = plan.examples
    _, settings = read_settings(MazeEnv, play[play.index("process") :])
    assert (settings["config"].tree_at, settings["config"].group_size) == (None, 1)
