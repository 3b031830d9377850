"""Targets of guests, and what a run says where the framework is missing."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from backends.errors import SettingsError
from lachesis.runs.command_line import read_settings
from lachesis_compat.guests import GUESTS, guest
from tests.support.small_envs import ROOT

MODULES = sorted(place.partition(":")[0] for place, _ in GUESTS.values())


def test_a_target_names_the_framework_its_environment_and_arguments() -> None:
    env_cls = guest("verifiers:primeintellect/wordle-v1?size=5&strict=true&name=a%20b")
    assert env_cls is not None
    _, settings = read_settings(env_cls, ["process", "--env.total_steps", "3"])
    config = settings["config"]
    assert (config.module, config.total_steps) == ("primeintellect/wordle-v1", 3)
    assert config.module_args == {"size": 5, "strict": True, "name": "a b"}
    env = env_cls(**settings)
    assert env.run_name == "verifiers-wordle_v1"
    env_cls = guest("inspect:tasks/shelves.py@shelves")
    assert env_cls is not None
    _, settings = read_settings(env_cls, ["evaluate"])
    assert (settings["config"].task, settings["config"].task_args) == ("tasks/shelves.py@shelves", {})
    assert env_cls(**settings).run_name == "inspect-shelves"


def test_other_targets_are_of_no_guest() -> None:
    for target in ("environments/my_env.py:MyEnv", "my_env.py", "package.module:Class", "verifiers"):
        assert guest(target) is None, target
    with pytest.raises(SettingsError, match="'verifiers:' names no environment; write verifiers:NAME"):
        guest("verifiers:")


@pytest.mark.parametrize("module", MODULES)
def test_a_guest_describes_its_settings_without_its_framework(module: str) -> None:
    command = [sys.executable, "-m", module, "process", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--env.module" in done.stdout or "--env.task" in done.stdout


@pytest.mark.parametrize(("module", "package"), [*zip(MODULES, ("inspect_ai", "verifiers"), strict=True)])
def test_a_missing_framework_is_named_with_the_command_that_installs_it(module: str, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    with pytest.raises(SettingsError, match=r"not installed here \(.*\); pip install (verifiers|inspect-ai)==0\.\d"):
        importlib.import_module(module).load("some_env", {})
