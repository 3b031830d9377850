"""`lachesis batch`: nothing lost, doubled or silently wrong, however often the run is killed and started again."""

from __future__ import annotations

import asyncio
import csv
import fcntl
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis.cli import main as lachesis
from lachesis.runs.dataset_rows import DatasetError
from lachesis.runs.run_folder import OtherSettings, RunFolderError
from lachesis_data.batch.rows import Rows
from lachesis_data.verbs.batch import _as_flags, _parser, main
from tests.support.batch_runs import entries, flags, keys, thinks, write_rows
from tests.support.pictures import image, text
from tests.support.scripted_server import call, say
from tests.support.small_envs import ROOT, lines, served, start

ROWS = [{"prompt": f"prompt {number}", "level": number % 3} for number in range(20)]


def batch(arguments: list[str]) -> int:
    """`lachesis batch`; the collection at its start does not look at all that tests have imported."""
    gc.freeze()
    return main(arguments)


def same(rows: list[dict[str, Any]]) -> Counter[str]:
    """Entries regardless of their order."""
    return Counter(json.dumps(row, sort_keys=True) for row in rows)


def write_three_tools(folder: Path) -> Path:
    """A file with an environment of three tools in two toolsets."""
    listed = {"terminal": "code_tools", "read_file": "file_tools", "write_file": "file_tools"}
    tools = [
        f"@tool(toolset={at!r})\nasync def {name}(command: str = ''):\n    'A tool.'\n" for name, at in listed.items()
    ]
    head = "from lachesis_data.batch.prompts import Prompts\nfrom lachesis_tools import ToolRegistry, tool\n"
    env = f"class ThreeTools(Prompts):\n    needs_sandboxes = False\n    tools = ToolRegistry([{', '.join(listed)}])\n"
    path = folder / "three_tools.py"
    path.write_text("\n\n".join([head, *tools, env]))
    return path


# Output.


def test_the_files_hold_each_prompt_once_and_load_with_datasets(tmp_path: Path) -> None:
    import datasets

    mixed = [*ROWS, {"prompt": "no thought"}, {"prompt": "refuse", "metadata": {"level": 9}}]
    with served(thinks) as server:
        assert batch(flags(write_rows(tmp_path / "rows.jsonl", mixed), tmp_path, server.base_url)) == 1
    folder = tmp_path / "run"
    found = entries(folder)
    assert sorted(entry["prompt_index"] for entry in found) == list(range(20))
    assert all(entry["metadata"] == {"level": entry["prompt_index"] % 3} for entry in found)
    assert [len(lines(path)) for path in sorted(folder.glob("batch_*"))] == [7, 7, 6]
    assert same(lines(folder / "trajectories.jsonl")) == same(found)
    statistics = json.loads((folder / "statistics.json").read_text())
    counts = [statistics[name] for name in ("samples", "discarded_no_reasoning", "failed", "total_prompts")]
    assert counts == [20, 1, 1, 22]
    assert statistics["failed_outcomes"] == {"infra_error": 1}
    assert statistics["reasoning_statistics"]["turns_with_reasoning"] == 20
    assert json.loads((folder / "checkpoint.json").read_text())["completed_prompts"] == list(range(20))
    files = [str(path) for path in sorted(folder.glob("batch_*"))]
    loaded = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(loaded["prompt_index"]) == list(range(20))
    assert lachesis(["export", str(folder), "--format", "batch", "--out", str(tmp_path / "t")]) == 0
    assert lachesis(["report", str(folder), "--output", str(tmp_path / "report.html")]) == 0
    assert [line["prompt_index"] for line in lines(tmp_path / "t")] == [entry["prompt_index"] for entry in found]


def test_the_entry_of_the_format_is_written_byte_for_byte(tmp_path: Path) -> None:
    module = write_three_tools(tmp_path)
    calls = [call(("terminal", {"command": "ls"})) for _ in range(3)] + [call(("read_file", {"command": "a"}))] * 2

    def policy(request: dict[str, Any]) -> Any:
        results = sum(message["role"] == "tool" for message in request["messages"])
        if results < 5:
            return {**calls[results], "reasoning_content": "Next."}
        return call(("unheard_of", {})) if results == 5 else say("Done.", reasoning_content="Now I know.")

    rows = [{"prompt": f"{number}"} for number in range(42)]
    rows.append({"prompt": "Look around.", "prompt_source": "gsm8k", "metadata": {"difficulty": "hard"}})
    source = write_rows(tmp_path / "rows.jsonl", rows)
    with served(policy) as server:
        arguments = flags(source, tmp_path, server.base_url, "--env.enabled_toolsets", "[code_tools, file_tools]")
        assert (
            batch(
                [*arguments, "--env", f"{module}:ThreeTools", "--shard", _shard_of(source, 42, 64), "--max_turns", "9"]
            )
            == 0
        )
    (line,) = (tmp_path / "run").glob("shard_*/batch_001_output.jsonl")
    last = json.loads(line.read_bytes().splitlines()[-1])
    stats = {"terminal": (3, 0), "read_file": (2, 0), "write_file": (0, 0)}
    expected = {
        "prompt_index": 42,
        "conversations": last["conversations"],
        "metadata": {"prompt_source": "gsm8k", "difficulty": "hard"},
        "completed": True,
        "partial": False,
        "api_calls": 7,
        "toolsets_used": ["code_tools", "file_tools"],
        "tool_stats": {
            name: {"count": good + bad, "success": good, "failure": bad} for name, (good, bad) in stats.items()
        },
        "tool_error_counts": {name: bad for name, (_, bad) in stats.items()},
    }
    assert line.read_bytes().splitlines()[-1].decode() == json.dumps(expected, ensure_ascii=False)
    assert [turn["from"] for turn in last["conversations"]] == ["system", "human", *["gpt", "tool"] * 6, "gpt"]


