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
from lachesis.figures.rollout_records import rollout_record
from lachesis.loop.rollout import Rollout
from lachesis_compat.modules.model_tools import TOOL_TO_TOOLSET_MAP
from lachesis_data.exports.builtin_exports import token_samples
from lachesis_data.exports.exports import EXPORTS
from lachesis_data.exports.parquet import read_rows
from lachesis_data.files.validation import validate_entry
from lachesis_messages.records.export_lines import ExportLine
from lachesis_messages.records.jsonl import JsonlWriter, read_lines
from lachesis_testing.export_suite import ExportSuite, example_groups
from tests.support.eval_logs import read_samples
from tests.support.scripted_server import say
from tests.support.small_envs import SortWords, asked_words, process, sorts

OLD_NAMES = {"trajectory": "hermes", "dataset": "sharegpt-tools"}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "export-plugins.md"


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
    assert export(groups, "--format", "hermes", "--min-reward", 0.5, "--out", out) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{len(lines(out))} lines from 9 rollouts")
    assert lines(out) and all((line["reward"] or 0) >= 0.5 for line in lines(out))
    assert export(groups, "--format", "dpo", "--min-reward", 0.5, "--out", out) == 0
    assert lines(out), "the worse one of a pair is to be worse"
    assert export(groups, "--format", "harbor", "--min-reward", 0.5, "--out", out.with_name("job")) == 2
    capsys.readouterr()
    assert export(groups, "--format", "trajectory", "--out", out) == 0
    printed = capsys.readouterr().out
    assert "changed: 1 line, arguments_replaced" in printed
    assert "left out: 2 rollouts, no answer by the model" in printed
    assert len(lines(out)) == 7, "an earlier export is replaced"


def test_a_batch_numbers_its_groups_by_their_place(groups: Path) -> None:
    out = groups.with_name("out.jsonl")
    options = "{toolsets: [terminal], keep_without_reasoning: true}"
    assert export(groups, "--format", "batch", "--options", options, "--out", out) == 0
    assert [line["prompt_index"] for line in lines(out)] == [0, 0, 0, 0, 1, 3, 3]
    assert all(line["toolsets_used"] == ["terminal"] for line in lines(out))
    assert {name for line in lines(out) for name in line["tool_stats"]} == set(TOOL_TO_TOOLSET_MAP)
    used = {name: row for name, row in lines(out)[0]["tool_stats"].items() if row["count"]}
    assert used == {"terminal": {"count": 1, "success": 1, "failure": 0}}


