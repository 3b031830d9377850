"""`process`, `evaluate` and `serve` with contexts that are compressed: all that was sampled is delivered, once."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lachesis.runs.run_folder import OtherSettings
from lachesis.settings.server_settings import ServerConfig, ServerConfigError
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_data.exports.exports import export_group, load_export, write_export
from lachesis_data.exports.parquet import read_rows
from lachesis_data.files.validation import validate_entry
from lachesis_messages.records.export_lines import ExportLine, ExportTotals
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server import Ask, FakeServer, Reply
from lachesis_testing.fake_server.policies import as_reply
from lachesis_tokens.samples.group_shapes import samples_from_atropos
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.verbs.verify import verify_file
from lachesis_tools import BUILTIN_TOOLS, tool
from tests.support import report_pages
from tests.support.own_api import OwnApi, own_api
from tests.support.scripted_server import ScriptedServer, say
from tests.support.summarising import SUMMARY, Summarises
from tests.support.training_runs import CoinToss, environment, serving, trained, with_tokens, written

__all__ = ["own_api"]


@tool(toolset="look")
async def look(at: str) -> str:
    """Look at something."""
    return "There is a tide table on the wall of the harbour office. " * 3


class Harbour(CoinToss):
    """Rollouts of many turns."""

    name = "harbour"
    tools = BUILTIN_TOOLS.extended(look)
    toolsets = ("look",)
    system_prompt = "You keep the tide tables of a harbour."


LIMITS: dict[str, Any] = {
    "max_agent_turns": 12,
    "max_token_length": 60,
    "compress_context_at": 700,
    "eval_temperature": 1.0,
}


@pytest.mark.parametrize("phase", [1, 2])
async def test_process_compresses_contexts_and_loses_no_token(tmp_path: Path, phase: int) -> None:
    policy = Summarises()
    async with FakeServer(policy) as model:
        server = with_tokens(model, tmp_path)
        if phase == 1:
            server = ServerConfig(base_url=model.base_url, model_name="fake")
        env = environment(Harbour, tmp_path, server, **LIMITS)
        result = await env.process_manager()
    (group,) = read_lines(tmp_path / "groups.jsonl")
    edits = [rollout["context_edits"] for rollout in group["rollouts"]]
    assert sum(map(len, edits)) == policy.asked == result.summary.compressions >= 4
    assert all(edit["error"] is None and edit["by"] == "policy" for each in edits for edit in each)
    for rollout, messages in zip(group["rollouts"], group["messages"], strict=True):
        assert (rollout["outcome"], rollout["turns"]) == ("max_turns", 12), rollout["reason"]
        assert [message["content"] for message in messages[:1]] == [Harbour.system_prompt]
        assert f"[CONTEXT SUMMARY]: {SUMMARY}" in [message["content"] for message in messages]
    assert result.summary.discarded == 0, "nothing was taken back"
    assert dict(result.rows())["contexts"] == f"{policy.asked} compressed, 0 times failed"
    rollouts = report_pages.rollouts((tmp_path / "groups.html").read_text())
    for each, shown in zip(edits, rollouts, strict=True):
        for edit in each:
            sizes = (
                f"{edit['messages']} messages from {edit['at']} on, {edit['tokens_before']} → {edit['tokens_after']}"
            )
            assert f"After turn {edit['turn']}: a summary by policy replaced {sizes} tokens" in shown
            assert f"edit replacement of messages {edit['at']} to {edit['at'] + edit['messages'] - 1}" in shown
    if phase == 1:
        assert not group["samples"]
        return
    totals = verify_file(tmp_path / "groups.jsonl")
    assert totals.ok, totals.problems
    sampled = sum(rollout["completion_tokens"] for rollout in group["rollouts"])
    assert (totals.sampled, totals.delivered, totals.duplicated, totals.lost) == (sampled, sampled, 0, 0)
    purposes = [span["purpose"] for sample in group["samples"] for span in sample["spans"]]
    assert (purposes.count("summary"), purposes.count("turn")) == (policy.asked, 24)


class Steps(Summarises):
    """Calls `look` as often as a rollout's first call says, "1 of 14", then answers."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = iter(steps)

    def reply(self, ask: Ask) -> Reply:
        if "Answer with the summary alone" in ask.prompt[-300:]:
            return super().reply(ask)
        done, *_, steps = [*map(int, (re.findall(r"(\d+) of (\d+)", ask.prompt) or [(0, next(self.steps))])[-1])]
        call = {"name": "look", "arguments": {"at": f"{done + 1} of {steps}"}}
        return as_reply(ask, f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if done < steps else f"{steps} looks.")