def _shard_of(source: Path, index: int, count: int) -> str:
    """The shard of so many that holds one row."""
    (row,) = (row for row in Rows(str(source)) if row.index == index)
    return f"{int(row.digest, 16) % count + 1}/{count}"


def test_an_environment_scores_the_rows_and_rows_may_be_conversations(tmp_path: Path) -> None:
    module = tmp_path / "scores.py"
    module.write_text(
        "from lachesis import HermesAgentBaseEnv\n\n\n"
        "class Scores(HermesAgentBaseEnv):\n"
        "    needs_sandboxes = False\n    async def get_next_item(self): ...\n"
        "    def format_prompt(self, item): return f'Say {item[\"word\"]}'\n"
        "    def compute_reward(self, item, result, ctx): return float(item['word'] in result.final_response)\n"
    )
    rows = write_rows(tmp_path / "rows.jsonl", [{"word": "fig"}, {"word": "no thought"}, {"word": "pear"}])
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    talks = write_rows(tmp_path / "talks.jsonl", [{"messages": asked, "id": 7}])
    with served(lambda request: say("pear", reasoning_content="hm")) as server:
        assert batch(flags(rows, tmp_path, server.base_url, "--env", f"{module}:Scores")) == 0
        assert batch(flags(talks, tmp_path, server.base_url, run="talks")) == 0
        assert server.requests[-1]["messages"] == asked
    assert {entry["metadata"]["word"]: entry["reward"] for entry in entries(tmp_path / "run")} == {
        "fig": 0.0,
        "no thought": 0.0,
        "pear": 1.0,
    }
    (talk,) = entries(tmp_path / "talks")
    values = [turn["value"] for turn in talk["conversations"][1:]]
    assert values == ["a", "<think>\n</think>\nb", "c", "<think>\nhm\n</think>\npear"]
    assert talk["metadata"] == {"id": 7}
    assert "reward" not in talk
    thought = [asked[0], {**asked[1], "reasoning": "hm"}, asked[2]]
    given = write_rows(tmp_path / "given.jsonl", [{"messages": thought}])
    with served(lambda request: say("pear")) as server:
        assert batch(flags(given, tmp_path, server.base_url, run="given")) == 1, "only the row has reasoning"


def test_rows_with_images_lose_them_in_the_lines_and_the_end_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {"messages": [{"role": "user", "content": [image(2, 2), text("What is this?")]}]}
    rows = write_rows(tmp_path / "rows.jsonl", [seen, {"messages": [{"role": "user", "content": "And now?"}]}])
    with served(lambda request: say("A square.", reasoning_content="hm")) as server:
        assert batch(flags(rows, tmp_path, server.base_url)) == 0
    assert sorted(entry.get("parts_omitted", 0) for entry in entries(tmp_path / "run")) == [0, 1]
    assert "images 1 trajectory has only their types" in " ".join(capsys.readouterr().out.split())


