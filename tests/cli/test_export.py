"""`lachesis export`: a finished run in another format, whole or not at all, with every rollout accounted for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis.cli import main
from lachesis.testing.export_suite import ExportSuite, example_groups
from lachesis.trajectories import JsonlWriter, read_lines
from lachesis.trajectories.exports import EXPORTS
from tests.support.scripted_server import say
from tests.support.small_envs import SortWords, asked_words, process, sorts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export-plugins.md"


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    path = tmp_path / "groups.jsonl"
    with JsonlWriter(path) as writer:
        for group in example_groups():
            writer.write(group)
    return path


def lines(path: Path) -> list[Any]:
    return list(read_lines(path))


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


def test_the_totals_name_every_rollout(groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = groups.with_name("out.jsonl")
    assert export(groups, "--format", "dataset", "--options", "{min_reward: 0.5}", "--out", out) == 0
    assert len(lines(out)) == 4
    assert capsys.readouterr().out.splitlines() == [
        f"4 lines from 9 rollouts of 4 groups: {out}",
        "  left out: 3 rollouts, not completed",
        "  left out: 2 rollouts, reward below 0.5",
    ]
    assert export(groups, "--format", "trajectory", "--out", out) == 0
    told = capsys.readouterr().out
    assert "changed: 1 lines, arguments_replaced" in told
    assert "left out: 2 rollouts, no answer by the model" in told
    assert len(lines(out)) == 7, "an earlier export is replaced"


def test_a_batch_numbers_its_groups_by_their_place(groups: Path) -> None:
    out = groups.with_name("out.jsonl")
    assert export(groups, "--format", "batch", "--options", "{toolsets: [terminal]}", "--out", out) == 0
    assert [line["prompt_index"] for line in lines(out)] == [0, 0, 0, 0, 1, 3, 3]
    assert all(line["toolsets_used"] == ["terminal"] for line in lines(out))
    assert lines(out)[0]["tool_stats"] == {"terminal": {"count": 1, "success": 1, "failure": 0}}


FAILS = """
from lachesis.trajectories.exports import ExportLine

def halfway(group):
    for rollout in group["rollouts"]:
        yield ExportLine({"reward": rollout["reward"]}, (rollout["rollout_id"],))
    if group["item_key"] == "b-1":
        raise KeyError("colour")

def not_json(group):
    for rollout in group["rollouts"]:
        yield ExportLine({"what": object()}, (rollout["rollout_id"],))
"""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--format", "dataste"), ["dataste", "Did you mean 'dataset'"]),
        (("--format", "no_such_module:x"), ["no_such_module"]),
        (("--format", "fails:missing"), ["fails", "missing"]),
        (("--format", "fails:halfway"), ["group 2 of the file", "b-1", "KeyError", "colour"]),
        (("--format", "fails:not_json"), ["group 1 of the file", "a-1", "JSON"]),
        (("--format", "dataset", "--options", "{colour: red}"), ["dataset", "colour"]),
        (("--format", "dataset", "--options", "[1]"), ["--options", "mapping"]),
        (("--format", "dataset", "--options", "{"), ["error:"]),
        (("--format", "dataset", "--out", "groups.jsonl"), ["groups file itself"]),
        (("--format", "dataset", "--out", "."), ["not a regular file"]),
        (("--format", "dataset", "--out", "groups.jsonl/x"), ["groups.jsonl/x"]),
        (("--format", "dataset", "--groups", "missing.jsonl"), ["missing.jsonl"]),
        (("--format", "dataset", "--groups", "torn.jsonl"), ["torn.jsonl", "line 5"]),
        (("--format", "dataset", "--groups", "samples.jsonl"), ["samples.jsonl", "record 1", "groups.jsonl"]),
    ],
)
def test_what_cannot_be_exported_is_one_message_and_leaves_no_file(
    groups: Path,
    arguments: tuple[str, ...],
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(groups.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("fails.py").write_text(FAILS)
    Path("torn.jsonl").write_bytes(groups.read_bytes() + b'{"rollouts": [')
    Path("samples.jsonl").write_text('{"tokens": []}\n')
    Path("out.jsonl").write_text("an earlier export\n")
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    source = given.pop("--groups", "groups.jsonl")
    given.setdefault("--out", "out.jsonl")
    assert export(source, *(word for pair in given.items() for word in pair)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    for name in named:
        assert name in error
    assert {path: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


def test_the_author_of_an_export_sees_where_it_fails(
    groups: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(groups.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("fails.py").write_text(FAILS)
    assert export("groups.jsonl", "--format", "fails:halfway", "--out", "out.jsonl") == 1
    assert 'raise KeyError("colour")' in capsys.readouterr().err


async def test_a_run_of_process_exports_in_every_format(tmp_path: Path) -> None:
    class Picky(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return None if ctx.task_id.endswith("-0") else await super().compute_reward(item, result, ctx)

    result = await process(
        Picky, tmp_path, lambda request: sorts(request) if "apple" in asked_words(request) else say("No.")
    )
    played = lines(result.files.groups)
    (example, *_) = example_groups()
    for group in played:
        assert set(group) == set(example), "the suite's examples are groups as `process` writes them"
        assert {len(group["rollouts"])} == {2}
        for rollout in group["rollouts"]:
            assert set(rollout) - {"messages"} == set(example["rollouts"][0]) - {"messages"}
    for name in EXPORTS.names():
        out = tmp_path / f"{name}.jsonl"
        assert export(result.files.groups, "--format", name, "--out", out) == 0
        assert len(lines(out)) == (0 if name == "samples" else 4), "this run is of Phase 1: it has no token samples"
    written = lines(result.files.samples) + lines(result.files.failed_samples)
    by_id = {entry["rollout_id"]: entry for entry in written}
    assert {entry["rollout_id"]: entry for entry in lines(tmp_path / "trajectory.jsonl")} == by_id

    class Played(ExportSuite):
        export = "trajectory"
        groups = played

    Played().test_every_rollout_is_in_a_line_or_left_out_with_a_reason()


def test_the_example_of_the_page_is_found_by_its_path_and_passes_the_suite(groups: Path, tmp_path: Path) -> None:
    export_code, suite_code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(export_code.splitlines()) <= 40
    (tmp_path / "preference_pairs.py").write_text(export_code)
    (tmp_path / "test_pairs.py").write_text(suite_code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_pairs.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d passed", done.stdout)
    command = [Path(sys.executable).with_name("lachesis"), "export", "groups.jsonl"]
    done = subprocess.run(
        [*command, "--format", "preference_pairs:pairs", "--options", "{margin: 0.5}", "--out", "pairs.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path / "pairs.jsonl")
    assert [json.dumps(pair["prompt"]) for pair in found] == ['[{"role": "user", "content": "Sort the words."}]']
