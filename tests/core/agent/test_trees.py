"""Rollouts that branch: every leaf has its own files, and every sampled token is in one rollout."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from lachesis import HermesAgentBaseEnv
from lachesis_messages.records.jsonl import read_lines
from lachesis_testing.fake_server.completions import Ask
from lachesis_tokens.samples.verification import verify_records
from tests.support.training_runs import played


class Letters(HermesAgentBaseEnv):
    """The agent writes a letter a turn into a file; the reward checks that they are those of its own conversation."""

    name = "letters"
    toolsets = ("terminal", "todo")

    async def setup(self) -> None:
        self.items = itertools.count()

    async def get_next_item(self) -> Any:
        return next(self.items)

    def format_prompt(self, item: Any) -> str:
        return f"Write letters ({item})."

    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        await ctx.write_file("log", "")

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        said = [json.loads(call.arguments)["command"][5] for call in result.ok_calls if call.name == "terminal"]
        assert (await ctx.read_file("log")).split() == said
        assert sum(count.count for count in result.tool_counts.values()) == len(result.ok_calls)
        return len(set(said)) / 10


class Writer:
    """Writes random letters for `turns` turns."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def __call__(self, ask: Ask) -> str:
        if ask.turn >= self.turns:
            return "Done."
        letter = ask.rng().choice("abcdefghijklmnopqrstuvwxyz")
        command = f"echo {letter} >> log; cat log"
        return f"<tool_call>\n{json.dumps({'name': 'terminal', 'arguments': {'command': command}})}\n</tool_call>"


async def trees(folder: Path, policy: Any = None, env: Any = Letters, **settings: Any) -> list[dict[str, Any]]:
    return await played(env, folder, policy or Writer(), **{"group_size": 8, "tree_at": "turns:2,3", **settings})


async def test_a_tree_has_leaves_of_their_own_and_shares_what_came_before(tmp_path: Path) -> None:
    found = await trees(tmp_path)
    assert [each["reward"] is not None for each in found] == [True] * 8, found[0]["traceback"]
    assert sorted(each["tree"]["path"] for each in found) == [
        f"{root}.{first}.{second}" for root in range(2) for first in range(2) for second in range(2)
    ]
    assert {tuple(each["tree"]["weights"]) for each in found} == {(4, 2, 1)}
    assert {tuple(each["tree"]["turns"]) for each in found} == {(0, 1, 2)}
    (group,) = read_lines(tmp_path / "groups.jsonl")
    said = {}
    for rollout, messages in zip(group["rollouts"], group["messages"], strict=True):
        said[rollout["tree"]["path"]] = [each["content"] for each in messages if each["role"] == "tool"]
    for one, other in itertools.combinations(said, 2):
        shared = len([1 for a, b in zip(one.split("."), other.split("."), strict=True) if a == b])
        common = next((at for at in range(3) if one.split(".")[at] != other.split(".")[at]), 3)
        assert said[one][:common] == said[other][:common], (one, other, shared)
    totals = verify_records([group])
    assert totals.ok, totals.problems
    assert totals.delivered == totals.sampled == sum(each["completion_tokens"] for each in found)
    spans = Counter(span["completion_id"] for sample in group["samples"] for span in sample["spans"])
    assert set(spans.values()) == {1}
    assert len(spans) == 2 * (1 + 2 + 4 + 4)