def test_toolsets_are_drawn_by_seed_and_prompt_and_missing_ones_are_named(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    drawn = []
    with served(thinks) as server:
        plain = ["--distribution", "development"]
        with pytest.raises(SettingsError, match=r"moa, web, vision; .*--allow-missing-toolsets"):
            batch(flags(source, tmp_path, server.base_url, *plain))
        for run, seed in (("a", "1"), ("b", "1"), ("c", "2")):
            more = [*plain, "--allow_missing_toolsets", "--samples", "2", "--seed", seed]
            assert batch(flags(source, tmp_path, server.base_url, *more, run=run)) == 0
            found = {(entry["prompt_index"], *entry["toolsets_used"]) for entry in entries(tmp_path / run)}
            assert len(found) == len(ROWS), "all samples of a prompt have the same"
            drawn.append(found)
    assert drawn[0] == drawn[1] != drawn[2]
    assert {toolsets for _, *toolsets in drawn[0] for toolsets in [tuple(toolsets)]} == {
        ("terminal",),
        ("file",),
        ("terminal", "file"),
    }


def test_all_flags_of_the_removed_runner_are_taken_or_refused_by_name(tmp_path: Path) -> None:
    prefill = tmp_path / "prefill.json"
    prefill.write_text(json.dumps([{"role": "user", "content": "PREFILL"}, {"role": "assistant", "content": "yes"}]))
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    more = ["--max_turns", "3", "--num_workers", "2", "--resume", "--verbose=False"]
    more += ["--ephemeral_system_prompt", "EPHEMERAL"]
    more += ["--log_prefix_chars", "9", "--max_tokens", "77", "--reasoning_effort", "low", "--max_samples=4"]
    more += ["--prefill_messages_file", str(prefill), "--reasoning_disabled", "False"]
    with served(thinks) as server:
        arguments = flags(source, tmp_path, server.base_url, *more)
        assert batch([each.replace("_", "-") if each.startswith("--max_") else each for each in arguments]) == 0
        request = server.requests[0]
        with pytest.raises(SettingsError, match="fields of OpenRouter; the server is http://127"):
            batch([*arguments, "--providers_allowed", "a,b", "--provider_sort", "price"])
    assert (request["max_tokens"], request["reasoning_effort"]) == (77, "low")
    assert [message["content"] for message in request["messages"][:2]] == ["EPHEMERAL", "PREFILL"]
    assert sorted(entry["prompt_index"] for entry in entries(tmp_path / "run")) == [0, 1, 2, 3]
    for path in (tmp_path / "run").glob("*.jsonl"):
        assert b"PREFILL" not in path.read_bytes()
        assert b"EPHEMERAL" not in path.read_bytes()
    for wrong, said in (
        (["--max_sample", "3"], "did you mean --max_samples"),
        (["--env.group_size", "3"], "here it is --samples"),
        (["--openai.base_url", "x"], "given twice"),
        (["--max_cost", "3"], "--prices"),
    ):
        with pytest.raises(SettingsError, match=said):
            batch([*arguments, *wrong])


# Kills and resumes.


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_kills_at_any_moment_lose_and_double_nothing(tmp_path: Path, kills: int) -> None:
    """The first kill comes while the run starts, the second while it plays."""
    rows = [
        {"prompt": f"prompt {number}{' no thought' * (number % 7 == 3)}{' refuse' * (number % 11 == 5)}"}
        for number in range(10 * max(kills, 4))  # the second start plays longer than its kill waits
    ]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    asked: Counter[str] = Counter()

    async def slowly(request: dict[str, Any]) -> Any:
        asked[request["messages"][-1]["content"]] += 1
        await asyncio.sleep(0.05)
        return thinks(request)

    seed = random.getrandbits(32)
    with served(slowly) as server:
        more = ["--samples", "2", "--concurrency", "8"]
        killed = flags(source, tmp_path / "killed", server.base_url, *more)
        child = start(["-m", "tests.support.batch_runs", str(seed), str(kills), *killed])
        output, _ = child.communicate()
        assert child.returncode == 0, output
        ends = [int(line) for line in output.splitlines() if line.isdecimal()]
        assert len(ends) == kills + 1, output
        assert ends[-1] >> 8 == 1, "some samples failed, and the run ended by itself"
        assert ends.count(signal.SIGKILL) > kills // 2, output
        assert batch(flags(source, tmp_path / "whole", server.base_url, "--samples", "2")) == 1
    again = sum(asked.values()) - 4 * len(rows)
    assert again > 0 or (again == 0 and kills == 2), "kills make samples be played again; two may miss every request"
    one, other = tmp_path / "killed" / "run", tmp_path / "whole" / "run"
    assert same(entries(one)) == same(entries(other))
    assert same(lines(one / "trajectories.jsonl")) == same(entries(one))
    for kind in ("", "discarded", "failed"):
        assert Counter(keys(one, kind)) == Counter(keys(other, kind)), kind
    counts = ("samples", "completed", "discarded_no_reasoning", "failed", "total_prompts", "tool_statistics")
    statistics = [json.loads((folder / "statistics.json").read_text()) for folder in (one, other)]
    for name in (*counts, "completion_tokens", "reasoning_statistics", "total_batches"):
        assert statistics[0][name] == statistics[1][name], name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_says_so_by_its_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"prompt {number}"} for number in range(200)])
    asked = Event()

    async def slowly(request: dict[str, Any]) -> Any:
        asked.set()
        await asyncio.sleep(0.2)
        return thinks(request)

    with served(slowly) as server:
        child = start(["-m", "lachesis", "batch", *flags(source, tmp_path / "out", server.base_url)])
        assert asked.wait(60)
        child.send_signal(number)
        output, _ = child.communicate(timeout=60)
        assert child.returncode == 130, output
        assert batch(flags(source, tmp_path / "out", server.base_url, "--max_samples", "9")) == 0


def test_a_start_knows_what_is_done_in_another_order_with_more_rows_and_more_samples(tmp_path: Path) -> None:
    first = [*ROWS[:10], ROWS[0], {"prompt": "no thought"}, {"prompt": "refuse"}]
    asked: list[str] = []

    def notes(request: dict[str, Any]) -> Any:
        asked.append(request["messages"][-1]["content"])
        return thinks(request)

    with served(notes) as server:
        batch(flags(write_rows(tmp_path / "a.jsonl", first), tmp_path, server.base_url))
        assert len(asked) == 13
        asked.clear()
        batch(flags(write_rows(tmp_path / "b.jsonl", [*first[::-1], {"prompt": "new"}]), tmp_path, server.base_url))
        assert asked == ["new"], "neither discards nor failures are played again"
        asked.clear()
        batch(flags(tmp_path / "b.jsonl", tmp_path, server.base_url, "--samples", "2"))
        assert len(asked) == 14
        asked.clear()
        batch(flags(tmp_path / "b.jsonl", tmp_path, server.base_url, "--samples", "2", "--retry_failed"))
        assert asked == ["refuse"] * 2
        with pytest.raises(OtherSettings, match="max_token_length"):
            batch(flags(tmp_path / "b.jsonl", tmp_path, server.base_url, "--max_tokens", "9"))
    assert Counter(entry["conversations"][1]["value"] for entry in entries(tmp_path / "run"))["prompt 0"] == 4