async def test_every_export_of_compressed_rollouts_is_valid_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    class Looks(Harbour):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            answer = result.messages[-1]["content"]
            return {"14 looks.": 1.0, "1 looks.": 0.0}.get(answer, 0.5)

    async with FakeServer(Steps(1, 2, 9, 14, 50)) as model:
        settings = {**LIMITS, "max_agent_turns": 20, "group_size": 5}
        await environment(Looks, tmp_path, with_tokens(model, tmp_path), **settings).process_manager()
    (group,) = read_lines(tmp_path / "groups.jsonl")
    rollouts = {rollout["rollout_id"]: rollout for rollout in group["rollouts"]}
    compressed = {rollout_id for rollout_id, rollout in rollouts.items() if rollout.get("context_edits")}
    finished = {rollout_id for rollout_id, rollout in rollouts.items() if rollout["completed"]}
    assert (len(compressed), len(finished), len(compressed & finished)) == (3, 4, 2)

    def written(name: str, **options: Any) -> tuple[list[ExportLine], list[Any]]:
        """The lines as the export makes them, and as their own reader finds them in its file."""
        if name == "batch":
            options["keep_without_reasoning"] = True
        export, totals, out = load_export(name, options), ExportTotals(), tmp_path / "out"
        lines = list(export_group(export, group, totals))
        assert len({id_ for line in lines for id_ in line.rollout_ids}) + totals.left_out.total() == len(rollouts)
        write_export(load_export(name, options), [group], out)
        read = list(read_rows(out)) if name == "parquet" else list(read_lines(out))
        assert len(read) == len(lines) and [validate_entry(entry, name) for entry in read] == [[]] * len(read)
        return lines, read

    for name in ("hermes", "batch", "sharegpt-tools", "openai", "trl", "parquet", "atif"):
        lines, read = written(name)
        known = finished if name in ("sharegpt-tools", "openai", "trl") else set(rollouts)
        assert {line.rollout_ids for line in lines} == {(rollout_id,) for rollout_id in known}
        for line, entry in zip(lines, read, strict=True):
            (rollout_id,) = line.rollout_ids
            turns = rollouts[rollout_id]["message_turns"]
            assert ("branches_omitted" in line.warnings) == (rollout_id in compressed), name
            marked = "answers_not_sampled" in line.warnings
            assert marked == (rollout_id in compressed and name not in ("openai", "parquet", "atif"))
            if name in ("openai", "trl", "parquet"):  # what was sampled in an earlier context is not trained
                weights = [each.get("weight", 1) for each in entry["messages"] if each["role"] == "assistant"]
                places = [at for at, each in enumerate(entry["messages"]) if each["role"] == "assistant"]
                assert weights == [int(turns[at] is not None) for at in places]
                assert (0 in weights) == (rollout_id in compressed)
            if name == "atif":
                elsewhere = entry["final_metrics"].get("extra", {}).get("tokens_of_other_branches", 0)
                here = sum(step["metrics"]["completion_tokens"] for step in entry["steps"] if "metrics" in step)
                assert here + elsewhere == rollouts[rollout_id]["completion_tokens"]
                assert bool(elsewhere) == (rollout_id in compressed)

    (line,), (pair,) = written("dpo")
    assert (pair["score_chosen"], pair["score_rejected"]) == (1.0, 0.0)
    assert [message["role"] for message in pair["prompt"]] == ["system", "user"]
    assert [pair[name][-1]["content"] for name in ("chosen", "rejected")] == ["14 looks.", "1 looks."]
    assert any(SUMMARY in message["content"] for message in pair["chosen"])
    assert set(line.warnings) == {"answers_not_sampled", "branches_omitted"}

    _, samples = written("samples")
    assert {sample["rollout_id"] for sample in samples} == set(rollouts)
    trained = sum(span["end"] - span["start"] for sample in samples for span in sample["spans"])
    assert trained == sum(rollout["completion_tokens"] for rollout in group["rollouts"])


async def test_a_second_start_of_an_evaluation_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    async with FakeServer(Summarises()) as model:
        server = with_tokens(model, tmp_path)
        first = await environment(Harbour, tmp_path, server, eval_items=2, **LIMITS)._run_evaluate()
        second = await environment(Harbour, tmp_path, server, eval_items=3, **LIMITS)._run_evaluate()
        changed = environment(Harbour, tmp_path, server, eval_items=3, **{**LIMITS, "compress_context_at": 800})
        with pytest.raises(OtherSettings, match="compress_context_at: 700 then, 800 now"):
            await changed._run_evaluate()
    assert (first.played, second.played) == (2, 1)
    totals = verify_file(tmp_path / "eval" / "samples.jsonl")
    assert totals.ok and totals.delivered == totals.sampled > 0, totals.problems


async def test_serve_sends_every_context_of_a_rollout(tmp_path: Path, own_api: OwnApi) -> None:
    """With `split_rollouts: all`, a trainer gets what was sampled in each context, the summaries too."""
    settings = {**LIMITS, "enabled_toolsets": ["look"]}
    async with own_api.wiped() as api, FakeServer(Summarises()) as model:
        env = serving(tmp_path, api, with_tokens(model, tmp_path), Harbour, split_rollouts="all", **settings)
        trainer = await trained(env, api, groups=2, steps=2)  # a batch holds one such group
    for group in trainer.groups:
        samples = samples_from_atropos(group)
        assert all(verify(sample) == [] for sample in samples)
        by_rollout = Counter(sample.rollout_id for sample in samples)
        assert len(by_rollout) == 2 and min(by_rollout.values()) > 2
        for rollout in by_rollout:
            own = [sample for sample in samples if sample.rollout_id == rollout]
            assert sum(sample.trained for sample in own) == own[0].sampled
            turns = [span.turn for sample in own for span in sample.spans]
            assert sorted(turns) == list(range(len(turns)))
    assert "note: env.compress" not in (tmp_path / "console.txt").read_text()


