"""Every file in configs/ of `lachesis train` is read by the command that its comment shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

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
