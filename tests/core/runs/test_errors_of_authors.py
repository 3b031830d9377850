"""What an author sees of an exception in an environment: the cause first, and no frame of ours."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.errors import ExitCode
from lachesis.cli import main
from lachesis.likely_causes import guess, near_module
from lachesis.runs import command_line as cli
from lachesis.runs.own_process import run
from lachesis.tracebacks import explained
from lachesis_client.errors import InferenceError
from lachesis_messages.records.jsonl import JsonlError, JsonlWriter
from lachesis_tools import tool
from tests.support.small_envs import SortWords, does_nothing, lines, served

OURS = ("/lachesis/runs/", "/lachesis/rewards/", "/lachesis/loop/", "asyncio/")


class Own(SortWords):
    async def help(self) -> dict[str, int]:
        return {}


def caught(function: Callable[..., Any], *arguments: Any) -> BaseException:
    with pytest.raises(BaseException) as found:  # any
        function(*arguments)
    return found.value


class Unit:
    """A type of an author whose schema cannot be made."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        raise TypeError("a unit has no schema yet")


def test_the_line_that_raised_below_a_refusal_is_shown() -> None:
    async def weigh(unit: Unit) -> str:
        """Weigh a thing."""
        return ""

    shown = explained(caught(lambda: tool(toolset="scales")(weigh).parameters))
    assert "a unit has no schema yet" in shown and "in __get_pydantic_core_schema__" in shown


def stops(_: Any) -> Any:
    async def draws() -> Any:
        return next(iter(()))

    draws().send(None)


def not_awaited(env: Any) -> Any:
    helping = env.help()
    try:
        return helping["x"]
    finally:
        helping.close()


def awaits_a_number(_: Any) -> Any:
    async def waits() -> Any:
        await 3  # type: ignore[misc]

    waits().send(None)


def looks_up(_: Any) -> Any:
    item, other = {"question": "q", "id": 1}, {"answer": 1}
    return other["answer"] + item["answer"]  # type: ignore[operator]


def looks_up_elsewhere(_: Any) -> Any:
    item = {"answer": 1}
    return item["answer"] + {}["answer"]


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (looks_up, "item has the fields question, id"),
        (looks_up_elsewhere, ""),
        (lambda env: env.truths, "neither the class nor setup() has set self.truths"),
        (lambda env: env.help.truths, ""),
        (not_awaited, "a coroutine was not awaited"),
        (awaits_a_number, "leave `await` out"),
        (stops, "next(items, None) returns None"),
        (lambda _: next(iter(())), ""),
        (lambda env: env.compute_reward(1), "it is called as compute_reward(self, item, result, ctx)"),
        (lambda _: int("x"), ""),
        (lambda _: __import__("lachesis_of_nobody"), f"install the package that has it, for {sys.executable}"),
        (lambda _: __import__("jsonn"), "did you mean json?"),
        (lambda _: __import__("lachesis.rewardss"), "did you mean lachesis.rewards?"),
        (lambda _: Path("of_nobody.txt").read_text(), f"the path begins in the folder of the command, {Path.cwd()}"),
        (lambda _: Path("/of/nobody.txt").read_text(), ""),
        (lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"), "the disk is full: make room there"),
    ],
)
def test_a_guess_is_made_only_where_the_cause_is_known(fails: Callable[[Any], Any], said: str) -> None:
    env = object.__new__(Own)
    found = guess(caught(fails, env))
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("hook", ["setup", "get_next_item"])
def test_a_hook_that_is_no_coroutine_is_named_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hook: str
) -> None:
    source = tmp_path / f"plain_{hook}.py"
    source.write_text(
        "from lachesis import HermesAgentBaseEnv\n\n\nclass PlainHook(HermesAgentBaseEnv):\n"
        "    async def setup(self):\n        pass\n\n    async def get_next_item(self):\n        return None\n\n"
        f"    def {hook}(self):\n        return None\n\n"
        "    def format_prompt(self, item):\n        return item\n\n"
        "    async def compute_reward(self, item, result, ctx):\n        return 1.0\n\n"
        "    def reference_policy(self):\n        return lambda messages, tools: None\n\n\n"
        # As of a package that stands in for what is not installed: transformers has such classes.
        "class Missing(type):\n    def __getattribute__(cls, name):\n        if name[:1] != '_':\n"
        "            raise ImportError(name)\n        return super().__getattribute__(name)\n\n\n"
        "class NotInstalled(metaclass=Missing):\n    pass\n"
    )
    assert main(["process", str(source), "-n", "1", "-m", "reference", "-o", str(tmp_path / "run")]) == ExitCode.FAILED
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"a run awaits .*PlainHook\.{hook} \(plain_{hook}\.py, line 11\).*: write `async def`", said)


