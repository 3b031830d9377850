"""The commands after a training run name what the run knows: its environment, its model, its templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lachesis_train.trainer.environments import RunEnvironment
from lachesis_train.trainer.next_commands import next_commands, write_commands
from lachesis_train.verbs.launch_training import read_settings
from lachesis_view.reports.training import _commands

ASCII = RunEnvironment(env="ascii.py:Ascii", name="ascii")


def commands(base: str, folder: Path, flags: dict[str, list[str]], config: list[str]) -> list[str]:
    settings = read_settings(None, {"training": {"base_model": base, "run_dir": str(folder), "num_steps": 1}})
    found = next_commands(settings, [ASCII], {"ascii": flags}, config)
    write_commands(folder, found)
    assert _commands(folder) == found, "the report shows the same"
    return [command for command, _ in found]


def test_a_base_with_a_gguf_file_is_exported_as_one_and_played_with_its_templates(tmp_path: Path) -> None:
    flags = {"env.group_size": ["8"], "env.chat_template": ["hermes_short"]}
    export, played = commands("smollm2", tmp_path / "run", flags, ["--config", "a b.yaml"])
    assert export == f"export --run-dir {tmp_path}/run --to run.gguf"
    assert played == "eval ascii.py:Ascii -m run.gguf --config 'a b.yaml' --env.chat_template hermes_short -n 64"


def test_another_base_is_served_and_exported_as_a_folder(tmp_path: Path) -> None:
    policy, played, export = commands("tiny", tmp_path / "run", {}, [])
    assert policy == f"policy --run-dir {tmp_path}/run" and export.endswith("--to run_model")
    assert played == "eval ascii.py:Ascii -m tiny -b http://127.0.0.1:8001/v1 --env.tokenizer_name tiny -n 64"


@pytest.mark.parametrize("text", ["", "{", "7", json.dumps([["x"]])])
def test_a_damaged_file_does_not_end_a_report(tmp_path: Path, text: str) -> None:
    (tmp_path / "next.json").write_text(text)
    [(command, _)] = _commands(tmp_path)
    assert command.startswith("export --run-dir ") and command.endswith("_model")