@pytest.mark.slow
def test_a_sample_that_failed_is_played_again_and_counted_once_whatever_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lachesis_data.batch.sink.RETRY_PAUSE", 0.01)
    monkeypatch.setattr("lachesis.runs.failures._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("lachesis.runs.failures._LONGEST_PAUSE", 0.01)
    prompts = ["one", "two refuse", "three refuse", "four late"]
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in prompts])

    def policy(request: dict[str, Any]) -> Any:
        turn = request["messages"][-1]
        if "late" in request["messages"][0]["content"]:  # the server fails in its second turn, at each attempt
            return 503 if turn["role"] == "tool" else call(("terminal", {"command": "true"}))
        return thinks(request)

    toolset = ["--env.enabled_toolsets", "[terminal]"]
    with served(policy) as server:
        assert batch(flags(source, tmp_path, server.base_url, *toolset)) == 1
        begun = sum("late" in request["messages"][0]["content"] for request in server.requests) // 2
    failed = {record["prompt_index"]: record["rollouts"][0] for record in lines(tmp_path / "run/groups.failed.jsonl")}
    assert {rollout["outcome"] for rollout in failed.values()} == {"infra_error"}
    assert begun > 1
    assert failed[3]["completion_tokens"] + failed[3]["lost_completion_tokens"] == 5 * begun
    assert [message["role"] for message in failed[3]["messages"]] == ["user", "assistant", "tool"]
    assert "503" in failed[3]["reason"]
    assert failed[3]["traceback"] is None

    def later(request: dict[str, Any]) -> Any:
        return say("now", **({} if "three" in request["messages"][0]["content"] else {"reasoning_content": "hm"}))

    with served(later) as server:
        assert batch(flags(source, tmp_path, server.base_url, *toolset, "--retry_failed")) == 0
        assert batch(flags(source, tmp_path, server.base_url, *toolset)) == 0
        assert len(server.requests) == 3
    assert keys(tmp_path / "run", "failed") == []
    statistics = json.loads((tmp_path / "run/statistics.json").read_text())
    assert [statistics[name] for name in ("samples", "discarded_no_reasoning", "failed")] == [3, 1, 0]


def test_a_server_that_says_nothing_is_waited_for_and_a_model_that_says_nothing_usable_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lachesis_data.batch.sink.RETRY_PAUSE", 0.01)
    monkeypatch.setattr("lachesis.runs.failures._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("lachesis.runs.failures._LONGEST_PAUSE", 0.01)
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"prompt {number}"} for number in range(7)])
    heard = 0

    def silent(request: dict[str, Any]) -> Any:
        nonlocal heard
        heard += 1
        return say("") if heard <= 40 else thinks(request)

    with served(silent) as server:
        assert batch(flags(source, tmp_path, server.base_url)) == 0
    assert len(entries(tmp_path / "run")) == 7

    def stubborn(request: dict[str, Any]) -> Any:
        wrong = int(request["messages"][-1]["content"].split()[1]) < 5
        return say("<think>only a thought</think>") if wrong else thinks(request)

    with served(stubborn) as server:
        assert batch(flags(source, tmp_path, server.base_url, run="other")) == 1
        assert len(server.requests) == 5 * 4 + 2, "what the model cannot do is not played again"
    assert (len(entries(tmp_path / "other")), len(keys(tmp_path / "other", "failed"))) == (2, 5)


def test_what_is_ephemeral_is_in_no_file_of_a_run_and_still_decides_it(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    prefill = tmp_path / "prefill.json"
    prefill.write_text(json.dumps([{"role": "user", "content": "PREFILLED"}]))
    ephemeral = ["--ephemeral_system_prompt", "EPHEMERAL", "--prefill_messages_file", str(prefill)]
    with served(thinks) as server:
        assert batch(flags(source, tmp_path, server.base_url, *ephemeral)) == 0
        sent = server.requests[0]["messages"]
        with pytest.raises(OtherSettings, match="ephemeral_system_prompt"):
            main(flags(source, tmp_path, server.base_url, "--ephemeral_system_prompt", "other", *ephemeral[2:]))
    assert [message["content"] for message in sent] == ["EPHEMERAL", "PREFILLED", "a"]
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or not {b"EPHEMERAL", b"PREFILLED"} & {*re.findall(b"[A-Z]{9}", path.read_bytes())}


def test_a_row_whose_image_is_missing_fails_at_once_as_bad_input(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "image": str(tmp_path / "none")}, {"prompt": "b"}]
    source = write_rows(tmp_path / "rows.jsonl", rows)

    def policy(request: dict[str, Any]) -> Any:
        return thinks(request) if request["messages"][-1]["role"] == "tool" else call(("terminal", {"command": "true"}))

    with served(policy) as server:
        assert batch(flags(source, tmp_path, server.base_url, "--env.enabled_toolsets", "[terminal]")) == 1
        assert len(server.requests) == 3, "it is played once"
    (failed,) = lines(tmp_path / "run/groups.failed.jsonl")
    assert f"image '{tmp_path}/none' is not an absolute path of a folder" in failed["rollouts"][0]["reason"]
    statistics = json.loads((tmp_path / "run/statistics.json").read_text())
    assert statistics["failed_outcomes"] == {"bad_input": 1}


def test_discards_of_other_settings_are_not_counted(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"no thought {number}"} for number in range(4)])
    with served(thinks) as server:
        assert batch(flags(source, tmp_path, server.base_url)) == 1, "a run that keeps nothing is no success"
        assert batch(flags(source, tmp_path, server.base_url, "--keep_without_reasoning", "--max_turns", "3")) == 0
        assert len(server.requests) == 8
    statistics = json.loads((tmp_path / "run/statistics.json").read_text())
    assert [statistics[name] for name in ("samples", "discarded_no_reasoning", "prompt_tokens")] == [4, 0, 40]
    assert keys(tmp_path / "run", "discarded") == []