@pytest.mark.parametrize("writer", ["extractive", "server"])
async def test_a_summary_that_the_policy_did_not_write_is_context_and_not_trained(tmp_path: Path, writer: str) -> None:
    def notes(request: dict[str, Any]) -> Any:
        (message,) = request["messages"]
        assert "<turns>" in message["content"] and "harbour office" in message["content"]
        return say("Notes of another model.")

    policy = Summarises()
    async with FakeServer(policy) as model, ScriptedServer(notes) as other:
        given = "extractive" if writer == "extractive" else {"base_url": other.base_url, "model_name": "notes"}
        env = environment(Harbour, tmp_path, with_tokens(model, tmp_path), **{**LIMITS, "compress_context_with": given})
        await env.process_manager()
    (group,) = read_lines(tmp_path / "groups.jsonl")
    edits = [edit for rollout in group["rollouts"] for edit in rollout["context_edits"]]
    assert len(edits) >= 4 and {(edit["by"], edit["error"]) for edit in edits} == {
        ("extractive" if writer == "extractive" else "notes", None)
    }
    assert all(edit["tokens_after"] < edit["tokens_before"] for edit in edits)
    assert policy.asked == 0
    totals = verify_file(tmp_path / "groups.jsonl")
    assert totals.ok and totals.delivered == totals.sampled > 0, totals.problems
    assert len(other.requests) == (0 if writer == "extractive" else len(edits))
    said = [message["content"] for message in group["messages"][0] if message["role"] == "user"][1]
    if writer == "server":
        assert said == "[CONTEXT SUMMARY]: Notes of another model."
    else:
        assert said.startswith("[CONTEXT SUMMARY]: Assistant: ") and said.count("CONTEXT SUMMARY") == 1
    assert {span["purpose"] for sample in group["samples"] for span in sample["spans"]} == {"turn"}


async def test_without_a_summary_the_rollout_goes_on_and_a_full_context_is_no_score(tmp_path: Path) -> None:
    """The server of the summaries is down: what the agent would have reached with them is unknown."""
    async with FakeServer(Summarises(), context_length=1200) as model, ScriptedServer([503]) as other:
        writer = {"base_url": other.base_url, "model_name": "notes", "max_retries": 0}
        env = environment(
            Harbour, tmp_path, with_tokens(model, tmp_path), **{**LIMITS, "compress_context_with": writer}
        )
        result = await env.process_manager()
    rollouts = written(tmp_path)
    for rollout in rollouts:
        assert rollout["outcome"] == "infra_error" and rollout["reward"] is None
        assert "its context could not be compressed: notes: " in rollout["reason"] and "503" in rollout["reason"]
        first, *later = rollout["context_edits"]
        assert first["messages"] == 0 and "503" in first["error"] and first["tokens_before"] >= 700
        assert rollout["turns"] > first["turn"], "it went on with its whole context"
        assert all(edit["tokens_before"] > 1.25 * first["tokens_before"] - 1 for edit in later)
        assert first["at"] is None
    assert any("stayed as it was" in warning and "503" in warning for warning in result.warnings())
    assert "not compressed: notes: " in report_pages.everything((tmp_path / "groups.html").read_text())


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"bas_url": "http://127.0.0.1:1/v1"}, "compress_context_with: bas_url: .*takes the settings of openai"),
        ({"model_name": "notes"}, "compress_context_with: model 'notes' has no server; add base_url"),
    ],
)
async def test_a_writer_that_cannot_be_asked_ends_the_run_before_its_first_rollout(
    tmp_path: Path, given: dict[str, str], problem: str
) -> None:
    async with FakeServer(Summarises()) as model:
        server = ServerConfig(base_url=model.base_url, model_name="fake")
        env = environment(Harbour, tmp_path, server, **LIMITS, compress_context_with=given)
        with pytest.raises(ServerConfigError, match=problem):
            await env.process_manager()
        assert not [seen for seen in model.requests if seen.completions]


def test_settings_that_contradict_each_other_are_refused_and_keys_are_not_written() -> None:
    for wrong in ({"compress_context_at": 100, "compress_context_to": 100}, {"compress_context_to": 100}):
        with pytest.raises(ValidationError, match="compress_context_to"):
            HermesAgentEnvConfig(**wrong)
    writer = {"base_url": "http://me:secret@host/v1", "model_name": "notes", "api_key": "secret"}
    config = HermesAgentEnvConfig(compress_context_at=100, compress_context_with=writer)
    for shown in (config.about_content(evaluation=False), config.public()):
        assert "secret" not in str(shown) and shown["compress_context_with"]["model_name"] == "notes"
