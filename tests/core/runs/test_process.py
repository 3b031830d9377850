"""`process` over a folder: what is finished is on disk, exactly once, whatever ends the run."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
from rich.console import Console

from lachesis.figures.item_keys import ItemError, ItemKeys, different, item_digest, plain
from lachesis.loop.rollout import PlayedGroup
from lachesis.runs import command_line as cli
from lachesis.runs.commands import longest_group
from lachesis.runs.decisions import Decision
from lachesis.runs.failures import FailureBrake, RunStopped
from lachesis.runs.file_sink import FileSink
from lachesis.runs.group_player import play_item
from lachesis.runs.pipeline import Pipeline
from lachesis.runs.results import RunFiles
from lachesis.runs.run_folder import RunFolderError
from lachesis.settings.server_settings import ServerConfig
from lachesis_client import ServerUnavailable
from lachesis_compat.atropos.package import ScoredDataGroup
from lachesis_messages.records.jsonl import JsonlError
from lachesis_tools import ToolRegistry, tool
from tests.support.report_pages import everything
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import (
    ManyWords,
    SortWords,
    asked_words,
    does_nothing,
    lines,
    make,
    process,
    rollouts,
    sandboxes,
    served,
    sorts,
    start,
)

ENVIRONMENT = "tests/support/small_envs.py"


def trajectories(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "trajectory_samples.jsonl") + lines(folder / "failed_trajectories.jsonl")


# What is written.


async def test_groups_have_the_shape_that_atropos_gives_them(tmp_path: Path) -> None:
    result = await process(SortWords, tmp_path, total_steps=1)
    (group,) = lines(result.files.groups)
    assert set(ScoredDataGroup.__annotations__) <= set(group)
    assert group["scores"] == [1.0, 1.0]
    assert len(group["messages"]) == 2
    for name in ("tokens", "masks", "inference_logprobs", "advantages", "images"):
        assert group[name] is None, "what Phase 1 does not know is never made up"
    assert group["item"] == "pear fig apple"
    assert group["environment"] == "sort-words"
    assert [tool["function"]["name"] for tool in group["tools"]][:2] == ["terminal", "process"]
    assert datetime.fromisoformat(group["timestamp"])


async def test_trajectories_go_where_the_rules_say_and_hold_nothing_ephemeral(tmp_path: Path) -> None:
    def half(request: dict[str, Any]) -> Any:
        assert "EPHEMERAL" in request["messages"][0]["content"]
        if "apple" in asked_words({"messages": request["messages"][3:]}):
            return sorts({"messages": request["messages"][3:]})
        return call(("terminal", {"command": "true"}))

    result = await process(
        SortWords,
        tmp_path,
        half,
        max_agent_turns=2,
        ephemeral_system_prompt="EPHEMERAL",
        prefill_messages=[{"role": "user", "content": "PREFILL"}, {"role": "assistant", "content": "PREFILL"}],
    )
    completed, failed = lines(result.files.samples), lines(result.files.failed_samples)
    assert [(entry["completed"], entry["outcome"], entry["reward"]) for entry in completed] == [
        (True, "completed", 1.0)
    ] * 2
    assert [(entry["completed"], entry["outcome"], entry["reward"]) for entry in failed] == [
        (False, "max_turns", 0.0)
    ] * 2
    assert [turn["from"] for turn in completed[0]["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    for file in tmp_path.iterdir():
        if file.name != "groups.run.json":
            assert b"EPHEMERAL" not in file.read_bytes(), file.name
            assert b"PREFILL" not in file.read_bytes(), file.name


async def test_the_files_load_with_datasets_in_either_order(tmp_path: Path) -> None:
    import datasets

    class Picky(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            place = ctx.task_id.split("-")[2]
            return None if place == "0" else float(result.finished_naturally)

    def sorts_apples_only(request: dict[str, Any]) -> Any:
        return sorts(request) if "apple" in asked_words(request) else call(("terminal", {"command": "true"}))

    result = await process(Picky, tmp_path, sorts_apples_only, max_agent_turns=2)
    written = trajectories(tmp_path)
    ends = {(entry["completed"], entry["reward"]) for entry in written}
    assert ends == {(True, 1.0), (False, 0.0), (True, None), (False, None)}
    files = [str(result.files.samples), str(result.files.failed_samples)]
    for order in (files, files[::-1]):
        loaded = datasets.load_dataset("json", data_files=order, split="train", cache_dir=str(tmp_path / "cache"))
        assert {row["rollout_id"]: row["reward"] for row in loaded} == {
            row["rollout_id"]: row["reward"] for row in written
        }


async def test_groups_are_played_at_the_same_time(tmp_path: Path) -> None:
    in_flight, most, together = 0, 0, asyncio.Event()

    async def waits(request: dict[str, Any]) -> Any:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        if in_flight == 8:
            together.set()
        await together.wait()
        await asyncio.sleep(0.1)  # in which a ninth would come
        in_flight -= 1
        return does_nothing(request)

    await asyncio.wait_for(process(ManyWords, tmp_path, waits, total_steps=8, max_num_workers=4), 120)
    assert most == 8, "four groups of two"


async def test_groups_that_end_together_wait_for_the_disk_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked, waits, sync = asyncio.Event(), itertools.count(1), [], os.fsync

    async def together(request: dict[str, Any]) -> Any:
        if next(asked) == 20:
            gate.set()
        await gate.wait()
        return does_nothing(request)

    def slow(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "groups.jsonl":
            waits.append(len(lines(tmp_path / "groups.jsonl")))
            time.sleep(0.2)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    result = await process(ManyWords, tmp_path, together, total_steps=20, group_size=1, max_num_workers=20)
    assert len({group["item_key"] for group in lines(result.files.groups)}) == result.played == 20
    assert len(trajectories(tmp_path)) == 20
    assert waits[-1] == 20 and len(waits) < 10


@pytest.mark.parametrize("spoiled", [1, 2])
@pytest.mark.parametrize("file", ["groups.jsonl", "trajectory_samples.jsonl"])
async def test_a_disk_that_fails_under_groups_that_wait_loses_and_doubles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, spoiled: int
) -> None:
    gate, asked, writes, write = asyncio.Event(), itertools.count(1), itertools.count(1), os.write

    async def together(request: dict[str, Any]) -> Any:
        if next(asked) == 20:
            gate.set()
        await gate.wait()
        return does_nothing(request)

    def failing(descriptor: int, data: Any) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == file and next(writes) == spoiled:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    settings = {"total_steps": 20, "group_size": 1, "max_num_workers": 20}
    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(JsonlError, match="No space left"):
        await process(ManyWords, tmp_path, together, **settings)
    kept = len(lines(tmp_path / "groups.jsonl"))
    again = await process(ManyWords, tmp_path, does_nothing, **settings)
    assert again.played == 20 - kept
    assert len({group["item_key"] for group in lines(again.files.groups)}) == len(lines(again.files.groups)) == 20
    ids = [entry["rollout_id"] for entry in trajectories(tmp_path)]
    assert len(ids) == len(set(ids)) == 20


@pytest.mark.parametrize("turns", [2, 40])
async def test_large_groups_are_decided_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    threads, decide = set(), FileSink.decide

    def watched(sink: FileSink, group: PlayedGroup) -> Decision:
        threads.add(threading.current_thread())
        return decide(sink, group)

    def plays(request: dict[str, Any]) -> Any:
        taken = sum(message["role"] == "tool" for message in request["messages"])
        return call(("todo", {})) if taken < turns else say("Done.")

    monkeypatch.setattr(FileSink, "decide", watched)
    await process(ManyWords, tmp_path, plays, group_size=1, enabled_toolsets=["todo"], max_agent_turns=50)
    assert (threading.main_thread() in threads) is (turns == 2)


def test_items_that_come_again_are_told_from_others_by_their_keys() -> None:
    keys = ItemKeys()
    found = [keys.key(item) for item in ("a", "b", "a", {"c": 1}, "a")]
    assert (len({*found}), different(found)) == (5, 3)
    assert different(["row-1", "row-2", *found]) == 5, "keys of another kind are as they are"
    of_batch = [f"{key[:16]}0a1b2c3d{key[16:]}+{number}" for number, key in enumerate(found)]
    assert different([*found, *of_batch]) == 3


async def test_items_of_every_kind_become_json_and_are_known_again(tmp_path: Path) -> None:
    item = {
        "count": numpy.int64(3),
        "share": numpy.float32(0.5),
        "row": numpy.array([1, 2]),
        "when": datetime(2026, 1, 2),
        "tags": {"b", "a"},
        "raw": b"\x00\xff",
        "not a number": float("nan"),
        "huge": 10**30,
        "half": "\ud800",
        1: ("tuple",),
    }

    class Strange(SortWords):
        async def setup(self) -> None:
            self.items = iter([item])

        async def get_next_item(self) -> Any:
            return next(self.items, None)

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            assert isinstance(item["row"], numpy.ndarray), "the environment gets its own item, not its JSON"
            return float(item["share"])

    first = await process(Strange, tmp_path, does_nothing, total_steps=1)
    (group,) = lines(first.files.groups)
    assert group["item"]["row"] == [1, 2]
    assert group["item"]["tags"] == ["a", "b"]
    assert group["item"]["huge"] == 10**30
    assert group["item"]["not a number"] is None
    second = await process(Strange, tmp_path, does_nothing, total_steps=1)
    assert (second.played, second.summary.items) == (0, 1)


@pytest.mark.parametrize("command", ["process", "evaluate"])
def test_a_run_without_items_is_no_success(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Empty(SortWords):
        async def get_next_item(self) -> Any:
            return None

        async def get_eval_items(self) -> list[Any]:
            return []

        def reference_policy(self) -> Any:
            return lambda messages, tools: "never asked"

    monkeypatch.chdir(tmp_path)
    assert cli.main(Empty, [command, "--openai.model_name=reference"]) == 1
    assert "the items ran out" in " ".join(capsys.readouterr().out.split())


def test_an_item_that_no_second_start_could_recognise_is_refused() -> None:
    with pytest.raises(ItemError, match="object cannot become JSON"):
        item_digest({"image": object()})
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ItemError, match="contains itself"):
        plain(circle)
    assert item_digest({"a": 1, "b": (2,)}) == item_digest({"b": [2], "a": 1})
    assert item_digest("1") != item_digest(1)


# Starting again.


async def test_a_second_start_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    first = await process(ManyWords, tmp_path, total_steps=3)
    second = await process(ManyWords, tmp_path, total_steps=5)
    third = await process(ManyWords, tmp_path, total_steps=5)
    assert [(run.played, run.summary.items) for run in (first, second, third)] == [(3, 3), (2, 5), (0, 5)]
    groups = lines(first.files.groups)
    assert len({group["item"] for group in groups}) == 5
    ids = [entry["rollout_id"] for entry in trajectories(tmp_path)]
    assert Counter(ids) == Counter(rollout["rollout_id"] for rollout in rollouts(first.files.groups))
    assert max(Counter(ids).values()) == 1


async def test_an_item_that_comes_several_times_is_played_as_often(tmp_path: Path) -> None:
    await process(SortWords, tmp_path, total_steps=3)
    await process(SortWords, tmp_path, total_steps=5)
    groups = lines(tmp_path / "groups.jsonl")
    assert Counter(group["item"] for group in groups) == {"pear fig apple": 3, "delta alpha": 2}
    assert len({group["item_key"] for group in groups}) == 5


async def test_failed_groups_are_played_again_and_written_once_however_often(tmp_path: Path) -> None:
    settings = {"total_steps": 2, "group_size": 1, "max_failed_groups": 9}

    def broken(request: dict[str, Any]) -> Any:
        return 503 if "apple" in asked_words(request) else sorts(request)

    for _ in range(3):
        result = await process(SortWords, tmp_path, broken, **settings)
        assert (result.failed_groups, result.summary.items, result.summary.scored) == (1, 2, 1)
    assert len(lines(result.files.failures)) <= 2, "the last one, and the one before it until the next start"
    repaired = await process(SortWords, tmp_path, sorts, **settings)
    assert (repaired.played, repaired.failed_groups, repaired.summary.scored) == (1, 0, 2)
    assert "503" not in everything(repaired.files.report.read_text())
    await process(SortWords, tmp_path, sorts, **settings)
    assert lines(result.files.failures) == []


async def test_other_settings_are_refused_by_name_and_a_longer_run_is_not(tmp_path: Path) -> None:
    await process(SortWords, tmp_path, total_steps=1)
    with pytest.raises(RunFolderError, match=r"agent_temperature: 1\.0 then, 0\.5 now"):
        await process(SortWords, tmp_path, total_steps=1, agent_temperature=0.5)
    with pytest.raises(RunFolderError, match="group_size: 2 then, 3 now"):
        await process(SortWords, tmp_path, total_steps=1, group_size=3)
    assert (await process(SortWords, tmp_path, total_steps=2, eval_items=7, max_num_workers=1)).played == 1


async def test_another_way_to_sample_is_another_run_and_another_address_is_not(tmp_path: Path) -> None:
    async with ScriptedServer(does_nothing) as server, ScriptedServer(does_nothing) as elsewhere:

        def start(*servers: ScriptedServer, count: int, **changes: Any) -> Any:
            env = make(ManyWords, server, tmp_path, total_steps=count, group_size=1)
            given = {"model_name": "scripted", "max_retries": 0, **changes}
            env = ManyWords(env.config, [ServerConfig(base_url=at.base_url, **given) for at in servers])
            env.console = Console(file=io.StringIO())
            return env.process_manager()

        await start(server, count=1, api_key="secret-key")
        assert (await start(elsewhere, server, count=2, api_key="other")).played == 1
        with pytest.raises(RunFolderError, match=r"openai\.extra_body: \[None\] then, \[{'top_p': 0\.1}\] now"):
            await start(server, count=3, extra_body={"top_p": 0.1})
        manifest = (tmp_path / "groups.run.json").read_text()
        assert "secret-key" not in manifest and server.base_url not in manifest


def test_the_time_for_a_group_includes_the_reward_of_the_group() -> None:
    config = ManyWords.env_config_cls(worker_timeout=600, reward_timeout=300, max_infra_retries=0)
    assert longest_group(config) == 3 * 600 + 300 + 300 + 300, (
        "the agent's time, its longest wait, the set-up, and both rewards"
    )


async def test_two_runs_at_once_on_one_folder_are_refused(tmp_path: Path) -> None:
    reached, refused = asyncio.Event(), asyncio.Event()

    async def waits(request: dict[str, Any]) -> Any:
        reached.set()
        await refused.wait()
        return does_nothing(request)

    first = asyncio.create_task(process(SortWords, tmp_path, waits))
    await asyncio.wait_for(reached.wait(), 120)
    with pytest.raises(RunFolderError, match="another run is writing"):
        await process(SortWords, tmp_path)
    refused.set()
    assert (await first).played == 2


async def test_a_torn_last_line_is_moved_away_and_its_group_played_again(tmp_path: Path) -> None:
    first = await process(ManyWords, tmp_path, total_steps=3)
    for path in (first.files.groups, first.files.samples, first.files.failures):
        with path.open("ab") as file:
            file.write(b'{"item_key": "torn')
    second = await process(ManyWords, tmp_path, total_steps=4)
    assert (second.played, second.summary.items) == (1, 4)
    assert len(lines(first.files.groups)) == 4
    assert (tmp_path / "groups.jsonl.torn").read_text() == '{"item_key": "torn\n'


async def test_trajectories_that_a_killed_run_owed_are_written_by_the_next(tmp_path: Path) -> None:
    first = await process(ManyWords, tmp_path, total_steps=3)
    kept = lines(first.files.samples)[:2]
    first.files.samples.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    second = await process(ManyWords, tmp_path, total_steps=3)
    ids = Counter(entry["rollout_id"] for entry in lines(first.files.samples))
    assert second.played == 0
    assert len(ids) == 6
    assert max(ids.values()) == 1


async def test_a_group_that_fails_takes_no_finished_group_with_it(tmp_path: Path) -> None:
    """Groups that end in the same instant as one whose key the server refuses from then on are written all the same."""
    gate = asyncio.Event()
    waiting = itertools.count(1)

    async def together(request: dict[str, Any]) -> Any:
        if (number := next(waiting)) == 6:
            gate.set()
        await gate.wait()
        if number > 6:
            return 401  # the key is refused whatever is asked
        return 401 if asked_words(request)[-1] == "0" and "pear" in request["messages"][-1]["content"] else say("no")

    first = await process(ManyWords, tmp_path, together, total_steps=6, group_size=1, max_num_workers=6)
    assert (first.failed_groups, len(lines(tmp_path / "groups.jsonl"))) == (1, 5)
    second = await process(ManyWords, tmp_path, does_nothing, total_steps=6, group_size=1)
    groups = lines(tmp_path / "groups.jsonl")
    assert len({group["item_key"] for group in groups}) == len(groups) == 6
    assert second.summary.items == 6


async def test_an_overridden_loop_that_raises_fails_its_groups_and_then_stops_the_run(
    tmp_path: Path,
) -> None:
    class Raising(ManyWords):
        async def play_rollout(self, item: Any, item_key: str, *args: Any, **kwargs: Any) -> Any:
            if "apple" in item:
                raise LookupError("no such item")
            return await super().play_rollout(item, item_key, *args, **kwargs)

    settings = {"group_size": 1, "max_num_workers": 1, "max_failed_groups": 2}
    result = await process(Raising, tmp_path, total_steps=3, **settings)
    assert (result.played, result.failed_groups, result.exceptions) == (2, 1, 1)
    assert "LookupError: no such item" in (tmp_path / "console.txt").read_text()
    (failure,) = lines(result.files.failures)
    assert (failure["item"], failure["scores"], failure["rollouts"]) == ("pear fig apple 0", [], [])
    assert "LookupError: no such item" in failure["traceback"]
    assert "LookupError: no such item" in everything(result.files.report.read_text())

    class AlwaysRaising(ManyWords):
        async def play_rollout(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("no item at all")

    (tmp_path / "always").mkdir()
    with pytest.raises(RunStopped, match=r"2 groups in a row without a scored rollout(.|\n)*no item at all"):
        await process(AlwaysRaising, tmp_path / "always", total_steps=9, **settings)


async def test_cancelling_leaves_whole_lines_and_no_sandbox(tmp_path: Path) -> None:
    async def sometimes(request: dict[str, Any]) -> Any:
        if len(server.requests) > 12:
            reached.set()
            await asyncio.sleep(60)
        return sorts(request)

    reached = asyncio.Event()
    async with ScriptedServer(sometimes) as server:
        task = asyncio.create_task(make(ManyWords, server, tmp_path, total_steps=50).process_manager())
        await asyncio.wait_for(reached.wait(), 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert sandboxes() == set()
    groups = lines(tmp_path / "groups.jsonl")
    assert {rollout["rollout_id"] for rollout in rollouts(tmp_path / "groups.jsonl")} == {
        entry["rollout_id"] for entry in trajectories(tmp_path) if entry["outcome"] != "interrupted"
    }
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert [task for task in left if "aiohttp" not in repr(task)] == [], "but the server's own"
    assert (await process(ManyWords, tmp_path, total_steps=len(groups) + 1)).played == 1


async def test_a_second_signal_loses_no_group_that_is_played(tmp_path: Path) -> None:
    """The commands answer each SIGTERM with a cancellation."""
    deciding, loop = asyncio.Event(), asyncio.get_running_loop()

    class Slow(FileSink):
        def decide(self, group: PlayedGroup) -> Decision:
            loop.call_soon_threadsafe(deciding.set)
            time.sleep(0.6)  # long samples
            return super().decide(group)

    async with ScriptedServer(does_nothing) as server:
        env = make(SortWords, server, tmp_path, total_steps=1, group_size=1)
        files = RunFiles(tmp_path / "groups.jsonl")
        sink = Slow(
            files, environment="e", model="m", settings={}, total=1, workers=1, system="actual", console=env.console
        )

        async def run() -> None:
            async with env.running():
                play = partial(play_item, env, size=1)
                run = {"title": "e", "next_item": env.get_next_item, "play": play, "sink": sink, "console": env.console}
                await Pipeline(**run, brake=FailureBrake(env.console, 1)).run()

        task = asyncio.create_task(run())
        await deciding.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.1)
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(lines(files.groups)) == 1
    assert sandboxes() == set()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with served(sorts) as server:
        for folder in (tmp_path / "file" / "out", Path("/proc/out")):
            arguments = ["process", "--openai.base_url", server.base_url, "--openai.model_name", "scripted"]
            arguments += ["--env.data_path_to_save_groups", str(folder / "groups.jsonl")]
            assert cli.main(SortWords, arguments) == 1
            printed = capsys.readouterr().err
            assert f"cannot write to {folder}" in printed
            assert "--env.data_path_to_save_groups" in printed


# Killed.


def _slowly(request: dict[str, Any]) -> Any:
    async def answer() -> Any:
        await asyncio.sleep(0.05)
        return sorts(request)

    return answer()


def _arguments(server: ScriptedServer, folder: Path, total: int) -> list[str]:
    return [
        *(ENVIRONMENT, "process", "--openai.base_url", server.base_url, "--openai.model_name", "scripted"),
        *("--env.total_steps", str(total), "--env.group_size", "2", "--env.max_num_workers", "3"),
        *("--env.enabled_toolsets", "[file]", "--env.data_path_to_save_groups", str(folder / "groups.jsonl")),
    ]


def _written(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _until_written(path: Path, count: int, child: Any) -> Iterator[int]:
    deadline = time.monotonic() + 200
    while _written(path) < count and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    yield _written(path)


def test_nothing_accepted_is_lost_by_kill_9_and_nothing_is_repeated(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    total, kept = 30, []
    ends = 0

    def braked(request: dict[str, Any]) -> Any:
        """Ends as many rollouts as make the groups that are wanted, and no more: else the run might be over first."""

        async def answer() -> Any:
            nonlocal ends
            if request["messages"][-1]["role"] == "tool":
                while ends <= 0:  # noqa: ASYNC110 - what it waits for is set by another thread
                    await asyncio.sleep(0.01)
                ends -= 1
            return sorts(request)

        return answer()

    with served(braked) as server:
        for wanted in (3, 12):
            ends = 2 * wanted + 3  # of three groups under way, each may be half played
            child = start(_arguments(server, tmp_path, total))
            (count,) = _until_written(groups, wanted, child)
            assert wanted <= count < total, child.communicate()[0] if child.poll() is not None else ""
            child.send_signal(signal.SIGKILL)
            child.communicate()
            kept.append([line for line in groups.read_text().splitlines() if line.endswith("}")])
        ends = 1000
        child = start(_arguments(server, tmp_path, total))
        output = child.communicate(timeout=200)[0]
    assert child.returncode == 0, output
    assert f"continuing {groups}: {len(kept[-1])} groups done" in output
    final = groups.read_text().splitlines()
    for lines_then in kept:
        assert final[: len(lines_then)] == lines_then
    records = lines(groups)
    assert len({record["item_key"] for record in records}) == len(records) == total
    ids = Counter(entry["rollout_id"] for entry in trajectories(tmp_path))
    assert ids == Counter(rollout["rollout_id"] for rollout in rollouts(groups))
    assert set(ids.values()) == {1}
    assert orphans() == []


def test_sigterm_ends_orderly_and_keeps_what_is_done(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    with served(_slowly) as server:
        child = start(_arguments(server, tmp_path, 400))
        (count,) = _until_written(groups, 3, child)
        child.terminate()
        output = child.communicate(timeout=200)[0]
    assert count >= 3
    assert child.returncode == 130, output
    assert "run the same command to continue" in output
    assert "Traceback" not in output
    # A rollout that was stopped after a turn has a trajectory of it, and no record.
    assert {rollout["rollout_id"] for rollout in rollouts(groups)} == {
        entry["rollout_id"] for entry in trajectories(tmp_path) if entry.get("outcome") != "interrupted"
    }
    assert (tmp_path / "groups.html").exists()
    assert orphans() == []


def orphans() -> list[str]:
    """Sandboxes that no living process of the project holds, and that do not end."""
    deadline = time.monotonic() + 60
    while (found := _unheld()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _unheld() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if b"bwrap" in command[0] and int(parent) in (1, os.getpid()) and state not in "ZX":
                found.append(b" ".join(command).decode())
    return found


# Tools.


@tool(toolset="bells", errors=(KeyError,))
async def ring(bell: str) -> str:
    """Ring a bell."""
    match bell:
        case "cracked":
            raise KeyError(bell)
        case "rusty":
            raise SystemError("AST constructor recursion depth mismatch")
    return "dong"


class Bells(SortWords):
    """An environment with a tool that has a bug."""

    tools = ToolRegistry([ring])

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 1.0


async def test_a_bug_of_a_tool_is_no_answer_and_no_score_and_is_shown_with_the_name_of_the_tool(
    tmp_path: Path,
) -> None:
    bells = itertools.cycle(["fine", "cracked", "rusty", "fine"])
    asked: list[str] = []

    def rings(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] != "tool":
            return call(("ring", {"bell": next(bells)}))
        asked.append(request["messages"][-1]["content"])
        return say("Done.")

    result = await process(
        Bells, tmp_path, rings, total_steps=1, group_size=4, enabled_toolsets=["bells"], max_infra_retries=2
    )
    assert sorted(asked) == ["dong", "dong", '{"error": "KeyError: \'cracked\'"}'], "no model reads of the bug"
    played = rollouts(result.files.groups)
    (broken,) = [rollout for rollout in played if rollout["reward"] is None]
    assert (broken["unscored_kind"], broken["attempts"]) == ("environment", 1)
    assert "SystemError: AST constructor" in broken["traceback"]
    assert broken["traceback"].startswith("ToolCrashed: the tool 'ring' raised SystemError")
    assert broken["completion_tokens"] > 0, "what it sampled is counted"
    assert sorted(rollout["reward"] for rollout in played if rollout is not broken) == [1.0, 1.0, 1.0]
    assert result.failed and result.exceptions == 1
    shown = (tmp_path / "console.txt").read_text()
    assert "exception in the environment" in shown
    assert "in ring" in shown and "the tool 'ring' raised SystemError" in shown


async def test_an_exception_at_one_line_is_shown_once_and_counted_for_all_items(tmp_path: Path) -> None:
    class Picky(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            raise ValueError(f"cannot grade {'a' * next(lengths)}")

    lengths = itertools.count(1)
    with pytest.raises(RunStopped, match="3 x environment: ValueError: cannot grade a"):
        await process(Picky, tmp_path, lambda request: say("Done."), total_steps=3, group_size=1)
    shown = (tmp_path / "console.txt").read_text()
    assert shown.count("exception in the environment") == shown.count("in compute_reward") == 1


@tool(toolset="bells")
async def ask() -> str:
    """Ask another model, whose server is down."""
    raise ServerUnavailable("http://judge", "connection refused", "start it")


class Asks(Bells):
    """An environment with a tool that needs a model server."""

    tools = ToolRegistry([ask])


async def test_a_model_server_that_fails_under_a_tool_is_infrastructure(tmp_path: Path) -> None:
    def asks(_: dict[str, Any]) -> Any:
        return call(("ask", {}))

    result = await process(
        Asks, tmp_path, asks, total_steps=1, group_size=1, enabled_toolsets=["bells"], max_infra_retries=1
    )
    (lost,) = [rollout for group in lines(result.files.failures) for rollout in group["rollouts"]]
    assert (lost["outcome"], lost["unscored_kind"], lost["attempts"]) == ("infra_error", "model_server", 2)
    assert lost["traceback"] is None


LONG = """
from lachesis import HermesAgentBaseEnv, Message