def test_discarded_samples_are_kept_later_without_being_played_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{'no thought' if number % 2 else 'prompt'} {number}"} for number in range(20)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    folder = tmp_path / "run"
    with served(thinks) as server:
        arguments = flags(source, tmp_path, server.base_url)
        assert batch(arguments) == 0
        said = capsys.readouterr()
        assert "note: a rollout without any reasoning is discarded; --keep-without-reasoning keeps" in said.err
        assert "10 finished rollouts are discarded" in " ".join(said.out.split())
        of_both = sorted(keys(folder) + keys(folder, "discarded"))
        discards = (folder / "groups.discarded.jsonl").read_bytes()
        exported = tmp_path / "exported.jsonl"
        options = ["--format", "batch", "--options", "{keep_without_reasoning: true}", "--out", str(exported)]
        assert lachesis(["export", str(folder / "groups.discarded.jsonl"), *options]) == 0
        assert batch([*arguments, "--keep_without_reasoning"]) == 0
        assert "10 rollouts without reasoning, which earlier starts discarded, are kept now" in capsys.readouterr().err
        kept = entries(folder)
        said_by = {entry["prompt_index"]: entry["conversations"] for entry in kept}
        without_server = {entry["prompt_index"]: entry["conversations"] for entry in lines(exported)}
        assert len(without_server) == 10 and without_server.items() <= said_by.items()
        # As after a kill between the last line and the end of the file of discards.
        (folder / "groups.discarded.jsonl").write_bytes(discards)
        assert batch([*arguments, "--keep_without_reasoning"]) == batch(arguments) == 0
        assert len(server.requests) == 20
    assert sorted(keys(folder)) == of_both and entries(folder) == kept
    assert sorted(entry["prompt_index"] for entry in kept) == list(range(20))
    statistics = json.loads((folder / "statistics.json").read_text())
    assert [statistics[name] for name in ("samples", "discarded_no_reasoning", "completed")] == [20, 0, 20]
    assert statistics["reasoning_statistics"]["total_assistant_turns"] == 20


def test_a_file_and_a_model_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "some.prompts.jsonl", ROWS[:3])
    with served(thinks) as server:
        least = ["some.prompts.jsonl", "-m", "scripted", "-b", server.base_url]
        assert batch(least) == 0
        assert "skipped toolsets that have no tools here: " in capsys.readouterr().err
        assert batch([*least, "--max_turns", "3"]) == 0
        assert "so this run writes to data/some.prompts-2" in capsys.readouterr().err
        assert batch([*least, "--max_turns", "3"]) == 0
        assert len(server.requests) == 6
        with pytest.raises(OtherSettings, match=r"write elsewhere: --run-name some\.prompts-3"):
            batch([*least, "--run_name", "some.prompts", "--max_turns", "4"])
        with pytest.raises(SettingsError, match="named twice"):
            batch([*least, "--dataset-file", "other.jsonl"])
    assert {path.name: len(entries(path)) for path in Path("data").iterdir()} == {
        "some.prompts": 3,
        "some.prompts-2": 3,
    }


@pytest.mark.parametrize("name", ["..", "../out", "/tmp/out", "a/../../out", "", " a", "a\nb", ".", "a/" * 3000 + "a"])
def test_no_run_name_leaves_the_folder_of_the_data(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        batch(flags(write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "data", "http://127.0.0.1:9", run=name))
    assert f"--run-name {name!r} " in capsys.readouterr().err


def test_edited_code_of_an_environment_is_refused_until_it_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "three_tools", raising=False)  # that of another test
    monkeypatch.setattr(sys, "path", [*sys.path])
    module, source = write_three_tools(tmp_path), write_rows(tmp_path / "rows.jsonl", ROWS[:2])
    with served(thinks) as server:
        tools = ["--env", f"{module}:ThreeTools", "--env.enabled_toolsets", "[code_tools]"]
        assert batch(flags(source, tmp_path, server.base_url, *tools)) == 0
        module.write_text(module.read_text().replace("'A tool.'", "'A better tool.'"))
        write_rows(source, ROWS[:3])
        with pytest.raises(OtherSettings, match=r"three_tools.py changed since .* \(2 groups finished\)"):
            batch(flags(source, tmp_path, server.base_url, *tools))
        assert batch(flags(source, tmp_path, server.base_url, *tools, "--env.when_code_changed", "continue")) == 0
        assert len(server.requests) == 3
    assert len(entries(tmp_path / "run")) == 3


def test_lines_have_the_places_of_their_rows_in_the_input_as_it_is_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(names: str) -> list[tuple[int, str]]:
        rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"row {name}", "of": name} for name in names))
        assert batch(flags(rows, tmp_path, server.base_url, "--samples", "2", size=3)) == 0
        found = entries(tmp_path / "run")
        assert found == lines(tmp_path / "run/trajectories.jsonl")
        done = json.loads((tmp_path / "run/checkpoint.json").read_text())["completed_prompts"]
        assert done == sorted({entry["prompt_index"] for entry in found} - {-1})
        return sorted((entry["prompt_index"], entry["metadata"]["of"]) for entry in found)

    with served(thinks) as server:
        assert play("ABB") == [(place, name) for place, name in enumerate("ABB") for _ in range(2)]
        assert "another prompt_index" not in capsys.readouterr().err
        before = play("NBABC")
        assert before == [(place, name) for place, name in enumerate("NBABC") for _ in range(2)]
        said = capsys.readouterr()
        assert "note: the rows of the input are in other places than before: 4 lines" in said.out + said.err
        (tmp_path / "run/batch_004_output.jsonl").unlink()  # as a kill leaves it: it is written again
        assert play("NBABC") == before
        assert play("BN") == [*[(-1, "A")] * 2, *[(-1, "B")] * 2, *[(-1, "C")] * 2, *[(0, "B")] * 2, *[(1, "N")] * 2]
        said = capsys.readouterr()
        assert "4 of 4 and 6 of rows that are not in the input any more: 10 kept" in said.out + said.err


