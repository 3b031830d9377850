"""Methods that a run calls: one that is missing or misspelt is named, before anything is played."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis import HermesAgentBaseEnv, check_environment, reward
from lachesis.runs.command_line import main
from lachesis.runs.run_folder import WrongFolder
from lachesis.settings.hooks import misspelt_hooks, require_hooks
from lachesis_train.trainer.settings import TrainingSettings


class Whole(HermesAgentBaseEnv):
    """Has what an environment needs."""

    name = "whole"
    toolsets = ()

    async def get_next_item(self) -> Any:
        return "pear"

    def format_prompt(self, item: Any) -> str:
        return f"Say {item}"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 1.0


def without(*hooks: str, **methods: Any) -> Any:
    """A class like `Whole` without some methods and with others."""
    own = {
        name: value
        for name, value in vars(Whole).items()
        if name in ("get_next_item", "format_prompt", "compute_reward")
    }
    kept = {name: value for name, value in own.items() if name not in hooks}
    return type("Own", (HermesAgentBaseEnv,), {"__module__": __name__, "name": "own", **kept, **methods})


async def says(self: Any, *arguments: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("hook", "spelt", "said"),
    [
        ("compute_reward", "compute_rewards", "has compute_rewards, and needs compute_reward("),
        ("compute_reward", "computeReward", "has computeReward, and needs "),
        ("compute_reward", "grade", "has grade, and needs compute_reward(self, item, result, ctx): rename it"),
        ("compute_reward", "appraise", "write it, or methods with @reward"),
        ("get_next_item", "get_item", "has get_item, and needs "),
        ("get_next_item", "load", "Own has no method get_next_item(self); write it"),
        ("format_prompt", "prompt_format", "Own has no method format_prompt(self, item)"),
        ("format_prompt", "formatprompt", "has formatprompt, and needs "),
    ],
)
def test_a_missing_hook_ends_the_command_with_what_was_meant(
    hook: str, spelt: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cls = without(hook, **{spelt: says})
    for command in ("process", "evaluate", "serve"):
        assert main(cls, [command]) == 2
        shown = capsys.readouterr().err
        assert said in shown and "Traceback" not in shown and "bug in Lachesis" not in shown
    with pytest.raises(SettingsError, match=hook):
        asyncio.run(check_environment(cls))


def compute_group_reward(*arguments: Any) -> None:
    """Nothing: its name is what counts."""


def format_prompt(self: Any, item: Any) -> str:
    return ""


def test_a_hook_that_was_written_outside_of_the_class_is_named() -> None:
    with pytest.raises(SettingsError, match=r"the function format_prompt of .* is outside of the class; indent it"):
        require_hooks(without("format_prompt"))


def test_all_missing_hooks_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as raised:
        require_hooks(without("get_next_item", "compute_reward", next_item=says, compute_rewards=says))
    assert "has next_item," in str(raised.value) and "has compute_rewards," in str(raised.value)


@pytest.mark.parametrize(
    ("spelt", "meant"),
    [
        ("set_up", "setup(self)"),
        ("tear_down", "teardown(self)"),
        ("followup", "follow_up(self, item, messages)"),
        ("setup_sandboxes", "setup_sandbox(self, item, ctx)"),
        ("sandbox_file", "sandbox_files(self, item)"),
        ("reference_polcy", "reference_policy(self)"),
        ("rollout_metric", "rollout_metrics(self, item, result, reward)"),
        ("compute_group_rewards", "compute_group_reward(self, item, results, ctxs)"),
        ("get_evaluation_items", "get_eval_items(self)"),
    ],
)
def test_a_near_miss_of_an_optional_hook_is_named_at_the_start_and_by_the_check(
    spelt: str, meant: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cls = without(**{spelt: says})
    line = f"Own.{spelt} is never called; did you mean {meant}?"
    assert misspelt_hooks(cls) == [line]
    assert main(cls, ["process", "--openai.model_name", "reference"]) == 2  # it has no such policy
    assert f"note: {line}" in capsys.readouterr().err


def test_the_check_lists_near_misses() -> None:
    class Misses(Whole):
        async def set_up(self) -> None:
            """Never called."""

    assert any("Misses.set_up is never called" in each for each in asyncio.run(check_environment(Misses)).findings)


def test_methods_with_a_use_or_a_meaning_of_their_own_are_no_near_miss() -> None:
    class Own(Whole):
        helper = staticmethod(lambda: 1)
        Setup2 = dict

        def set_up(self) -> None:
            """Called below."""

        async def setup(self) -> None:
            self.set_up()

        def format_prompts(self) -> None:
            """`format_prompt` is there as well."""

        @reward
        def rollout_metric(self, item: Any, result: Any, ctx: Any) -> float:
            return 1.0

        def sandbox_file(self) -> list[int]:
            return [1]

        def format_prompt(self, item: Any) -> str:
            return "".join(str(each) for each in self.sandbox_file())

    class Later(Own):
        """Inherits all of it."""

    assert misspelt_hooks(Own) == misspelt_hooks(Later) == misspelt_hooks(Whole) == []


@pytest.mark.parametrize("hook", ["setup", "get_next_item"])
def test_a_plain_def_that_a_run_awaits_is_told_to_be_a_coroutine(
    hook: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cls = without(**{hook: lambda self: "pear", "reference_policy": lambda self: lambda messages, tools: None})
    assert main(cls, ["process", "--openai.model_name", "reference"]) == 1
    assert "write `async def`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["../out", "/tmp/out", "..", " ", "a/../../b", "a\0b", "a" * 201, "a/" * 3000 + "a", 5]
)
def test_the_name_of_an_environment_leads_to_no_folder_elsewhere(
    name: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for command in ("process", "evaluate", "serve"):
        assert main(without(name=name), [command]) == 2
        assert f"the name of Own, {name!r}, " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["here"] and not [*(tmp_path / "here").iterdir()]


@pytest.mark.slow
async def test_a_run_that_python_code_starts_leads_to_no_folder_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    cls = without(name="../out", reference_policy=lambda self: lambda messages, tools: None)
    for method in ("process_manager", "env_manager", "_run_evaluate"):
        env = cls(*cls.config_init())
        with pytest.raises(WrongFolder, match=r"the name '\.\./out' would be a folder outside"):
            await getattr(env, method)()
    assert [path.name for path in tmp_path.iterdir()] == ["here"] and not [*(tmp_path / "here").iterdir()]


@pytest.mark.parametrize(("name", "fits"), [("..", False), (".", False), ("../x", False), ("run-1.b", True)])
def test_the_name_of_a_training_run_is_that_of_a_folder(name: str, fits: bool) -> None:
    if fits:
        assert TrainingSettings(name=name).name == name
    else:
        with pytest.raises(ValueError, match="should match pattern"):
            TrainingSettings(name=name)