async def test_a_batch_has_a_column_for_every_tool_and_leaves_out_what_shows_no_reasoning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    datasets.disable_progress_bars()

    def policy(request: dict[str, Any]) -> Any:
        return say("No.", **({"reasoning_content": "Hm."} if "apple" in asked_words(request) else {}))

    outs = []
    for toolset in ("file", "terminal"):
        (tmp_path / toolset).mkdir()
        result = await process(SortWords, tmp_path / toolset, policy, enabled_toolsets=[toolset])
        outs.append(tmp_path / f"{toolset}.jsonl")
        assert export(result.files.groups, "--format", "batch", "--out", outs[-1]) == 0
        assert "left out: 2 rollouts, no reasoning" in capsys.readouterr().out
    written = [line for out in outs for line in lines(out)]
    assert len(written) == 4
    zero = {"count": 0, "success": 0, "failure": 0}
    assert all(line["tool_stats"] == dict.fromkeys(TOOL_TO_TOOLSET_MAP, zero) for line in written)
    assert all(line["tool_error_counts"] == dict.fromkeys(TOOL_TO_TOOLSET_MAP, 0) for line in written)
    for files in (outs, outs[::-1]):
        of_both = datasets.load_dataset(
            "json", data_files=list(map(str, files)), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert sorted(map(str, of_both["metadata"])) == sorted(str(line["metadata"]) for line in written)
        assert list(of_both["tool_stats"]) == [line["tool_stats"] for line in written]


def test_a_folder_is_the_run_whose_groups_it_holds(groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = groups.with_name("out.jsonl")
    assert export(groups.parent, "--format", "openai", "--out", out) == 2
    assert "must contain one groups file, and this one has none; name the file" in capsys.readouterr().err
    groups.with_suffix(".run.json").write_text("{}")
    assert export(groups.parent, "--format", "openai", "--out", out) == 0
    assert len(lines(out)) == 5
    groups.with_name("other.jsonl").write_bytes(groups.read_bytes())
    groups.with_name("other.run.json").write_text("{}")
    assert export(groups.parent, "--format", "openai", "--out", out) == 2
    assert "has several: groups.jsonl, other.jsonl" in capsys.readouterr().err


FAILS = """
from lachesis_messages.records.export_lines import ExportLine, LeftOutRollout

def halfway(group):
    for rollout in group["rollouts"]:
        yield ExportLine({"reward": rollout["reward"]}, (rollout["rollout_id"],))
    if group["item_key"] == "b-1":
        raise KeyError("colour")

def not_json(group):
    for rollout in group["rollouts"]:
        yield ExportLine({"what": object()}, (rollout["rollout_id"],))

def a_dict(group):
    yield {"reward": 1.0}

def returns(group):
    pass

def one_id(group):
    yield ExportLine({}, group["rollouts"][0]["rollout_id"])

def no_reason(group):
    yield LeftOutRollout(group["rollouts"][0], "not wanted")

def typed(group, *, margin=0.0, names=("a",), title="pairs"):
    yield from ()
"""


@pytest.mark.parametrize(
    ("arguments", "named", "code"),
    [
        (("--format", "dataste"), ["dataste", "Did you mean 'dataset'"], 2),
        (("--format", "no_such_module:x"), ["no_such_module"], 2),
        (("--format", "fails:missing"), ["fails", "missing"], 2),
        (("--format", "fails:halfway"), ["group 2 of the file", "b-1", "KeyError", "colour"], 1),
        (("--format", "fails:not_json"), ["group 1 of the file", "a-1", "JSON"], 1),
        (("--format", "dataset", "--options", "{colour: red}"), ["dataset", "colour"], 2),
        (("--format", "dataset", "--options", "[1]"), ["--options", "mapping"], 2),
        (("--format", "dataset", "--options", "{"), ["error:"], 2),
        (("--format", "fails"), ["no export called 'fails'", "did you mean fails:NAME?"], 2),
        (("--format", "fails:a_dict"), ["group 1", "yields ExportLine and LeftOutRollout", "a dict: {'reward'"], 1),
        (("--format", "fails:returns"), ["returns None"], 1),
        (("--format", "fails:one_id"), ["rollout_ids is a tuple of texts", "write ('a-1-0',)"], 1),
        (("--format", "fails:no_reason"), ["LeftOutRollout: takes a rollout_id and a reason"], 1),
        (("--format", "fails:typed", "--options", "{margin: wide}"), ["option margin", "number", "'wide'"], 2),
        (("--format", "fails:typed", "--options", "{names: one}"), ["option names", "'one'"], 2),
        (("--format", "fails:typed", "--options", "{title: 3}"), ["option title", "string"], 2),
        (("--format", "dataset", "--options", "{min_reward: high}"), ["option min_reward", "'high'"], 2),
        (("--format", "batch", "--options", "{toolsets: [file, 3]}"), ["option toolsets[1]", "string"], 2),
        (("--format", "trajectory", "--options", "{system: none_}"), ["option system", "'generated'"], 2),
        (("--format", "dataset", "--out", "groups.jsonl"), ["groups file itself"], 2),
        (("--format", "dataset", "--out", "."), ["not a regular file"], 1),
        (("--format", "inspect", "--out", "log.json"), ["-o log.json", "write -o log.eval"], 2),
        (("--format", "inspect", "--out", "."), ["write -o NAME.eval"], 2),
        (("--format", "dataset", "--out", "groups.jsonl/x"), ["groups.jsonl/x"], 1),
        (("--format", "dataset", "--groups", "missing.jsonl"), ["missing.jsonl"], 2),
        (("--format", "dataset", "--groups", "broken.jsonl"), ["broken.jsonl", "line 5"], 2),
        (("--format", "dataset", "--groups", "samples.jsonl"), ["samples.jsonl", "record 1", "groups.jsonl"], 2),
    ],
)
def test_what_cannot_be_exported_is_one_message_and_leaves_no_file(
    groups: Path,
    arguments: tuple[str, ...],
    named: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(groups.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("fails.py").write_text(FAILS)
    Path("broken.jsonl").write_bytes(groups.read_bytes() + b'{"rollouts": [\n')
    Path("samples.jsonl").write_text('{"tokens": []}\n')
    Path("out.jsonl").write_text("an earlier export\n")
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    source = given.pop("--groups", "groups.jsonl")
    given.setdefault("--out", "out.jsonl")
    assert export(source, *(word for pair in given.items() for word in pair)) == code
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


def test_a_discarded_attempt_is_exported_without_the_reward_that_its_retry_earned() -> None:
    group = example_groups()[3]
    attempt = {**group["samples"][0], "index": 1, "discarded": True}
    found = list(token_samples({**group, "samples": [*group["samples"], attempt]}))
    written = [line.content for line in found if isinstance(line, ExportLine)]
    assert [(line["discarded"], line["reward"]) for line in written] == [(False, 1.0), (True, None), (False, 0.5)]


async def test_a_run_of_process_exports_in_every_format(tmp_path: Path) -> None:
    class Picky(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            place = ctx.task_id.split("-")[2]
            return None if place == "0" else await super().compute_reward(item, result, ctx)

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
    for name in (
        name for name in EXPORTS.names() if name != "inspect"
    ):  # its tests are tests/data/test_inspect_logs.py
        out = tmp_path / f"{name}.jsonl"
        # This run is of Phase 1, without token samples, and one rollout of each of its groups has a reward.
        empty = name in ("samples", "dpo")
        options = ["--options", "{keep_without_reasoning: true}"] if name == "batch" else []
        assert export(result.files.groups, "--format", name, *options, "--out", out) == int(empty), (
            "nothing: no success"
        )
        written = list(read_rows(out)) if name == "parquet" else lines(out)
        assert len(written) == (0 if empty else 4)
        assert [problem for line in written for problem in validate_entry(line, OLD_NAMES.get(name, name))] == []
    written = lines(result.files.samples) + lines(result.files.failed_samples)
    by_id = {entry["rollout_id"]: entry for entry in written}
    assert {entry["rollout_id"]: entry for entry in lines(tmp_path / "trajectory.jsonl")} == by_id

    class Played(ExportSuite):
        export = "trajectory"
        groups = played

    Played().test_every_rollout_is_in_a_line_or_left_out_with_a_reason()


async def test_the_page_lists_the_keys_of_groups_and_rollouts(tmp_path: Path) -> None:
    result = await process(SortWords, tmp_path, lambda request: say("No."))
    (group, *_) = lines(result.files.groups)
    section = PAGE.read_text("utf-8").partition("\n## The record\n")[2].partition("\n## ")[0]
    tables = re.findall(r"^\| --- .*\n((?:\|.*\n)+)", section, re.MULTILINE)
    of_group, of_rollout = ([key for row in table.splitlines() for key in names(row)] for table in tables)
    assert sorted(of_group) == sorted(group)
    rollout = group["rollouts"][0]
    assert sorted(of_rollout) == sorted({**rollout, "messages": []})
    without_a_turn = rollout_record(Rollout.broken("a", 0, ValueError("no prompt")), None)
    assert set(re.findall(r"`(\w+)`\\\*", section)) == rollout.keys() - without_a_turn.keys()


def names(row: str) -> list[str]:
    """The names in the first column of a table's row."""
    return re.findall(r"`(\w+)`", row.split("|")[1])


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


def test_the_groups_of_a_killed_run_are_exported_and_reported(
    groups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole.jsonl"
    assert export(groups, "--format", "trajectory", "--out", whole) == 0
    assert "note" not in capsys.readouterr().err
    with groups.open("ab") as file:
        file.write(b'{"environment": "e", "rollouts": [{"rollo')
    out = tmp_path / "out.jsonl"
    assert export(groups, "--format", "trajectory", "--out", out) == 0
    assert "last line is incomplete" in capsys.readouterr().err
    assert out.read_bytes() == whole.read_bytes()
    assert main(["report", str(groups), "--output", str(tmp_path / "out.html")]) == 0
    assert "last line is incomplete" in capsys.readouterr().err


PICKY = """
class Picky:
    def __init__(self, level: int = 1):
        if level > 1: raise ValueError("level is at most 1")
        if level < 0: raise FileNotFoundError(2, "no such table")
    def __call__(self, group): return []
class Silent: ...
"""


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dataset", "{min_rewrd: 1}", "did you mean 'min_reward'?"),
        ("dataset", "{min_reward: .nan}", "option min_reward: nan is not a number"),
        ("picky:Picky", "{level: 2}", "level is at most 1"),
        ("picky:Picky", "{level: -1}", "no such table"),
        ("picky:Silent", "{}", "Silent cannot be called"),
    ],
)
def test_options_that_an_export_rejects_are_errors_without_a_traceback(
    groups: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: str,
    said: str,
) -> None:
    (tmp_path / "picky.py").write_text(PICKY)
    monkeypatch.syspath_prepend(tmp_path)
    assert export(groups, "--format", name, "--out", tmp_path / "out.jsonl", "--options", options) == 2
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown


def test_a_rollout_id_is_in_a_group_once(groups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = next(iter(read_lines(groups)))
    twice = tmp_path / "twice.jsonl"
    for rollouts, said in (([group["rollouts"][0]] * 2, "more than one rollout"), ([{}], "is not a group")):
        twice.unlink(missing_ok=True)
        with JsonlWriter(twice) as writer:
            writer.write({**group, "rollouts": rollouts})
        assert export(twice, "--format", "dataset", "--out", tmp_path / "out.jsonl") == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("format", ["hermes", "openai", "dpo", "samples", "parquet"])
def test_what_verify_refuses_is_not_exported(
    format: str, groups: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = groups.read_text(), tmp_path / "out"
    groups.write_text(text + text.split("\n")[0] + "\n")
    assert export(groups, "--format", format, "--out", out) == 2
    assert "record 5 has a rollout of record 1 again" in capsys.readouterr().err
    for constant in ("NaN", "-Infinity"):
        groups.write_text(re.sub(r'"seconds": [\d.]+', f'"seconds": {constant}', text, count=1))
        assert constant in groups.read_text()
        assert export(groups, "--format", format, "--out", out) == 2
        assert f"line 1: not JSON: holds {constant}" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["groups.jsonl", "groups.failed.jsonl"])
async def test_an_item_that_failed_at_several_starts_is_once_in_a_log_of_inspect(tmp_path: Path, name: str) -> None:
    class Raises(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            raise ValueError("a mistake")

    for _ in range(2):
        result = await process(Raises, tmp_path, lambda request: say("No."), total_steps=1)
    failed = lines(result.files.failures)
    assert [group["item_key"] for group in failed] == [failed[0]["item_key"]] * 2
    groups = result.files.groups.with_name(name)
    assert export(groups, "--format", "inspect", "--out", tmp_path / "log.eval") == 0
    samples = read_samples(tmp_path / "log.eval")
    assert len(samples) == result.summary.rollouts == 2
    assert {sample["metadata"]["rollout_id"] for sample in samples} == {
        rollout["rollout_id"] for rollout in failed[-1]["rollouts"]
    }


async def test_a_file_of_failed_groups_has_each_item_once_in_every_format(tmp_path: Path) -> None:
    failed, out = tmp_path / "groups.failed.jsonl", tmp_path / "out.jsonl"
    (first, other, *_) = example_groups()
    with JsonlWriter(failed) as writer:
        writer.write_all([{**first, "model": "earlier"}, other, {**first, "model": "later"}])
    assert export(failed, "--format", "hermes", "--out", out) == 0
    models = [line["model"] for line in lines(out)]
    assert "later" in models and "earlier" not in models and other["model"] in models
    assert export(failed, "--format", "harbor", "--out", tmp_path / "job") == 0
    assert len(list((tmp_path / "job").glob("*/result.json"))) == len(first["rollouts"]) + len(other["rollouts"])