def test_batch_files_that_somebody_changed_are_named_and_can_be_made_anew(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    with served(thinks) as server:
        batch(flags(source, tmp_path, server.base_url))
        before = entries(tmp_path / "run")
        (tmp_path / "run" / "batch_001_output.jsonl").unlink()
        with pytest.raises(RunFolderError, match=r"batch_002_output\.jsonl is not sample 6"):
            batch(flags(source, tmp_path, server.base_url))
        for path in (tmp_path / "run").glob("batch_*"):
            path.unlink()
        assert batch(flags(source, tmp_path, server.base_url)) == 0
        assert len(server.requests) == 20
    assert entries(tmp_path / "run") == before


def test_shards_joined_are_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*ROWS, {"prompt": "no thought"}, {"prompt": "refuse"}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    with served(thinks) as server:
        batch(flags(source, tmp_path / "whole", server.base_url))
        for number in (1, 2, 3):
            batch(flags(source, tmp_path, server.base_url, "--shard", f"{number}/3"))
            if number == 2:
                assert batch(["merge", str(tmp_path / "run")]) == 1
                said = capsys.readouterr().out
                assert "missing: shard_003_of_003" in said
                assert "not played" not in said
        capped = flags(source, tmp_path / "capped", server.base_url, "--concurrency", "1", "--max_total_tokens", "15")
        assert batch([*capped, "--shard", "1/2"]) == 0
        assert batch(["merge", str(tmp_path / "capped/run")]) == 1
        assert "rollouts not played yet" in capsys.readouterr().out
    assert batch(["merge", str(tmp_path / "run")]) == 0
    merged, whole = tmp_path / "run" / "merged", tmp_path / "whole" / "run"
    assert "3 shards: 20 kept, 1 discarded, 1 failed" in capsys.readouterr().out
    assert same(entries(merged)) == same(entries(whole)) == same(lines(merged / "trajectories.jsonl"))
    for kind in ("", "discarded", "failed"):
        assert sorted(keys(merged, kind)) == sorted(keys(whole, kind))
    with (tmp_path / "run/shard_002_of_003/groups.lock").open() as lock:  # as a start of that shard has it
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="shard_002_of_003 is being played"):
            batch(["merge", str(tmp_path / "run")])
    assert merged.exists()
    with served(thinks) as server:  # a run without shards goes on in it
        (tmp_path / "on").mkdir()
        merged.rename(tmp_path / "on" / "run")
        assert batch(flags(source, tmp_path / "on", server.base_url)) == 1
        assert not server.requests


def test_shards_that_do_not_belong_together_are_refused_and_what_is_there_stays(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "refuse"}]
    source, run = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run"
    second, copied, merged = run / "shard_002_of_002", run / "copied", run / "merged"

    def play(part: int, file: Path = source, *more: str) -> None:
        batch(flags(file, tmp_path, server.base_url, "--shard", f"{part}/2", *more))

    def refused(problem: str, *more: str) -> None:
        with pytest.raises(RunFolderError, match=problem):
            batch(["merge", str(run), *more])

    answers = [thinks]
    with served(lambda request: answers[0](request)) as server:
        play(1)
        shutil.copytree(run / "shard_001_of_002", second)
        refused("shard_002_of_002/groups.jsonl holds .*, which belongs to another part")
        shutil.rmtree(second)
        play(2, write_rows(tmp_path / "more.jsonl", [*rows, {"prompt": "one more"}]))
        refused("input: '21 rows, .*' then, '22 rows")
        play(2, source, "--samples", "2")
        refused("1 samples of each' then, '.* 2 samples of each' now")
        shutil.rmtree(second)
        play(2, source, "--max_tokens", "9")
        refused("max_token_length: 2048 then, 9 now")
        shutil.rmtree(second)
        play(2)
        shutil.copytree(second, copied)
        shutil.copytree(second, run / "shard_2_of_3")
        refused("shards of 2 and of 3 parts")
        shutil.rmtree(run / "shard_2_of_3")
        # The failed sample becomes a discard: the file of failures still has it, until the next start.
        (part,) = (i for i in (1, 2) if keys(run / f"shard_{i:03d}_of_002", "failed"))
        answers[0] = lambda request: say("no thought")
        play(part, source, "--retry_failed")
        for folder in (run, second, tmp_path):
            refused("is not a merged run", "--out", str(folder))
        written = []
        for _ in range(2):
            assert batch(["merge", str(run)]) == 0
            written.append([(merged / name).read_bytes() for name in ("groups.jsonl", "trajectories.jsonl")])
        assert written[0] == written[1]
        statistics = json.loads((merged / "statistics.json").read_text())
        assert [statistics[name] for name in ("samples", "discarded_no_reasoning", "failed")] == [20, 1, 0]
        assert Counter(entry["prompt_index"] for entry in entries(merged)) == Counter(range(20))
        with (second / "batch_001_output.jsonl").open("r+b") as file:  # as after a kill, or an edit
            file.truncate(100)
        (second / "statistics.json").unlink()
        refused("shard_002_of_002 has not ended yet")
        shutil.copy(copied / "statistics.json", second)
        assert batch(["merge", str(run)]) == 0
        assert (merged / "trajectories.jsonl").read_bytes() == written[0][1]
        # Continued, it is more than a merge would make.
        batch([*flags(source, run, server.base_url, "--samples", "2", "--max_total_tokens", "1", run="merged")])
        refused("is not a merged run, or was continued")


KILLED_MERGE = """
import os, sys
from pathlib import Path
from lachesis_data.batch.shards import merge_shards

run, left = Path(sys.argv[1]), 0
whole = (run / "merged/trajectories.jsonl").read_bytes()
there = {path.name for path in run.iterdir()}

def die(event, of):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir"):
        left -= 1
        left or os._exit(9)

def merge(killed_at):
    "Whether it was killed, before that operation on files."
    global left
    if not (child := os.fork()):
        left = killed_at
        sys.addaudithook(die)
        merge_shards(run, run / "merged")
        os._exit(0)
    return bool(os.waitpid(child, 0)[1])

at = 1
while merge(at):
    kept = [each for each in ("merged", ".merged.old") if (run / each / "checkpoint.json").exists()]
    assert kept and (run / kept[0] / "trajectories.jsonl").read_bytes() == whole, at
    assert at % 3 or merge(at), "again, on what the first one left"
    merge_shards(run, run / "merged")
    assert (run / "merged/trajectories.jsonl").read_bytes() == whole, at
    assert {path.name for path in run.iterdir()} == there, at
    at += 1
print(at)
"""


