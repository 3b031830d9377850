"""Files that an environment's code names decide scores as its code does."""

from __future__ import annotations

import ast
import os
import time
from pathlib import Path

import pytest

from lachesis.runs import own_data


def found(source: str, folder: Path) -> set[str]:
    return {path.name for path in own_data.files(own_data.named(ast.parse(source)), folder)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rubrics").mkdir()
    for name in ("weights.json", "judge.py", "rubrics/style.txt", "rows.jsonl"):
        (tmp_path / name).write_text("1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("open('weights.json')", {"weights.json"}),
        ("Path(__file__).parent / 'rubrics' / 'style.txt'", {"style.txt"}),
        ("subprocess.run([sys.executable, 'judge.py'])", {"judge.py"}),
        ("open('weights.json', 'w')", set()),
        ("ctx.read_file('weights.json')", set()),
        ("Path('weights.json').read_text()", {"weights.json"}),
        ("'no such file', '/etc/passwd', '../..', ''", set()),
    ],
)
def test_files_that_are_read_are_known_by_their_names(source: str, names: set[str], here: Path) -> None:
    assert found(source, here) == names


def _later(path: Path) -> None:
    os.utime(path, ns=(time.time_ns() + 10**10,) * 2)


def test_an_edit_after_the_last_group_is_a_change_and_what_the_run_wrote_is_none(here: Path) -> None:
    run = here / "data" / "groups.jsonl"
    run.parent.mkdir()
    before = {name: own_data.digest(here / name) for name in ("weights.json", "rows.jsonl", "judge.py")}
    (here / "judge.py").write_text("written by the run")
    run.write_text("{}\n")
    os.utime(here / "judge.py", (1, 1))
    assert own_data.changed(before, here, run) == []
    (here / "weights.json").write_text("2\n")
    (here / "rows.jsonl").write_text("1\n2\n")  # appended: what was there is the same
    for name in ("weights.json", "rows.jsonl"):
        _later(here / name)
    assert own_data.changed(before, here, run) == ["weights.json"]
    (here / "rows.jsonl").write_text("3\n2\n")
    _later(here / "rows.jsonl")
    assert own_data.changed(before, here, run) == ["weights.json", "rows.jsonl"]