class Long(HermesAgentBaseEnv):
    name = "long"
    toolsets = ()
    async def setup(self):
        self.count = 0
    async def get_next_item(self):
        self.count += 1
        return str(self.count)
    def format_prompt(self, item):
        return item + " is a number. " * 100
    async def compute_reward(self, item, result, ctx):
        return 1.0
    def reference_policy(self):
        return lambda messages, tools: Message("assistant", "It is. " * 100)
"""

FULL_DISK = """
mount -t tmpfs -o size=256k none disk || exit 1
"$@" > full.txt 2>&1
echo $? > full.code
cp disk/groups.jsonl full.jsonl
mount -o remount,size=16m disk
"$@" > again.txt 2>&1
echo $? > again.code
cp disk/groups.jsonl again.jsonl
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_named_and_what_was_accepted_is_continued(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG)
    (tmp_path / "disk").mkdir()
    play = [sys.executable, "-m", "lachesis", "process", "long.py", "-m", "reference", "-n", "60", "-r", "1"]
    command = ["unshare", "--mount", "sh", "-c", FULL_DISK, "sh", *play, "-o", "disk"]
    subprocess.run(command, cwd=tmp_path, check=True)
    said = (tmp_path / "full.txt").read_text()
    assert (tmp_path / "full.code").read_text() == "1\n"
    error = r"error: disk/\w+\.jsonl: cannot write \(No space left on device\); the disk is full: make room there"
    assert re.search(error, said), said
    first, whole = lines(tmp_path / "full.jsonl"), lines(tmp_path / "again.jsonl")
    assert 0 < len(first) < 60
    assert (tmp_path / "again.code").read_text() == "0\n"
    assert f"continuing disk/groups.jsonl: {len(first)} groups done" in (tmp_path / "again.txt").read_text()
    assert whole[: len(first)] == first and len({group["item_key"] for group in whole}) == len(whole) == 60
