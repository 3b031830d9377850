"""A second run after an edit: scores of other code never pass for those of this one."""

from __future__ import annotations

import itertools
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lachesis.cli import main
from lachesis.cli.environment_classes import environment_class
from lachesis.runs.own_code import OwnCode, own_code
from tests.support.small_envs import lines

MODULE = '''\
"""An environment."""
from lachesis import HermesAgentBaseEnv, Message, tool
from scoring import weight


class Words(HermesAgentBaseEnv):
    """The agent says a word."""

    name = "words"
    toolsets = ()

    async def get_next_item(self):
        return "pear"

    def format_prompt(self, item):
        return f"Say {item}"

    async def compute_reward(self, item, result, ctx):
        from parts import exact  # lazily

        return weight() * exact.same(result.final_response, item)

    def reference_policy(self):
        return lambda messages, tools: Message("assistant", "pear")


if __name__ == "__main__":
    Words.cli()
'''


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An environment with a module, and a package that it imports late, beside it."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "words.py").write_text(MODULE)
    (tmp_path / "scoring.py").write_text("def weight():\n    return 1.0\n")
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "exact.py").write_text(
        "from .lower import lower\n\ndef same(a, b):\n    return lower(a) == b\n"
    )
    (tmp_path / "parts" / "lower.py").write_text("lower = str.lower\n")
    (tmp_path / "unused.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second has the time of the old file
    yield tmp_path
    forget(tmp_path)


def forget(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


def edit(path: str, old: str, new: str) -> None:
    text = Path(path).read_text()
    assert old in text
    Path(path).write_text(text.replace(old, new))


def play(*arguments: str, verb: str = "process", file: str = "words.py") -> int:
    """As in a new process."""
    forget(Path.cwd())
    count = {"process": ["-n", "2", "-r", "1"], "eval": ["-n", "1"]}[verb]
    return main([verb, file, "-m", "reference", *count, *arguments])


def digests(file: str = "words.py") -> set[str]:
    forget(Path.cwd())
    code = own_code(environment_class(file))
    assert code is not None
    return {*code.files.values()}


def scores(folder: str, name: str = "groups.jsonl") -> list[float]:
    return [score for group in lines(Path(folder, name)) for score in group["scores"]]


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("words.py", "weight() *", "0.5 * weight() *"),
        ("words.py", '"Say {item}"', '"Say: {item}"'),
        ("scoring.py", "1.0", "0.5"),
        ("parts/exact.py", "==", "!="),
        ("parts/lower.py", "str.lower", "str.strip"),
        ("parts/__init__.py", "", "STRICT = True\n"),
    ],
)
def test_an_edit_of_what_the_environment_imports_is_other_code(path: str, old: str, new: str) -> None:
    before = digests()
    Path(path).write_text(Path(path).read_text().replace(old, new) if old else new)
    assert digests() != before


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("words.py", "# lazily", "# when it is needed"),
        ("words.py", "An environment.", "One environment."),
        ("words.py", '    """The agent says a word."""\n\n', ""),
        ("words.py", "weight() * exact", "(weight()) \\\n            * exact"),
        ("scoring.py", "def weight():\n", 'def weight():\n    """Of a right answer."""\n'),
        ("unused.py", "1", "2"),
    ],
)
def test_comments_docstrings_and_files_that_nothing_imports_are_no_code(path: str, old: str, new: str) -> None:
    before = digests()
    edit(path, old, new)
    assert digests() == before


def test_a_docstring_that_the_model_reads_is_code() -> None:
    tools = '@TOOLS.tool(toolset="own")\nasync def look(at: str):\n    """Look at it."""\n\n\n'
    edit("words.py", "class Words", f"{tools.replace('TOOLS.tool', 'tool')}class Words")
    before = digests()
    edit("words.py", "Look at it.", "Look at it twice.")
    assert digests() != before
    edit("words.py", 'f"Say {item}"', "__doc__ + item")
    before = digests()
    edit("words.py", "An environment.", "One environment.")
    assert digests() != before


def test_what_is_installed_is_no_code() -> None:
    assert own_code(environment_class("gsm8k")) is None
    edit("words.py", "from scoring", "import pytest\nimport json.decoder\nfrom scoring")
    code = own_code(environment_class("words.py"))
    assert code is not None
    assert set(code.files) == {"words.py", "scoring.py", "parts/__init__.py", "parts/exact.py", "parts/lower.py"}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", ["process", "eval"])