def test_the_limit_of_open_files_is_named_once_with_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert "ulimit -n" in guess(full) and "env.max_num_workers" in guess(full)

    async def accepts() -> None:
        for _ in range(3):
            asyncio.get_running_loop().call_exception_handler({"message": "no accept", "exception": full})

    with caplog.at_level(logging.WARNING):
        run(accepts())
    [record] = [record for record in caplog.records if "no accept" in record.getMessage()]
    assert "ulimit -n" in record.getMessage()
    writer = JsonlWriter(tmp_path / "lines.jsonl")
    assert "ulimit -n" in str(writer._error("cannot write", full))
    with pytest.raises(JsonlError, match=r"/dev/full: cannot write .*the disk is full: make room there"):
        JsonlWriter("/dev/full").write({"a": 1})


class Failing(SortWords):
    """It fails where it is told to."""

    where = ""

    async def setup(self) -> None:
        self.fail("setup")
        self.items = iter([{"words": "b a", "id": 1}])  # type: ignore[assignment]

    async def get_next_item(self) -> Any:
        self.fail("get_next_item")
        return next(self.items, None)  # type: ignore[call-overload]

    def format_prompt(self, item: Any) -> str:
        self.fail("format_prompt", item)
        return "Sort 'b a'."

    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        self.fail("setup_sandbox", item)

    def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:  # type: ignore[override]
        self.fail("compute_reward", item)
        return 1.0

    def fail(self, place: str, item: Any = None) -> None:
        if self.where == place:
            item = item or {"words": "", "id": 0}
            item["answer"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", ["setup", "get_next_item", "format_prompt", "setup_sandbox", "compute_reward"])
def test_an_exception_of_the_author_has_one_headline_and_no_frame_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(Failing, "where", where)
    with served(does_nothing) as server:
        flags = ["--openai.base_url", server.base_url, "--openai.model_name", "scripted", "--env.total_steps", "1"]
        flags += ["--env.group_size", "1", "--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
        assert cli.main(Failing, ["process", *flags]) == ExitCode.FAILED
    said = capsys.readouterr().err
    before, _, trace = said.partition("Traceback (most recent call last):")
    headline = before.splitlines()[-1]
    assert headline.endswith("KeyError: 'answer'; item has the fields words, id")
    assert f"in {where}\n" in trace and 'item["answer"]' in trace
    assert not any(name in said for name in OURS)
    if where in ("setup", "get_next_item"):
        assert headline.startswith(f"error: Failing.{where}: ")
        assert trace.splitlines()[-1] == "correct it and start again; finished work is kept"
    else:
        [group] = lines(tmp_path / "groups.failed.jsonl")
        assert "item has the fields words, id" in group["rollouts"][0]["traceback"]


def test_a_method_that_takes_other_arguments_is_the_authors_to_correct(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(Own):
        def reference_policy(self, item: Any) -> Any:  # type: ignore[override]
            return does_nothing

    flags = ["--openai.model_name", "reference", "--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
    assert cli.main(Wrong, ["process", *flags]) == ExitCode.FAILED
    said = capsys.readouterr().err
    assert "it is called as reference_policy(self)" in said and "correct it and start again" in said
    assert "Traceback" not in said and "bug in Lachesis" not in said


def test_what_fails_in_our_code_keeps_its_frames() -> None:
    error = caught(near_module, 3)
    called = explained(error)
    assert called.index("in caught") < called.index("in near_module"), "the author's call, and where it led"
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    assert "in near_module" in explained(error), "nobody's but ours"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ('rows = {}["a"]', 1, "bad.py: KeyError: 'a'\n"),
        ("x = = 1", 1, "bad.py: SyntaxError: invalid syntax"),
        ("x = = 1", 1, "    x = = 1\n        ^\ncorrect it and start again\n"),
        (
            "import lachesis_of_nobody",
            2,
            "needs the package 'lachesis_of_nobody', which is not installed. Next step: pip",
        ),
        (
            "from lachesiss import X",
            2,
            "'lachesiss', which is not installed; did you mean lachesis? Else: pip install lachesiss",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_shows_its_own_line(tmp_path: Path, text: str, code: int, said: str) -> None:
    (tmp_path / "bad.py").write_text(f"{text}\n")
    line = [sys.executable, "-m", "lachesis", "batch", "--env", "bad.py:X", "--batch_size=1", "--run_name=x"]
    done = subprocess.run([*line, "--max_samples=1"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert not any(name in done.stderr for name in ("/lachesis/cli/", "importlib"))


def test_the_headline_of_a_group_is_that_of_its_first_error() -> None:
    said = explained(ExceptionGroup("unhandled errors", [caught(looks_up, None), ValueError()]))
    assert said.startswith("KeyError: 'answer'; item has the fields question, id\n") and "2 sub-exceptions" in said


def test_an_error_whose_text_fails_is_shown_all_the_same() -> None:
    class Mute(KeyError):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert explained(Mute("a")).startswith("Mute: its text cannot be shown\n")


def test_an_expected_error_has_no_traceback() -> None:
    assert explained(InferenceError("http://h", "it is down", "start it")) == (
        "InferenceError: server http://h: it is down; start it\n"
    )


def test_frames_of_installed_packages_are_cut_down_to_the_place_that_raised() -> None:
    import yaml

    def reads() -> None:
        yaml.safe_load("a: [")

    with pytest.raises(yaml.YAMLError) as raised:
        reads()
    said = explained(raised.value)
    files = re.findall(r'File "([^"]+)"', said)
    assert sum("-packages/" in file for file in files) == 1 and "-packages/" in files[-1]
    assert any(file.endswith("test_errors_of_authors.py") for file in files)


ENDING = """
from lachesis import HermesAgentBaseEnv

class Ends(HermesAgentBaseEnv):
    name = "ends"
    toolsets = ()
    async def setup(self):
        {setup}
    async def get_next_item(self):
        {get_next_item}
        return "item"
    def format_prompt(self, item):
        {format_prompt}
        return "Say it"
    async def compute_reward(self, item, result, ctx):
        {compute_reward}
        return 1.0
    async def wandb_log(self, wandb_metrics=None):
        {wandb_log}
    def reference_policy(self):
        from lachesis import Message
        return lambda messages, tools: Message("assistant", "it")

if __name__ == "__main__":
    Ends.cli()
"""


HOOKS = ("setup", "get_next_item", "format_prompt", "compute_reward", "wandb_log")


RAISED = ("SystemExit(0)", "__import__('asyncio').CancelledError", "BaseException('x')")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("hook", "raised"),
    [
        pytest.param(hook, raised, marks=() if number % 3 == kind else pytest.mark.long)
        for number, hook in enumerate(HOOKS)
        for kind, raised in enumerate(RAISED)
    ],
)
def test_what_ends_a_program_ends_a_run_with_its_own_error(hook: str, raised: str, tmp_path: Path) -> None:
    bodies = {**dict.fromkeys(HOOKS, "pass"), hook: f"raise {raised}"}
    (tmp_path / "ends.py").write_text(ENDING.format(**bodies))
    command = [sys.executable, "-m", "lachesis", "process", "ends.py", "-m", "reference", "-n", "1", "-r", "1"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == ExitCode.FAILED, ended.stderr
    said = ended.stdout + ended.stderr
    assert "ends.py" in said and raised.partition("(")[0].rpartition(".")[2] in said
    assert "bug in Lachesis" not in said
