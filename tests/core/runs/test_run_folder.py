"""The folder of a run: every file belongs to one run, and to one process at a time."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lachesis.cli import main as lachesis
from lachesis.runs.ledger import Ledger
from lachesis.runs.results import print_result
from lachesis.runs.run_folder import RunFolderError, changes
from lachesis_messages.records.dataset_entries import save_trajectory
from tests.support.scripted_server import ScriptedServer
from tests.support.small_envs import ManyWords, SortWords, asked_words, does_nothing, lines, make, process, sorts


def test_a_file_system_without_locks_is_not_taken_for_another_run(tmp_path, monkeypatch):
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    message = r"lock cannot be locked \(No locks available\); choose a folder on a file system that has flock"
    with pytest.raises(RunFolderError, match=message):
        Ledger(tmp_path / "groups.jsonl", {}).open()


def test_an_older_version_wrote_no_tokenizer() -> None:
    now = {"special_tokens_in_text": "as_is", "tokenizer": {"digest": "d"}, "max_agent_turns": 3}
    assert changes({"max_agent_turns": 3}, now) == ""
    assert changes({"max_agent_turns": 3, "tokenizer": {"digest": "e"}}, now).startswith("tokenizer: ")


def test_what_follows_from_another_model_is_not_told_and_what_is_long_not_in_full() -> None:
    before = {"model": "small", "tokenizer": {"digest": "a"}, "template_report": {"shows_tools": True}, "limit": 1}
    assert changes(before, {"model": "large", "limit": 2}) == "limit: 1 then, 2 now; model: 'small' then, 'large' now"
    assert changes({"prompt": "x" * 400}, {"prompt": None}) == "prompt differs"


async def test_progress_is_shown_while_a_thread_notes_a_finished_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WrittenTo(set[str]):
        def __iter__(self) -> Iterator[str]:
            raise RuntimeError("Set changed size during iteration")  # at any moment

    monkeypatch.setattr("lachesis.runs.ledger.set", WrittenTo, raising=False)
    for steps in (1, 2):  # the second start continues
        await process(SortWords, tmp_path, total_steps=steps)
    assert len(lines(tmp_path / "groups.jsonl")) == 2


def run_of(path: Path) -> set[str]:
    """The run that every line of a file names; "" where one names none."""
    return {entry.get("run", "") for entry in lines(path)}


async def test_two_runs_in_one_folder_share_no_file_and_every_line_names_its_run(tmp_path: Path) -> None:
    first = await process(SortWords, tmp_path, total_steps=1)
    second = await process(
        SortWords, tmp_path, does_nothing, total_steps=1, data_path_to_save_groups=str(tmp_path / "other.jsonl")
    )
    async with ScriptedServer(sorts) as server:
        env = make(ManyWords, server, tmp_path, eval_items=2, data_dir_to_save_evals=str(tmp_path))
        third = await env._run_evaluate()
    seen: list[set[str]] = []
    for result, trajectories in ((first, 2), (second, 2), (third, 2)):
        files = [result.files.groups, result.files.samples, result.files.failed_samples]
        assert sum(len(lines(path)) for path in files[1:]) == trajectories
        (run,) = set().union(*map(run_of, files))
        assert run
        seen.append({run})
        rollouts = {rollout["rollout_id"] for group in lines(files[0]) for rollout in group["rollouts"]}
        assert {entry["rollout_id"] for path in files[1:] for entry in lines(path)} == rollouts
    assert len(set().union(*seen)) == 3
    assert first.files.samples.name == "trajectory_samples.jsonl"
    assert {entry["evaluation"] for entry in lines(first.files.samples)} == {False}
    assert {entry["evaluation"] for entry in lines(third.files.samples)} == {True}


async def test_a_second_start_goes_on_in_its_own_files(tmp_path: Path) -> None:
    await process(SortWords, tmp_path, total_steps=1)
    other = {"data_path_to_save_groups": str(tmp_path / "other.jsonl")}
    await process(SortWords, tmp_path, total_steps=1, **other)
    for more in ({}, other):
        result = await process(SortWords, tmp_path, total_steps=2, **more)
        assert (result.played, len(lines(result.files.groups)), len(lines(result.files.samples))) == (1, 2, 4)
        assert len(set().union(*map(run_of, (result.files.groups, result.files.samples)))) == 1
        assert [group["number"] for group in lines(result.files.groups)] == [0, 1]


async def test_trajectories_that_something_else_wrote_are_left_alone(tmp_path: Path) -> None:
    theirs = save_trajectory([{"from": "gpt", "value": "Hello."}], "m", completed=True, directory=tmp_path)
    result = await process(SortWords, tmp_path, total_steps=1)
    assert (len(lines(theirs)), result.files.samples.name) == (1, "groups.trajectory_samples.jsonl")


async def test_trajectories_of_a_groups_file_that_was_removed_are_not_continued(tmp_path: Path) -> None:
    for expected in ("trajectory_samples.jsonl", "groups.trajectory_samples.jsonl"):
        result = await process(SortWords, tmp_path, total_steps=1)
        assert (result.files.samples.name, len(lines(result.files.samples))) == (expected, 2)
        result.files.groups.unlink()
    with pytest.raises(
        RunFolderError, match=r"groups.jsonl is missing, and the files of its trajectories are not; move"
    ):
        await process(SortWords, tmp_path, total_steps=1)


async def test_a_start_that_finished_no_group_belongs_to_the_same_run(tmp_path: Path) -> None:
    class NoScores(SortWords):
        async def compute_reward(self, item: object, result: object, ctx: object) -> None:
            return None

    failed = await process(NoScores, tmp_path, total_steps=1)
    assert len(lines(failed.files.failures)) == 1
    (run,) = run_of(failed.files.failures)
    result = await process(SortWords, tmp_path, total_steps=1)
    assert run_of(result.files.groups) == run_of(result.files.samples) == {run}


async def test_a_run_of_an_older_version_is_continued_as_it_was(tmp_path: Path) -> None:
    """Without an id in its manifest and its lines."""
    await process(SortWords, tmp_path, total_steps=1)
    manifest = json.loads((tmp_path / "groups.run.json").read_text())
    manifest = {name: manifest[name] for name in ("created", "settings")}
    del manifest["settings"]["special_tokens_in_text"]
    (tmp_path / "groups.run.json").write_text(json.dumps(manifest))
    for name in ("groups.jsonl", "trajectory_samples.jsonl"):
        old = [{**entry, "run": None} for entry in lines(tmp_path / name)]
        for entry in old:
            for added in ("run", "number", "evaluation"):
                entry.pop(added, None)
        (tmp_path / name).write_text("".join(json.dumps(entry) + "\n" for entry in old))
    with pytest.raises(RunFolderError, match=r"special_tokens_in_text: 'as_is' then, 'encode_as_text' now"):
        await process(SortWords, tmp_path, total_steps=2)
    result = await process(SortWords, tmp_path, total_steps=2, special_tokens_in_text="as_is")
    assert (result.played, result.files.samples.name) == (1, "trajectory_samples.jsonl")
    assert len(lines(result.files.samples)) == 4
    assert not any("number" in group for group in lines(result.files.groups))


@pytest.mark.parametrize("wrong", [{"items": 5}, {"items": [{}]}, {"items": None}, {"settings": 5}])
async def test_a_manifest_that_is_none_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    await process(SortWords, tmp_path, total_steps=1)
    path = tmp_path / "groups.run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    with pytest.raises(RunFolderError, match=r"groups.run.json next to it cannot be read .*choose another path"):
        await process(SortWords, tmp_path, total_steps=2)


@pytest.mark.parametrize("name", ["trajectory_samples.jsonl", "failed_trajectories.jsonl", "other.failed.jsonl"])
async def test_a_groups_file_with_the_name_of_another_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match=r"name of another file of a run; choose another name"):
        await process(SortWords, tmp_path, total_steps=1, data_path_to_save_groups=str(tmp_path / name))


async def test_two_groups_files_cannot_share_a_manifest(tmp_path: Path) -> None:
    await process(SortWords, tmp_path, total_steps=1)
    with pytest.raises(RunFolderError, match=r"groups.run.json belongs to groups.jsonl; choose another name"):
        await process(SortWords, tmp_path, total_steps=1, data_path_to_save_groups=str(tmp_path / "groups.json"))


async def test_trajectories_of_completed_but_wrong_rollouts_are_kept_apart_where_that_is_set(tmp_path: Path) -> None:
    def knows_apples(request: dict[str, Any]) -> Any:
        return sorts(request) if "apple" in asked_words(request) else does_nothing(request)

    result = await process(SortWords, tmp_path, knows_apples, group_size=1, trajectory_min_reward=0.5)
    [good], [wrong] = lines(result.files.samples), lines(result.files.failed_samples)
    assert (good["reward"], good["completed"], wrong["reward"], wrong["completed"]) == (1.0, True, 0.0, True)
    print_result(Console(file=(out := io.StringIO())), result)
    assert f"\nnot completed, or reward below 0.5  {result.files.failed_samples}\n" in out.getvalue()


async def test_no_other_command_replaces_a_file_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = [(await process(SortWords, tmp_path / name, group_size=1)).files for name in ("a", "b")]
    others = [tmp_path / "b" / name for name in ("notes.ndjson", "groups.web.jsonl", "batch_001_output.jsonl")]
    for other in others:
        other.write_text("{}\n")
    (link := tmp_path / "latest.jsonl").symlink_to(second.groups)
    before = {path: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    export = ["export", str(first.groups), "--format", "hermes", "--out"]
    convert = ["trajectories", "convert", str(first.samples), "--to", "openai", "--out"]
    for out in (second.groups, second.samples, second.failures, second.report, link, *others):
        for command in (export, convert):
            assert lachesis([*command, str(out)]) == 2, out
    assert lachesis(["compress", "--extractive", "--input", str(tmp_path / "a"), "--output", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.count("is a file of a run, which would be lost; choose another name") == 17
    assert {path: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before
    free = tmp_path / "c" / second.samples.name
    assert lachesis([*export, str(free)]) == lachesis([*export, str(free)]) == 0, "its own output, it replaces"


async def test_a_run_without_trajectories_gets_them_at_a_later_start(tmp_path: Path) -> None:
    first = await process(SortWords, tmp_path, total_steps=1, save_trajectories=False)
    assert not first.files.samples.exists()
    assert not first.files.failed_samples.exists()
    assert "trajectories" not in [label for label, *_ in first.paths()]
    second = await process(SortWords, tmp_path, total_steps=2)
    written = lines(second.files.samples) + lines(second.files.failed_samples)
    played = [rollout["rollout_id"] for group in lines(second.files.groups) for rollout in group["rollouts"]]
    assert sorted(entry["rollout_id"] for entry in written) == sorted(played)
    assert len(lines(second.files.groups)) == 2