def test_edited_code_gets_a_new_folder_and_the_line_says_how_to_continue_the_old_one(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, folder = ("groups.jsonl", "data/words") if verb == "process" else ("samples.jsonl", "data/words/eval")
    assert play(verb=verb) == 0
    first = scores(folder, name)
    edit("words.py", "weight() *", "0.5 * weight() *")
    capsys.readouterr()
    for _ in range(2):  # the same command finds its folder again
        assert play(verb=verb) == 0
        said = capsys.readouterr().err
        what = "2 groups" if verb == "process" else "1 sample"
        assert f"words.py changed since {folder}/{name} began ({what} finished)" in said
        assert f"so this run writes to {folder}-2" in said
    assert scores(folder, name) == first == [1.0] * len(first)
    assert scores(f"{folder}-2", name) == [0.5] * len(first)
    edit("words.py", "0.5 *", "0.25 *")
    assert play("--env.when_code_changed", "new_folder", verb=verb) == 0
    assert "--env.when_code_changed continue" in capsys.readouterr().err
    assert scores(f"{folder}-3", name) == [0.25] * len(first)
    edit("words.py", "0.25 *", "0.125 *")
    assert play("-n", "3", "--env.when_code_changed", "continue", verb="process") == 0 if verb == "process" else True
    if verb == "process":
        assert scores("data/words-3") == [0.25, 0.25, 0.125]
        assert play("-n", "3") == 0  # it is the code of that run from now on
        assert "continuing data/words-3/groups.jsonl: 3 groups done" in capsys.readouterr().err
        assert len(json.loads(Path("data/words-3/groups.run.json").read_bytes())["earlier_code"]) == 1


@pytest.mark.slow
def test_a_folder_that_was_named_is_refused_with_both_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert play("-o", "out") == 0
    edit("scoring.py", "1.0", "0.5")
    capsys.readouterr()
    assert play("-o", "out") == 2
    said = capsys.readouterr().err
    assert "scoring.py changed since out/groups.jsonl began (2 groups finished)" in said
    assert "--env.when_code_changed continue" in said and "-o out-2" in said
    assert play("-o", "out", "--env.when_code_changed", "new_folder") == 0
    assert scores("out-2") == [0.5, 0.5] and scores("out") == [1.0, 1.0]
    assert play("-n", "3", "-o", "out", "--env.when_code_changed", "continue") == 0
    assert scores("out") == [1.0, 1.0, 0.5]


@pytest.mark.slow
def test_another_file_with_the_same_name_continues_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert play() == 0
    Path("other.py").write_text(MODULE.replace("weight() *", "0.5 * weight() *"))
    Path("copied.py").write_text(MODULE)
    capsys.readouterr()
    assert play(file="other.py") == 0
    said = capsys.readouterr().err
    assert "data/words/groups.jsonl was started by words.py, not by other.py (2 groups finished)" in said
    assert scores("data/words-2") == [0.5, 0.5]
    assert play(file="copied.py") == 0  # the same code
    assert "continuing data/words/groups.jsonl" in capsys.readouterr().err
    edit("words.py", "weight() *", "0.25 * weight() *")
    assert play("-n", "3", "--env.when_code_changed", "continue") == 0
    assert scores("data/words") == [1.0, 1.0, 0.25]  # its own run, not the later one of the other file


def test_files_that_exchange_their_contents_are_other_code_and_a_file_with_a_new_name_is_not() -> None:
    edit("words.py", "from scoring import weight", "import strict\nfrom scoring import weight")
    Path("strict.py").write_text("def weight():\n    return 0.0\n")

    def code() -> OwnCode:
        forget(Path.cwd())
        found = own_code(environment_class("words.py"))
        assert found is not None
        return found

    before, run = code(), Path("data/words/groups.jsonl")
    strict, scoring = Path("strict.py").read_text(), Path("scoring.py").read_text()
    Path("scoring.py").write_text(strict)
    Path("strict.py").write_text(scoring)
    assert code().change(before.to_record(), run) == f"scoring.py, strict.py changed since {run} began"
    files = {name.replace("strict", "exact"): digest for name, digest in before.files.items()}
    assert replace(before, files=files).change(before.to_record(), run) == ""
    files["more.py"] = before.files["scoring.py"]
    assert replace(before, files=files).change(before.to_record(), run)


def test_a_run_without_a_finished_group_is_begun_anew_in_its_folder() -> None:
    edit("words.py", "weight() *", "1 / 0 *")
    assert play() == 1
    edit("words.py", "1 / 0 *", "weight() *")
    assert play() == 0
    assert scores("data/words") == [1.0, 1.0] and not Path("data/words-2").exists()


@pytest.mark.slow
def test_a_run_of_an_older_version_is_continued() -> None:
    assert play() == 0
    manifest = Path("data/words/groups.run.json")
    about = json.loads(manifest.read_bytes())
    del about["code"]
    manifest.write_text(json.dumps(about))
    edit("words.py", "weight() *", "0.5 * weight() *")
    assert play("-n", "3") == 0
    assert scores("data/words") == [1.0, 1.0, 0.5]
    edit("words.py", "0.5 *", "0.25 *")
    assert play("-n", "3") == 0
    assert scores("data/words-2") == [0.25] * 3


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("answer", "places"), [("c\n", {"data/words": 3}), ("\n", {"data/words": 2, "data/words-2": 3})]
)
def test_a_terminal_is_asked(answer: str, places: dict[str, int]) -> None:
    assert play() == 0
    edit("words.py", "weight() *", "0.5 * weight() *")
    ours, theirs = pty.openpty()
    command = [sys.executable, "words.py", "process", "--openai.model_name", "reference", "--env.total_steps", "3"]
    process = subprocess.Popen(
        [*command, "--env.group_size", "1"], stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    said = ""
    while "[N/c]" not in said and select.select([ours], [], [], 60)[0]:
        said += os.read(ours, 4096).decode()
    assert "words.py changed since data/words/groups.jsonl began (2 groups finished)" in said
    os.write(ours, answer.encode())
    for _ in itertools.count():
        try:
            if not os.read(ours, 4096):
                break
        except OSError:  # the process has closed it
            break
    assert process.wait() == 0
    os.close(ours)
    assert {str(path.parent): len(lines(path)) for path in Path("data").rglob("groups.jsonl")} == places