@pytest.mark.slow
def test_a_merge_that_is_killed_anywhere_leaves_a_merged_run_and_hinders_no_later_one(tmp_path: Path) -> None:
    source, run = write_rows(tmp_path / "rows.jsonl", ROWS[:4]), tmp_path / "run"
    with served(thinks) as server:
        for number in (1, 2):
            batch(flags(source, tmp_path, server.base_url, "--shard", f"{number}/2"))
    batch(["merge", str(run)])
    done = subprocess.run([sys.executable, "-c", KILLED_MERGE, run], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    # One that fails restores what a killed one had put aside; a folder that is no merged run is not deleted for it.
    (run / "merged").rename(run / ".merged.old")
    (run / "merged").mkdir()
    with pytest.raises(RunFolderError, match="is not a merged run"):
        batch(["merge", str(run)])
    (run / "merged").rmdir()
    (run / "shard_002_of_002/groups.run.json").unlink()
    with pytest.raises(RunFolderError, match="shard_002_of_002 has not ended"):
        batch(["merge", str(run)])
    assert (run / "merged/trajectories.jsonl").exists()


def test_caps_end_a_run_that_a_later_start_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    with served(thinks) as server:
        more = ["--concurrency", "2", "--max_total_tokens", "30"]
        assert batch(flags(source, tmp_path, server.base_url, *more)) == 0
        said = capsys.readouterr().out
        assert "--max-total-tokens 30 is reached" in said
        done, left = (int(re.search(pattern, said)[1]) for pattern in (r"rollouts +(\d+) of", r"not finished +(\d+):"))
        assert done + left == 20 and left > 0
        assert 6 <= len(server.requests) < 12
        more = ["--concurrency", "2", "--max_cost", "0.00006", "--prices", "0,1"]
        assert batch(flags(source, tmp_path, server.base_url, *more)) == 0
        assert 20 > len(server.requests) >= 6
        assert batch(flags(source, tmp_path, server.base_url)) == 0
        assert len(server.requests) == 20
    assert sorted(entry["prompt_index"] for entry in entries(tmp_path / "run")) == list(range(20))


def test_what_a_server_does_not_count_costs_an_unknown_amount_and_not_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS[:3])
    with served(lambda request: {**thinks(request), "usage": None}) as server:
        assert batch(flags(source, tmp_path, server.base_url, "--prices", "2,6")) == 0
    assert re.search(r"^cost +unknown", capsys.readouterr().out, re.MULTILINE)
    said = json.loads((tmp_path / "run" / "statistics.json").read_text())
    assert [said[name] for name in ("cost", "prompt_tokens", "completion_tokens")] == [None, None, None]


def test_the_prices_of_the_settings_hold_for_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS[:3])
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}
    prices = (f"--openai.price_per_million_{name}" for name in ("input=1000", "output=2000", "cached_input=100"))
    with served(lambda request: {**thinks(request), "usage": usage}) as server:
        assert batch(flags(source, tmp_path, server.base_url, *prices)) == 0
    cost = 3 * (60 * 1000 + 40 * 100 + 10 * 2000) / 1e6
    assert re.search(rf"^cost +{cost:.4f} *$", capsys.readouterr().out, re.MULTILINE)
    assert json.loads((tmp_path / "run" / "statistics.json").read_text())["cost"] == pytest.approx(cost)


# Hostile input.


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', "line 3: not JSON"),
        (b'{"prompt": "a"}\n["b"]\n', "line 2: expected an object, found a list"),
        (b'{"prompt": "\xff"}\n', "line 1: not JSON"),
        (
            b'{"question": "a"}\n',
            "line 1: the row has neither 'prompt' nor 'messages', only question",
        ),
        (b'{"prompt": " "}\n', "line 1: prompt is empty"),
        (b'{"prompt": 3}\n', "line 1: prompt must be text or a list of content parts, not int"),
        (b'{"prompt": "a", "image": "python:3.11"}\n', "line 1: image is 'python:3.11', and the backend takes the abs"),
        (b'{"prompt": "a", "cwd": 4}\n', "line 1: cwd must be text, not int"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1: the last message is of role 'assistant'"),
        (b'{"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]}\n', "line 1: message 0"),
        (
            b'{"prompt": "a", "level": 2, "metadata": {"level": 1}}\n',
            "line 1: 'level' is in the row and in its metadata",
        ),
        (b'{"messages": []}\n', "line 1: messages is empty"),
        (b"[" * 100_000 + b"\n", "line 1: not JSON"),
        (b"\n", "contains no rows"),
    ],
)
def test_a_row_that_cannot_be_played_is_named_before_anything_is(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DatasetError) as raised:
        Rows(str(path), images="folder").check()
    assert str(path) in str(raised.value)
    assert problem in str(raised.value)


