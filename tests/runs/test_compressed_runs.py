"""`process`, `evaluate` and `serve` with contexts that are compressed: all that was sampled is delivered, once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lachesis.cli.verify import verify_file
from lachesis.run_folder import OtherSettings
from lachesis.runs.server_settings import ServerConfig
from lachesis.testing.fake_server import FakeServer
from lachesis.tools import BUILTIN_TOOLS, tool
from lachesis.training.groups import samples_from_atropos
from lachesis.trajectories import verify
from lachesis.trajectories.jsonl import read_lines
from tests.support.own_api import OwnApi, own_api
from tests.support.summarising import SUMMARY, Summarises
from tests.support.training_runs import CoinToss, environment, serving, trained, with_tokens

__all__ = ["own_api"]


@tool(toolset="look")
async def look(at: str) -> str:
    """Look at something."""
    return "There is a tide table on the wall of the harbour office. " * 3


class Harbour(CoinToss):
    """Rollouts of many turns."""

    name = "harbour"
    tools = BUILTIN_TOOLS.extended(look)
    toolsets = ["look"]
    system_prompt = "You keep the tide tables of a harbour."


LIMITS: dict[str, Any] = {"max_agent_turns": 12, "max_token_length": 60, "compress_context_at": 700, "eval_temperature": 1.0}


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
    assert dict(result.rows())["contexts"] == f"{policy.asked} compressed, 0 times in vain"
    if phase == 1:
        assert not group["samples"]
        return
    totals = verify_file(tmp_path / "groups.jsonl")
    assert totals.ok, totals.problems
    sampled = sum(rollout["completion_tokens"] for rollout in group["rollouts"])
    assert (totals.sampled, totals.delivered, totals.duplicated, totals.lost) == (sampled, sampled, 0, 0)
    purposes = [span["purpose"] for sample in group["samples"] for span in sample["spans"]]
    assert (purposes.count("summary"), purposes.count("turn")) == (policy.asked, 24)


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
    async with own_api.wiped() as api, FakeServer(Summarises()) as model:
        env = serving(tmp_path, api, with_tokens(model, tmp_path), Harbour, split_rollouts="all", **LIMITS)
        trainer = await trained(env, api, groups=2, steps=1)
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
