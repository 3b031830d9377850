"""`lachesis compress` with a real tokenizer folder and a summariser at the wire."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lachesis.cli import main
from lachesis_data.compression.compressor import MARK
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.records.jsonl import read_lines
from lachesis_messages.records.loading import from_sharegpt
from lachesis_testing.fake_server.tokenizer import fake_tokenizer
from lachesis_testing.scripted_server import ScriptedServer, say
from tests.data.compression.examples import agent_entry


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    fake_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four long entries, one of another kind and a short one, and settings that any test may complete."""
    monkeypatch.setenv("SUMMARY_KEY", "secret")
    monkeypatch.chdir(tmp_path)
    entries = [agent_entry(20, form) for form in ("trajectory", "dataset", "messages")]
    for kind, entry in zip(("good", "broken", "endless"), entries, strict=True):
        key = "messages" if "messages" in entry else "conversations"
        entry[key] = json.loads(json.dumps(entry[key]).replace("output 3 ", f"{kind} output "))
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in [*entries, {"no": 1}, agent_entry(1)])
    )
    settings = {
        "tokenizer": {"name": str(tokenizer)},
        "compression": {"target_max_tokens": 1200, "summary_target_tokens": 60},
        "summarization": {"model": "m", "api_key_env": "SUMMARY_KEY", "max_retries": 2, "retry_delay": 0.01},
        "output": {"output_suffix": "_short"},
    }
    write_settings(tmp_path, settings)
    return tmp_path


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / "trajectory_compression.yaml").write_text(yaml.safe_dump(settings))


def set_server(folder: Path, url: str) -> None:
    path = folder / "configs" / "trajectory_compression.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["summarization"]["base_url"] = url
    write_settings(folder, settings)


def compress(*arguments: str) -> int:
    return main(["compress", "--input", "in.jsonl", *arguments])


def test_the_file_may_come_without_a_flag_and_there_is_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compress("--extractive", "--output", "a.jsonl")
    main(["compress", "in.jsonl", "--extractive", "--output", "b.jsonl"])
    assert (folder / "a.jsonl").read_bytes() == (folder / "b.jsonl").read_bytes()
    for given in ([], ["in.jsonl", "--input", "in.jsonl"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["compress", *given])
        assert ended.value.code == 2
        assert "name one file or folder: lachesis compress PATH" in capsys.readouterr().err


def test_a_file_from_which_everything_was_left_out_is_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "in.jsonl").write_text(json.dumps(agent_entry(1)) + "\n")
    tight = ["--extractive", "--target-max-tokens", "10", "--output", "out.jsonl"]
    assert compress(*tight) == 0 and (folder / "out.jsonl").read_text()
    path = folder / "configs" / "trajectory_compression.yaml"
    settings = yaml.safe_load(path.read_text())
    write_settings(folder, {**settings, "processing": {"save_over_limit": False}})
    assert compress(*tight) == 1 and not (folder / "out.jsonl").read_text()
    assert "error: no entry is left" in capsys.readouterr().err


def test_without_the_hub_a_tokenizer_of_it_is_one_error_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert compress("--tokenizer", "nope/nope") == 2
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "'nope/nope' cannot be loaded (it is not in the cache, and http://127.0.0.1:9" in said[0]


def test_a_file_without_entries_is_no_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "in.jsonl").write_text("\n")
    assert compress("--extractive") == 1
    assert "in.jsonl has no entries" in capsys.readouterr().err