def test_bad_rows_of_csv_and_files_that_are_missing_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,level\na,1\nb,2,3\n")
    with pytest.raises(DatasetError, match=r"rows\.csv, line 3: more cells"):
        Rows(str(path)).check()
    path.write_bytes(b"prompt,level,prompt\na,1,b\n")
    with pytest.raises(DatasetError, match=r"rows\.csv, line 1: the column 'prompt' is there twice"):
        Rows(str(path)).check()
    path.write_bytes(b'prompt\n"a\nb\n')
    with pytest.raises(DatasetError, match=r"rows\.csv, line \d: not CSV in UTF-8 \(unexpected end of data\)"):
        Rows(str(path)).check()
    path.write_bytes(b"prompt\n\xff\n")
    with pytest.raises(DatasetError, match=r"rows\.csv, line \d: not CSV in UTF-8"):
        Rows(str(path)).check()
    for name in ("none.jsonl", "none.csv", "none.parquet"):
        with pytest.raises(DatasetError, match=f"there is no file or folder .*{name}"):
            Rows(str(tmp_path / name)).check()
    (tmp_path / "rows.txt").touch()
    with pytest.raises(DatasetError, match=r"rows\.txt is a local file, but not \.jsonl, \.csv or \.parquet"):
        Rows(str(tmp_path / "rows.txt")).check()


def test_csv_and_parquet_have_the_same_rows_as_json_lines(tmp_path: Path) -> None:
    import datasets

    table = [{"prompt": f"prompt, {number}", "level": str(number) if number else None} for number in range(3)]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "level"])
        writer.writeheader()
        writer.writerows(table)
    datasets.Dataset.from_list(table).to_parquet(str(tmp_path / "rows.parquet"))
    write_rows(tmp_path / "rows.jsonl", table)
    kinds = [
        [(row.index, row.digest) for row in Rows(str(tmp_path / f"rows.{kind}"))]
        for kind in ("jsonl", "csv", "parquet")
    ]
    assert kinds[0] == kinds[1] == kinds[2]
    assert [row.content["level"] for row in Rows(str(tmp_path / "rows.csv"))] == [None, "1", "2"]


def test_a_json_array_has_the_same_rows_as_json_lines(tmp_path: Path) -> None:
    table = [{"prompt": f"prompt {number}", "level": number} for number in range(3)]
    write_rows(tmp_path / "rows.jsonl", table)
    (tmp_path / "rows.json").write_text(json.dumps(table, indent=1))
    kinds = [[(row.index, row.digest) for row in Rows(str(tmp_path / f"rows.{kind}"))] for kind in ("jsonl", "json")]
    assert kinds[0] == kinds[1]
    (tmp_path / "rows.json").write_text('[{"prompt": "a"}, 3]')
    with pytest.raises(DatasetError, match=r"rows\.json, item 2: expected an object, found int"):
        Rows(str(tmp_path / "rows.json")).check()


def test_nulls_that_a_column_adds_to_messages_are_not_sent(tmp_path: Path) -> None:
    import datasets

    def asked(name: str, **arguments: int) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {
            "messages": [{"role": "user", "content": "go"}, said, {"role": "tool", "tool_call_id": "c", "content": "r"}]
        }

    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([asked("add", x=1), asked("take", y=2)]).to_parquet(str(path))
    calls = [row.content["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in Rows(str(path))]
    assert calls == [{"x": 1}, {"y": 2}]


@pytest.mark.slow
def test_long_prompts_lone_surrogates_and_binary_output_are_written_and_read_again(tmp_path: Path) -> None:
    def policy(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "user" and "binary" in request["messages"][-1]["content"]:
            binary = "head -c 300 /dev/urandom; printf '\\377\\000\\033[1m\\001</tool_response>'"
            return call(("terminal", {"command": binary}), reasoning_content="hm \ud800")
        return say("\udfff </think> done", reasoning_content="hm \ud83d\ude00")

    source = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "x" * 10_000_000}, {"prompt": "lone \ud800", "k\udc00": "\udc00"}]
    )
    with source.open("a") as file:
        file.write('{"prompt": "binary", "number": 123456789012345678901234567890}\n')
    with served(policy) as server:
        arguments = flags(source, tmp_path, server.base_url, "--env.enabled_toolsets", "[terminal]")
        assert batch(arguments) == 0
        assert batch(arguments) == 0
        assert len(server.requests) == 4
    found = {entry["prompt_index"]: entry for entry in entries(tmp_path / "run")}
    assert found[0]["conversations"][1]["value"] == "x" * 10_000_000
    assert found[1]["conversations"][1]["value"] == "lone \ufffd"
    assert found[2]["metadata"] == {"number": 123456789012345678901234567890}
    assert found[2]["tool_stats"]["terminal"]["success"] == 1
    (result,) = (turn["value"] for turn in found[2]["conversations"] if turn["from"] == "tool")
    assert json.loads(result.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>"))["name"] == "terminal"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_and_a_read_only_one_are_named_and_lose_nothing(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "disk").mkdir()
    with served(thinks) as server:
        arguments = flags(source, tmp_path / "disk", server.base_url, "--concurrency", "1")
        command = ["unshare", "--mount", sys.executable, "-m", "tests.support.batch_runs", "full", *arguments]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    assert "full 1\nwhole True\n" in ended.stdout, said
    assert "No space left on device" in ended.stderr and "/disk/run/" in ended.stderr, said
    assert "room 0\nlines 20\nread-only 1\n" in ended.stdout, said
    assert "Read-only file system" in ended.stderr, said
    assert "Traceback" not in said


def test_the_short_flags_are_those_of_the_other_commands() -> None:
    short = ["-m", "m", "-n", "3", "-r", "2", "-c", "4", "-t", "5", "-T", "0.5", "-o", "x"]
    given, rest = _parser().parse_known_args(short)
    assert (given.max_samples, given.samples, given.concurrency, given.output) == (3, 2, 4, Path("x"))
    assert {"--env.max_token_length=5", "--env.agent_temperature=0.5"} <= {*_as_flags(given, True, [])} and not rest
