"""From `lachesis new` to a score: what it writes is checked, played and measured by the short commands."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis import HermesAgentBaseEnv, check_environment
from lachesis.cli import main
from lachesis.settings.server_settings import ServerConfigError
from lachesis_console.auditing.policies import random_policy
from lachesis_console.verbs.new import KINDS
from lachesis_messages.messages import Message
from tests.support.small_envs import lines


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = {*sys.modules}
    yield
    for name in {*sys.modules} - known:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.slow
def test_what_new_writes_passes_its_own_test(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        assert main(["new", f"my-{kind}", "--kind", kind]) == 0
    said = capsys.readouterr().out
    of_judge = [line for line in said.splitlines() if "lachesis" in line and "my_judge.py" in line]
    assert len(of_judge) == 4 and all("--env.judge_server '{base_url: URL" in line for line in of_judge)
    assert "pytest test_my_swe.py" in said and "lachesis eval my_terminal.py -n 2 -m reference" in said
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q"], capture_output=True, text=True)
    assert f"{len(KINDS)} passed" in ran.stdout, ran.stdout
    assert main(["new", "my-swe"]) == 2
    assert "my_swe.py exists already" in capsys.readouterr().err
    assert main(["new", "../escape"]) == 2
    assert "is not a valid environment name" in capsys.readouterr().err
    for taken in ("json", "class", "lachesis"):  # a file that no command could import
        assert main(["new", taken]) == 2 and not Path(f"{taken}.py").exists()
        assert f"{taken}.py could not be imported" in capsys.readouterr().err


@pytest.mark.slow
def test_one_environment_is_measured_and_played_again_with_other_settings_in_a_folder_of_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def folders(pattern: str) -> dict[str, int]:
        return {str(path.parent): len(lines(path)) for path in Path("data").rglob(pattern)}

    main(["new", "short"])
    for flags in (["-n", "1"], ["-n", "1", "--max-turns", "5"], ["-n", "2"], ["-n", "2", "--max-turns", "5"]):
        assert main(["eval", "short.py", "-m", "reference", *flags]) == 0
    assert folders("samples.jsonl") == {"data/short/eval": 2, "data/short/eval-2": 2}
    assert {str(path.parent) for path in Path("data").rglob("metrics.json")} == {"data/short/eval", "data/short/eval-2"}
    said = " ".join(capsys.readouterr().err.split())
    assert "(max_agent_turns: 8 then, 5 now), so this run writes to data/short/eval-2" in said
    assert "continuing data/short/eval-2/samples.jsonl: 1 rollout done" in said
    for rollouts in ("1", "2"):
        assert main(["process", "short.py", "-m", "reference", "-n", "1", "-r", rollouts]) == 0
    assert folders("groups.jsonl") == {"data/short": 1, "data/short-2": 1}
    capsys.readouterr()
    assert main(["eval", "short.py", "-m", "reference", "-n", "1", "--max-turns", "4", "-o", "data/short/eval"]) == 2
    assert "write elsewhere: -o " in " ".join(capsys.readouterr().err.split())


def test_the_short_flags_are_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "short"])
    assert main(["eval", "short.py", "-n", "2", "-r", "2", "-m", "reference", "-T", "0.5", "-o", "measured"]) == 0
    assert [group["scores"] for group in lines(Path("measured/samples.jsonl"))] == [[1.0]] * 4
    (about,) = (json.loads(path.read_text()) for path in Path("measured").glob("*.run.json"))
    assert about["settings"]["eval_temperature"] == 0.5
    assert main(["process", "short.py:Short", "-n", "1", "-r", "3", "-m", "reference", "-o", "played"]) == 0
    assert [group["scores"] for group in lines(Path("played/groups.jsonl"))] == [[1.0] * 3]
    capsys.readouterr()
    assert main(["eval", "short.py", "-m", "reference", "--openai.model_name", "other"]) == 2
    assert "--openai.model_name is given twice: it is -m here" in capsys.readouterr().err
    assert main(["eval", "-n", "2", "short.py"]) == 2
    assert "name the environment first" in capsys.readouterr().err
    assert main(["eval", "short.py:Missing"]) == 2
    assert "short.py has no Missing; it defines Short" in capsys.readouterr().err
    assert main(["process", "gsm8l"]) == 2
    assert "did you mean gsm8k?" in capsys.readouterr().err
    for verb in ("eval", "process"):
        with pytest.raises(SystemExit):
            main([verb, "short.py", "--env.max_truns", "3"])
        said = capsys.readouterr().err
        assert said.startswith("error: ") and "did you mean --env.max_agent_turns?" in said
    assert main(["envs"]) == 0
    assert "reasoning_gym" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", ["eval", "process"])
def test_a_second_run_with_other_settings_is_answered_with_flags_that_can_be_pasted(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["new", "played-twice"])
    command = [verb, "played_twice.py", "-n", "1", "-m", "reference"]
    assert main([*command, "-o", "first"]) == 0
    for found in (r"elsewhere: (-o \S+) ", r" or (--env\.\S+ \S+)$"):
        capsys.readouterr()
        assert main([*command, "--max-turns", "3", "-o", "first"]) == 2
        said = capsys.readouterr().err
        (flags,) = re.findall(found, said, re.MULTILINE)
        assert "max_agent_turns: " in said and main([*command, "--max-turns", "3", *shlex.split(flags)]) == 0


class Echo(HermesAgentBaseEnv):
    """The agent says a word."""

    name = "echo"
    toolsets = ()
    earns: Any = staticmethod(lambda said, word: float(said == word))
    plays: Any = staticmethod(lambda messages, tools: Message("assistant", messages[-1]["content"].split()[-1]))

    async def setup(self) -> None:
        self.items = itertools.cycle(["pear", "fig"])

    async def get_next_item(self) -> str:
        return next(self.items)

    def format_prompt(self, item: str) -> str:
        return f"Say {item}"

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float | None:
        reward: float | None = self.earns(result.final_response, item)
        return reward

    def reference_policy(self) -> Any:
        return self.plays


DRAWS = itertools.count()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"earns": lambda said, word: 0.5}, "the reward is always 0.5"),
        ({"earns": lambda said, word: 0.5}, "reference: it earns 0.5 for"),
        ({"earns": lambda said, word: float(len(said) > 3)}, "nothing: it earns up to 1, in 2 of 2 rollouts"),
        ({"earns": lambda said, word: next(DRAWS) % 2 * float(said == word)}, "the reward depends on something else"),
        ({"earns": lambda said, word: {}["answer"]}, "no score: KeyError: 'answer' (test_new_environments.py, line"),
        ({"earns": lambda said, word: None}, "rollouts without a score"),
        ({"reference_policy": lambda self: None}, "there is no reference_policy()"),
        ({"plays": lambda messages, tools: "pear"}, "not a Message"),
    ],
)
def test_the_check_finds(changes: dict[str, Any], said: str) -> None:
    values = {name: staticmethod(value) if name != "reference_policy" else value for name, value in changes.items()}
    report = asyncio.run(check_environment(type("Echo", (Echo,), {"__module__": __name__, **values}), items=2))
    assert said in str(report) if said else report.findings == [], str(report)


def test_a_reference_policy_without_a_solution_for_an_item_is_a_note() -> None:
    def plays(messages: Any, tools: Any) -> str:
        raise SettingsError("it has no solutions")

    cls = type("Echo", (Echo,), {"__module__": __name__, "plays": staticmethod(plays)})
    report = asyncio.run(check_environment(cls, items=2))
    assert report.findings == [] and "it has no solution for this item" in report.notes[0]


def test_an_environment_that_scores_nothing_is_one_finding() -> None:
    def fails(said: str, word: str) -> float:
        raise ValueError("the rubric is missing")

    report = asyncio.run(
        check_environment(type("Echo", (Echo,), {"__module__": __name__, "earns": staticmethod(fails)}))
    )
    (finding,) = report.findings
    assert "rollouts without a score: ValueError: the rubric is missing (test_new_environments.py, line" in finding
    trace = report.code[finding]
    assert 'raise ValueError("the rubric is missing")' in trace and f"{finding}\n{trace}" in str(report)
    assert str(report).count("the rubric is missing") == 2, "the reason, and the line of code"


def test_each_reason_without_a_score_has_its_own_count() -> None:
    def fails(said: str, word: str) -> float:
        raise (KeyError if next(fails_so_far) else ValueError)("no rubric")

    fails_so_far = itertools.count()
    cls = type("Echo", (Echo,), {"__module__": __name__, "earns": staticmethod(fails)})
    first = asyncio.run(check_environment(cls, items=2)).played[0]
    assert sorted(first.reasons.values()) == [1, 3] and first.tracebacks.keys() == first.reasons.keys()


def test_different_exceptions_of_one_line_are_all_shown() -> None:
    def fails(said: str, word: str) -> float:
        raise (KeyError if word == "pear" else ValueError)(said)

    report = asyncio.run(
        check_environment(type("Echo", (Echo,), {"__module__": __name__, "earns": staticmethod(fails)}), items=2)
    )
    kinds = [re.findall(r"score: (\w+):", finding) for finding in report.findings]
    assert sorted(map(str, kinds)) == ["['KeyError']", "['ValueError']"] and len(report.code) == 1


@pytest.mark.parametrize(
    ("line", "broken", "said"),
    [
        ("self.items = itertools", "self.items = open('items.json')", "Checked.setup: FileNotFoundError"),
        ("return next(self.items)", "return next(self.items)['id']", "Checked.get_next_item: KeyError"),
        ("written = await", "written = item['sorted']", "KeyError: 'sorted'; item has the fields words"),
        ("written = await", "written = json.loads('?')", "column 1 (char 0) (checked.py, line "),
    ],
)
def test_an_exception_of_the_author_is_shown_with_its_traceback_and_no_frame_of_the_check(
    line: str, broken: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["new", "checked"])
    path = Path("checked.py")
    path.write_text("".join(f"        {broken}\n" if line in each else each for each in path.open()))
    assert main(["check", "checked.py", "-n", "1"]) == 1
    shown = "".join(capsys.readouterr())
    assert shown.count(said) == 1 and broken in shown and shown.count("Traceback") <= 1
    assert "checking.py" not in shown and "is kept" not in shown


def test_an_environment_without_a_reference_policy_has_a_note_and_no_finding() -> None:
    report = asyncio.run(
        check_environment(type("Echo", (Echo,), {"__module__": __name__, "reference_policy": no_policy}))
    )
    [noted] = report.notes
    assert noted.startswith("the reference policy: there is no reference_policy(); so full marks may be impossible")
    assert not report.findings and [played.policy for played in report.played] == ["nothing", "random"]


def test_a_reference_policy_that_lacks_a_setting_is_a_finding() -> None:
    def lacks(_: Any) -> None:
        raise SettingsError("name the file of solutions with --env.solutions")

    report = asyncio.run(check_environment(type("Echo", (Echo,), {"__module__": __name__, "reference_policy": lacks})))
    [found] = report.findings
    assert "--env.solutions" in found


def test_the_environment_of_the_readme_is_not_suspicious(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    Path("sort_words.py").write_text(readme.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    assert main(["check", "sort_words.py", "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert "note: the reference policy: there is no reference_policy()" in said and "suspicious:" not in said


def no_policy(_: Any) -> None:
    """What an environment has that does not write one."""


@pytest.mark.parametrize("verb", ["check", "audit"])
def test_an_environment_without_items_is_no_success(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "empty"]) == 0
    text = Path("empty.py").read_text()
    Path("empty.py").write_text(
        re.sub(r"(async def get_next_item\(self\).*?:\n).*?\n\n", r"\1        return None\n\n", text, flags=re.S)
    )
    capsys.readouterr()
    assert main([verb, "empty.py"]) == 2
    shown = capsys.readouterr()
    assert "empty has no items: get_next_item returned None at its first call" in " ".join(shown.err.split())
    assert "nothing suspicious" not in shown.out.lower() and "Traceback" not in shown.err


def test_a_file_with_the_name_of_another_module_is_not_taken_for_that(capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "short"])
    Path("json.py").write_text(Path("short.py").read_text())
    assert main(["check", "json.py"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "json.py has the name of another module, " in said and "rename the file" in said


def test_a_policy_that_is_no_function_is_named() -> None:
    class Wrong(Echo):
        def reference_policy(self) -> Any:
            return "pear"

    with pytest.raises(ServerConfigError, match="returned 'pear', which is not a function"):
        asyncio.run(check_environment(Wrong, items=1))


def test_a_check_without_the_judge_names_its_setting_and_prints_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "judged", "--kind", "judge"])
    capsys.readouterr()
    assert main(["check", "judged.py", "-n", "1"]) == 2
    said = capsys.readouterr()
    assert "name it with --env.judge_server" in said.err and not said.out


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "checked"])
    assert main(["check", "checked.py", "-n", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "reference 4 1.000 1.000 1.000 0" in said and "nothing suspicious" in said
    assert "the reward reads in" not in said, "it has to: the prompt names the file"
    Path("answers.py").write_text(Path("checked.py").read_text().replace("into sorted.txt", "into a new file"))
    main(["check", "answers.py", "-n", "2"])
    said = " ".join(capsys.readouterr().out.split())
    assert "the reward reads in the agent's own sandbox: ctx.read_file('sorted.txt')" in said
    text = Path("checked.py").read_text().replace("float(written", "1.0 or float(written")
    Path("careless.py").write_text(text)
    assert main(["check", "careless.py", "-n", "2"]) == 1
    assert "suspicious: nothing: it earns up to 1" in capsys.readouterr().out


def test_an_exception_under_the_check_is_the_authors_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "broken"])
    text = Path("broken.py").read_text().replace("self.items = ", "self.items = self.rows and ")
    Path("broken.py").write_text(text)
    assert main(["check", "broken.py"]) == 1
    said = capsys.readouterr().err
    assert "error: Broken.setup: AttributeError" in said and "checking.py" not in said


def test_a_terminal_hears_at_once_what_begins() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "lachesis", "eval", "nowhere.py"]
    assert subprocess.run(command, stderr=theirs, check=False).returncode == 2
    begun, ended = os.read(ours, 4096).decode().splitlines()
    assert begun == "nowhere.py: eval" and "error: there is no file or folder nowhere.py" in ended
    os.close(ours)
    os.close(theirs)


def test_random_calls_fit_their_schemas() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "mode": {"enum": ["a", "b"]},
            "count": {"type": "integer", "minimum": 3},
            "names": {"type": "array", "items": {"type": ["string", "null"]}},
            "deep": {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": {"type": "number"}}}]},
        },
        "required": ["mode", "count", "names", "deep"],
    }
    tools = [{"type": "function", "function": {"name": "act", "parameters": parameters}}]
    for number in range(50):
        messages = [{"role": "user", "content": f"task {number}"}]
        said = random_policy(messages, tools)
        assert said == random_policy(messages, tools)
        arguments = json.loads(said.tool_calls[0].arguments)
        assert arguments["mode"] in ("a", "b") and 3 <= arguments["count"] <= 8
        assert all(isinstance(name, str) for name in arguments["names"])
        assert isinstance(arguments["deep"], bool | dict)
    assert not random_policy(messages, None).tool_calls
