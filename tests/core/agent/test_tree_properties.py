"""Groups of trees with random forks, ends, edits, attempts and faults: every token once, every sandbox of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lachesis.runs.group_records import group_record
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tokens.samples.verification import verify_records
from tests.core.agent.test_tree_rollouts import Letters
from tests.run import some
from tests.support.small_envs import sandboxes
from tests.support.training_runs import environment, with_tokens


class Restless:
    """Letters, with unusable calls, summaries, answers and failed commands between them."""

    def __call__(self, ask: Ask) -> str:
        rng = ask.rng()
        kind = rng.random()
        if "Answer with the summary alone" in ask.prompt[-400:]:
            return "So far: letters." if kind < 0.8 else ""
        if kind < 0.15:
            return "Done."
        command = f"echo {rng.choice('abcdefgh')} >> log; cat log {'; false' if kind > 0.9 else ''}"
        calls = [{"name": "terminal", "arguments": {"command": command}}] * (1 + (kind > 0.8))
        calls[1:] = [{"name": "todo", "arguments": {}} for _ in calls[1:]]
        text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
        return text.replace('"', "", 3) if 0.15 <= kind < 0.25 else text


class Scattered(Letters):
    """It forks by the hash of a history; the conversation may be compressed, so the files tell what was written."""

    tree_leaves = 4
    seed, width = 0, 2

    def branch_at(self, item: Any, history: Any) -> int:
        return self.width if Random(f"{self.seed} {history.head.digest}").random() < 0.5 else 1

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        letters = [
            json.loads(call.arguments)["command"][5]
            for response in result.turn_responses
            for call in response.message.tool_calls
            if call.name == "terminal"
        ]
        assert (await ctx.read_file("log")).split() == letters
        return len(set(letters)) / 10


@given(seed=st.integers(0, 10**6), width=st.integers(2, 4), faulty=st.booleans(), edited=st.booleans())
@settings(max_examples=some(6), deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_random_trees_lose_and_double_nothing(seed: int, width: int, faulty: bool, edited: bool) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(_played(Path(folder), seed, width, faulty, edited))
    assert not sandboxes()


async def _played(folder: Path, seed: int, width: int, faulty: bool, edited: bool) -> None:
    faults = {"server_error": 0.06, "disconnect": 0.04, "empty": 0.05, "aborted": 0.1} if faulty else {}
    chosen = {"group_size": 8, "max_infra_retries": 9, "max_agent_turns": 5}
    if edited:
        chosen |= {"compress_context_at": 250, "compress_context_keep": 2}
    async with FakeServer(Restless(), faults=faults, vary=True, seed=seed) as model:
        server = with_tokens(model, folder).model_copy(update={"max_retries": 0})
        env = environment(Scattered, folder, server, **chosen)
        env.seed, env.width = seed, width
        async with env.running():
            (group,) = await env.play_item(0, "item", size=8)
        answered = [each for each in model.requests if each.state == "answered"]
    sampled = sum(len(made.ids) for each in answered for made in each.completions)
    rollouts = group.rollouts
    assert [each.reward is not None for each in rollouts] == [True] * 8, [each.tracebacks for each in rollouts]
    assert len({each.tree.path for each in rollouts}) == 8
    trained = Counter(span.completion_id for each in rollouts for made in each.samples for span in made.spans)
    assert set(trained.values()) == {1}
    assert (
        sum(each.samples[0].sampled for each in rollouts) + sum(each.lost.completion_tokens for each in rollouts)
        == sampled
    )
    record = json.loads(json.dumps(group_record(group, environment="e", model="m")))
    totals = verify_records(record["samples"])
    assert totals.ok, totals.problems
    of = {each.tree.path: (each, shown) for each, shown in zip(rollouts, record["rollouts"], strict=True)}
    assert sum(shown["completion_tokens"] for _, shown in of.values()) == totals.delivered
    assert sum(shown["completion_tokens"] + shown["lost_completion_tokens"] for _, shown in of.values()) == sampled
    if not any(each.attempts > 1 for each in rollouts):
        whole = [each for each in answered if all(made.finish_reason != "abort" for made in each.completions)]
        assert sum(shown["api_calls"] for _, shown in of.values()) == len(whole), "parts of a completion are one call"
    for path, (each, shown) in of.items():
        assert min(shown[name] for name in shown if name.startswith("seconds")) >= 0
        own = each.result.turn_responses
        for other, (sibling, _) in of.items():
            parts = [a == b for a, b in zip(path.split("."), other.split("."), strict=False)]
            shared = len(list(itertools.takewhile(bool, parts)))
            if other != path and 0 < shared < len(each.tree.turns):
                turns = each.tree.turns[shared]
                ids = [
                    [turn.tokens.completion_id for turn in of_one[:turns]]
                    for of_one in (own, sibling.result.turn_responses)
                ]
                assert ids[0] == ids[1] and len(ids[0]) == turns
