"""Compression of a live conversation: every token that was sampled is delivered once, in its own context."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

pytest.importorskip("transformers")

from lachesis.agent.context_compression import ContextCompression
from lachesis.agent.loop import HermesAgentLoop, LoopLimits
from lachesis.agent.outcome import Outcome
from lachesis.testing.fake_server import Ask, Lengths, RandomWords, ToolUser
from lachesis.testing.fake_server.policies import WORDS, Said
from lachesis.tools import ToolResult
from lachesis.trajectories import ToolCall, validate_messages
from tests.support.exactness import Stack, assert_exact, stack

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
MESSAGES = [{"role": "system", "content": "You tell tides."}, {"role": "user", "content": "When is the tide high?"}]


async def execute(calls: Sequence[ToolCall]) -> list[ToolResult]:
    return [ToolResult(" ".join(Random(call.id).choices(WORDS, k=30)), None) for call in calls]


class Summarises:
    """A tool user that obeys the instruction to summarise."""

    def __init__(self, turns: int, summary: Said = "The story so far.", **more: Any) -> None:
        self.plays = ToolUser(turns=10**6, answer=RandomWords(Lengths(2, 12)), **more)
        self.turns = turns
        self.summary = summary
        self.said = 0

    def __call__(self, ask: Ask) -> Said:
        if "Answer with the summary alone" in ask.prompt[-400:]:
            return self.summary
        self.said += 1
        return "Done." if self.said > self.turns else self.plays.reply(ask)


def loop_of(world: Stack, compression: ContextCompression, **more: Any) -> HermesAgentLoop:
    settings = {"execute": execute, "max_turns": 100, "limits": LoopLimits()} | more
    return HermesAgentLoop(world.tokens.for_rollout(), TOOLS, compression=compression, **settings)


async def test_a_policy_writes_its_summaries_and_all_that_it_says_is_trained() -> None:
    async with stack(policy=Summarises(20)) as world:
        result = await loop_of(world, ContextCompression(at=600)).run(MESSAGES)
        assert result.outcome is Outcome.COMPLETED, result.reason
        found = assert_exact(world, result.history)
        assert result.context_edits and all(edit.error is None for edit in result.context_edits)
        validate_messages(node.message for node in result.history.nodes())
        summaries = [span for sample in found for span in sample.spans if span.purpose == "summary"]
        assert len(summaries) == len(result.context_edits) == len(found) - 1