async def test_a_server_writes_summaries_and_its_failures_leave_entries_as_they_were(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: dict[str, Any]) -> Any:
        asked = request["messages"][0]["content"]
        if "broken output" in asked:
            return 503
        if "endless output" in asked:
            return say("It went on and on", finish_reason="length")
        return say("<think>\nhm\n</think>\nIt looked at many files.")

    async with ScriptedServer(answer) as server:
        set_server(folder, server.base_url)
        assert await asyncio.to_thread(compress) == 1
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
        assert {(request["temperature"], request["max_tokens"]) for request in server.requests} == {(0.3, 120)}
        assert sum("broken output" in str(request) for request in server.requests) == 3
    good, broken, endless, unknown, short = read_lines(folder / "in_short.jsonl")
    was = list(read_lines(folder / "in.jsonl"))
    assert good["conversations"][4]["value"].endswith("[CONTEXT SUMMARY]: It looked at many files.")
    validate_messages(from_sharegpt(good))
    assert good[MARK]["compressed_tokens"] <= 1200
    for left, before in zip((broken, endless, unknown, short), was[1:], strict=True):
        assert {name: value for name, value in left.items() if name != MARK} == before
    assert "503" in broken[MARK]["error"]
    assert "not finished after 120 tokens" in endless[MARK]["error"]
    assert "neither conversations nor messages" in unknown[MARK]["error"]
    assert short[MARK]["skipped_under_target"]
    metrics = json.loads((folder / "in_short_metrics.json").read_text())
    assert metrics["summary"]["trajectories_failed"] == 3
    assert metrics["summarization"] == {"total_api_calls": 5, "total_errors": 2, "success_rate": 0.6}
    assert [row["line"] for row in metrics["trajectories"]] == [1, 2, 3, 4, 5]
    assert not list(folder.glob("*.progress"))
    said = capsys.readouterr()
    assert "left as they were: 2 lines, summary" in said.err


async def test_a_wrong_key_ends_the_run_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with ScriptedServer([401]) as server:
        set_server(folder, server.base_url)
        assert await asyncio.to_thread(compress) == 2
    assert "401" in capsys.readouterr().err
    assert not (folder / "in_short.jsonl").exists()


def test_an_extract_needs_no_server_and_a_dry_run_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compress("--dry_run") == 1
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["in.jsonl"]
    assert "What would be compressed" in capsys.readouterr().out
    assert compress("--extractive", "--output", "a.jsonl", "--target-max-tokens", "1000") == 1
    assert compress("--extractive", "--output", "b.jsonl", "--target_max_tokens", "1000") == 1
    assert (folder / "a.jsonl").read_bytes() == (folder / "b.jsonl").read_bytes()
    assert all(entry[MARK]["compressed_tokens"] <= 1000 for entry in read_lines(folder / "a.jsonl"))


def test_where_nothing_fits_it_says_what_the_protected_turns_take(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compress("--extractive", "--output", "a.jsonl", "--target_max_tokens", "100") == 1
    said = capsys.readouterr().err
    assert (
        "still over the limit, 4 of 5; in 4 the protected turns alone take " in said and " and the limit is 100" in said
    )
    assert "protected_turns in --config: last_n_turns 4, first_system, first_human, first_gpt, first_tool" in said
    marks = [entry[MARK] for entry in read_lines(folder / "a.jsonl") if entry[MARK]["error"] is None]
    for mark in marks:
        assert 100 < mark["protected_tokens"] <= mark["compressed_tokens"] <= mark["original_tokens"]
    least = max(mark["protected_tokens"] for mark in marks)
    assert compress("--extractive", "--output", "b.jsonl", "--target_max_tokens", str(least)) == 1
    assert "which leaves too little for a summary" in capsys.readouterr().err
    assert compress("--extractive", "--output", "c.jsonl", "--target_max_tokens", "1000") == 1
    assert "still over the limit, " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compression": {"target_max_token": 1}}, "did you mean 'target_max_tokens'?"),
        ({"compresion": {}}, "did you mean 'compression'?"),
        (
            {"compression": {"target_max_tokens": "many"}},
            "target_max_tokens: Input should be a valid integer",
        ),
        ({"compression": 5}, "settings are in sections"),
        ({}, "summarization.model is not set"),
        ({"tokenizer": {"name": "configs"}}, "tokenizer 'configs' cannot be loaded"),
    ],
)
def test_settings_that_cannot_be_used_are_named(
    folder: Path,
    change: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = yaml.safe_load((folder / "configs" / "trajectory_compression.yaml").read_text())["tokenizer"]
    write_settings(folder, {"tokenizer": tokenizer, **change})
    assert compress() == 2
    assert message in capsys.readouterr().err
