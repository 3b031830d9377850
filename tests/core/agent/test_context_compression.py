"""Compression of a live conversation: every token that was sampled is delivered once, in its own context."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count, cycle, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from lachesis.loop.limits import LoopLimits
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.outcome import Outcome
from lachesis_client import OpenAIServer, Router
from lachesis_data.compression.context_size import ContextSize
from lachesis_data.compression.live import ContextCompression, NotCompressed
from lachesis_messages.frozen import freeze_dict
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.responses import ChatResponse, Usage
from lachesis_testing.fake_server import Ask, FakeServer, fake_tokenizer
from lachesis_testing.fake_server.policies import WORDS
from lachesis_tokens.templates.chat_template import read_template
from lachesis_tools import ToolResult
from tests.run import some
from tests.support.exactness import Stack, assert_exact, stack
from tests.support.summarising import SUMMARY, Summarises

EXAMPLES = some(8)
"""Rollouts of the property test. Raise it by hand."""
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
TASK = [{"role": "system", "content": "You tell tides."}, {"role": "user", "content": "When is the tide high?"}]
EXAMPLE = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Ahoy."}]


async def execute(calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Results of 1 to 60 words, some of which spell markup."""
    rngs = [Random(call.arguments) for call in calls]
    words = [rng.choices((*WORDS, "<tool_call>", "<|im_end|>"), k=rng.randint(1, 60)) for rng in rngs]
    return [ToolResult(" ".join(each), None) for each in words]


def loop_of(world: Stack, compression: ContextCompression, **more: Any) -> HermesAgentLoop:
    chosen = {"execute": execute, "max_turns": 16, "limits": LoopLimits()} | more
    return HermesAgentLoop(world.tokens.for_rollout(), TOOLS, compression=compression, **chosen)


def test_random_rollouts_keep_every_token_and_a_valid_conversation() -> None:
    """The policy answers with reasoning, several calls, broken calls and broken summaries; messages are ephemeral."""

    def summary(ask: Ask) -> str:
        said = [SUMMARY, f"<think>\nHm.\n</think>\n{SUMMARY}", "", "<think>\nHm.", '<tool_call>\n{"name": "sea']
        return ask.rng("summary").choice(said)

    with asyncio.Runner() as runner:
        closing = AsyncExitStack()
        policy = Summarises(summary=summary, calls=2, thinking=True)
        faults = {"cut_tool_call": 0.05, "broken_utf8_middle": 0.05, "ambiguous": 0.05, "empty": 0.03}
        world = runner.run(closing.enter_async_context(stack(policy=policy.reply, faults=faults, vary=True)))
        made: list[int] = []

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            at=st.integers(400, 2000),
            share=st.floats(0.2, 0.8),
            keep=st.integers(1, 9),
            system=st.booleans(),
            begun=st.integers(0, 3),
            ephemeral=st.sampled_from([None, "Be brief."]),
            prefilled=st.booleans(),
            own=st.booleans(),
            turns=st.integers(1, 16),
        )
        def examples(
            at: int,
            share: float,
            keep: int,
            system: bool,
            begun: int,
            ephemeral: str | None,
            prefilled: bool,
            own: bool,
            turns: int,
        ) -> None:
            world.fake.requests.clear()

            async def notes(messages: Sequence[Message]) -> str:
                validate_messages([Message("user", "?"), *messages])  # whole turns: no call without its result
                return SUMMARY

            compression = ContextCompression(
                at, int(at * share), keep, None if own else notes, "policy" if own else "n"
            )
            loop = loop_of(
                world,
                compression,
                max_turns=turns,
                ephemeral_system_prompt=ephemeral,
                prefill_messages=EXAMPLE if prefilled else (),
                limits=LoopLimits(max_resamples=2, max_faulty_turns=2),
            )
            result = runner.run(loop.run([*TASK[not system : 1], *EXAMPLE * begun, TASK[1]]))
            assert result.error is None, result.reason
            found = assert_exact(world, result.history)
            validate_messages(node.message for node in result.history.nodes())
            assert result.tokens.completion_tokens == sum(sample.trained for sample in found)
            done = [edit for edit in result.context_edits if edit.error is None]
            spans = [span for sample in found for span in sample.spans if span.purpose == "summary"]
            assert len(spans) >= len(done) if own else not spans
            kept = result.messages
            assert [each["content"] for each in kept[:system]] == [TASK[0]["content"]] * system
            assert kept[system]["content"] == (EXAMPLE if begun else TASK[1:])[0]["content"], "the first of its role"
            assert not any("Be brief" in str(each["content"]) for each in kept)
            made.append(len(done))

        try:
            examples()
        finally:
            runner.run(closing.aclose())
    assert sum(made) > EXAMPLES


async def test_a_policy_writes_its_summaries_and_all_that_it_says_is_trained() -> None:
    async with stack(policy=Summarises(turns=10**6).reply) as world:
        result = await loop_of(world, ContextCompression(at=1000), max_turns=30).run(TASK)
        found = assert_exact(world, result.history)
        assert result.context_edits and all(edit.error is None for edit in result.context_edits)
        summaries = [span for sample in found for span in sample.spans if span.purpose == "summary"]
        assert len(summaries) == len(result.context_edits)
        # One sample a context: a summary continues the tokens of the context that it is about.
        assert len(found) == len(summaries) + 1 and all(len(sample.spans) > 1 for sample in found)
        assert not any(sample.discarded for sample in found)
        assert result.turns_used == 30 and result.api_calls == 30 + len(summaries)
        assert max(len(prompt) for seen in world.fake.requests if seen.call for prompt in seen.call.prompts) < 1400


@pytest.mark.parametrize("said", ["", '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'])
async def test_a_policy_without_a_usable_summary_goes_on_in_its_whole_context(said: str) -> None:
    policy = Summarises(summary=said)
    async with stack(policy=policy.reply, context_length=1500) as world:
        loop = loop_of(
            world, ContextCompression(at=600), max_turns=40, max_tokens=60, limits=LoopLimits(max_resamples=1)
        )
        result = await loop.run(TASK)
        found = assert_exact(world, result.history)
    assert result.outcome in (Outcome.CONTEXT_EXHAUSTED, Outcome.MODEL_ERROR) and result.error is None, "its own doing"
    first = result.context_edits[0]
    assert "no usable summary in 2 completions" in str(first.error) and (first.messages, policy.asked >= 2) == (0, True)
    assert result.turns_used > first.turn, "it went on"
    growth = [edit.tokens_before for edit in result.context_edits]
    assert all(later >= 1.25 * earlier - 1 for earlier, later in pairwise(growth))
    assert sum(sample.trained for sample in found if sample.discarded) > 0, "failed summaries are discarded attempts"
    assert len([sample for sample in found if not sample.discarded]) == 1


async def test_a_late_summary_is_left_out_and_its_time_is_not_the_agents() -> None:
    asked = asyncio.Event()

    async def never(messages: Sequence[Message]) -> str:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with stack(policy=Summarises().reply) as world:
        compression = ContextCompression(600, summarise=never, by="notes", timeout=0.2)
        limits = LoopLimits(max_seconds=300, max_waiting=300)
        result = await loop_of(world, compression, max_turns=8, limits=limits).run(TASK)
        assert_exact(world, result.history)
    assert asked.is_set() and result.outcome is Outcome.MAX_TURNS
    assert [edit.error for edit in result.context_edits] == ["notes: no summary after 0.2 s"] * len(
        result.context_edits
    )
    assert result.seconds_waiting >= 0.2 * len(result.context_edits) > 0


async def test_a_full_context_without_the_summary_of_another_server_is_no_fault_of_the_agent() -> None:
    async def broken(messages: Sequence[Message]) -> str:
        raise NotCompressed("out of order")

    async with stack(policy=Summarises().reply, context_length=1200) as world:
        result = await loop_of(world, ContextCompression(600, summarise=broken, by="notes"), max_turns=40).run(TASK)
    assert result.outcome is Outcome.INFRA_ERROR and isinstance(result.error, NotCompressed)
    assert "could not be compressed: notes: out of order" in result.reason


async def test_a_budget_that_is_used_up_has_nothing_to_do_with_a_summary_that_failed() -> None:
    async def broken(messages: Sequence[Message]) -> str:
        raise NotCompressed("out of order")

    async with stack(policy=Summarises().reply) as world:
        compression, limits = ContextCompression(600, summarise=broken), LoopLimits(rollout_token_budget=700)
        result = await loop_of(world, compression, max_turns=99, limits=limits).run(TASK)
    assert result.context_edits[0].error and result.outcome is Outcome.CONTEXT_EXHAUSTED and result.error is None


class Counts:
    """A server whose prompts grow by 150 tokens a request; after five turns it says `then`."""

    def __init__(self, then: ChatResponse) -> None:
        self.then, self.asked = then, 0

    async def chat(self, messages: Sequence[Message], **_: Any) -> ChatResponse:
        self.asked += 1
        if self.asked > 5:
            return replace(self.then, usage=replace(self.then.usage, prompt_tokens=150 * self.asked))
        call = ToolCall(f"call_{self.asked}", "search", '{"query": "tide"}')
        return ChatResponse(
            Message("assistant", tool_calls=(call,)), FinishReason.TOOL_CALLS, usage=Usage(150 * self.asked, 50)
        )


def says(text: str, finish: FinishReason, tokens: int | None, *calls: ToolCall) -> ChatResponse:
    return ChatResponse(Message("assistant", text, calls), finish, usage=Usage(None, tokens))


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        (says("", FinishReason.TOOL_CALLS, 50, ToolCall("x", "no_such_tool", "{}")), Outcome.MODEL_ERROR),
        (says("", FinishReason.TOOL_CALLS, 50, ToolCall("x", "search", "{oops")), Outcome.MODEL_ERROR),
        (says("On and on", FinishReason.LENGTH, 50), Outcome.CONTEXT_EXHAUSTED),
        (says("On and on", FinishReason.LENGTH, 49), Outcome.INFRA_ERROR),
        (says("", FinishReason.LENGTH, 20, ToolCall("x", "search", "{oops")), Outcome.INFRA_ERROR),
    ],
    ids=["unknown tool", "no JSON", "cut by its own limit", "cut by the context", "call cut by the context"],
)
async def test_only_a_context_that_is_full_is_no_fault_of_the_agent(then: ChatResponse, outcome: Outcome) -> None:
    """The server of the summaries was down, in a context that may be far from full."""

    async def broken(messages: Sequence[Message]) -> str:
        raise NotCompressed("out of order")

    compression = ContextCompression(600, keep=2, summarise=broken, by="notes")
    loop = HermesAgentLoop(Counts(then), TOOLS, execute=execute, compression=compression, max_tokens=50)
    result = await loop.run(TASK)
    assert result.outcome is outcome and all(edit.error for edit in result.context_edits) and result.context_edits


async def test_a_summary_that_saves_nothing_is_a_discarded_attempt() -> None:
    search = '<tool_call>\n{"name": "search", "arguments": {"query": "tide"}}\n</tool_call>'

    def policy(ask: Ask) -> str:
        if "Answer with the summary alone" in ask.prompt[-300:]:
            return "It went on and on. " * 300
        return search if ask.turn < 10 else "Done."

    async with stack(policy=policy) as world:
        result = await loop_of(world, ContextCompression(at=600, keep=2), max_tokens=2000).run(TASK)
    assert {edit.error for edit in result.context_edits} == {
        "the summary is no shorter than the messages that it would replace"
    }
    found = [(span.purpose, sample.discarded) for sample in result.samples("r") for span in sample.spans]
    assert set(found) == {("turn", False), ("summary", True)} and len(result.context_edits) == sum(
        discarded for _, discarded in found
    )


async def test_a_server_that_counts_nothing_as_0_is_estimated() -> None:
    said = iter([says("", FinishReason.STOP, 0), says("", FinishReason.STOP, 0), says("Noon.", FinishReason.STOP, 0)])

    class Zero:
        async def chat(self, messages: Sequence[Message], **_: Any) -> ChatResponse:
            return replace(next(said), usage=Usage(0, 0))

    loop = HermesAgentLoop(Zero(), TOOLS, execute=execute, compression=ContextCompression(600))
    assert (await loop.run(TASK)).outcome is Outcome.COMPLETED


async def test_a_conversation_without_tokens_is_compressed_by_what_the_server_counts() -> None:
    async with FakeServer(Summarises()) as fake, Router([OpenAIServer(fake.settings())]) as router:
        loop = HermesAgentLoop(
            router, TOOLS, execute=execute, max_turns=30, compression=ContextCompression(at=1000), limits=LoopLimits()
        )
        result = await loop.run(TASK)
        counted = [seen.completions[0] for seen in fake.requests]
        longest = max(len(prompt) for seen in fake.requests if seen.call for prompt in seen.call.prompts)
    assert len(result.context_edits) >= 2 and all(edit.error is None for edit in result.context_edits)
    assert len(counted) == result.api_calls and longest < 1400
    validate_messages(node.message for node in result.history.nodes())


ALTERNATE = """{%- set spoken = namespace(count=0) -%}
{%- for message in messages if message.role in ("user", "assistant") and not message.tool_calls -%}
    {%- if (message.role == "user") != (spoken.count % 2 == 0) -%}
        {{- raise_exception("roles must alternate") -}}
    {%- endif -%}
    {%- set spoken.count = spoken.count + 1 -%}
{%- endfor -%}"""
"""What Mistral's templates ask of a conversation, and without tools those of Gemma, Llama 2 and Cohere."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize("chats", [False, True])
async def test_a_template_that_takes_no_further_message_of_the_user_gets_none(phase: int, chats: bool) -> None:
    """The instruction joins the last message, and the summary joins the task, once."""
    tokenizer = fake_tokenizer(chat_template=ALTERNATE + read_template("hermes"))
    said = cycle(["", SUMMARY])
    policy = Summarises(calls=2, summary=lambda ask: next(said))
    follow_ups = (f"And on day {day}? " * 9 for day in count(1))

    async def follow_up(_: object) -> str:
        return next(follow_ups)

    async with (
        stack(tokenizer, policy=policy.reply) as world,
        Router([OpenAIServer(world.fake.settings())]) as router,
    ):
        loop = HermesAgentLoop(
            router if phase == 1 else world.tokens.for_rollout(),
            [] if chats else TOOLS,
            execute=execute,
            max_turns=40,
            compression=ContextCompression(at=1800),
            limits=LoopLimits(),
        )
        loop.follow_up = follow_up
        result = await loop.run(TASK)
        if phase == 2:
            assert_exact(world, result.history)
    assert (result.outcome, result.turns_used) == (Outcome.MAX_TURNS, 40), result.reason
    assert len(result.context_edits) >= 2 and not any(edit.error for edit in result.context_edits)
    texts = [str(message["content"]) for message in result.messages]
    assert texts[:2] == [TASK[0]["content"], f"{TASK[1]['content']}\n\n[CONTEXT SUMMARY]: {SUMMARY}"]
    assert not any("Answer with the summary" in text for text in texts)
    assert result.messages[2]["role"] == "assistant" and len(texts) < 40
    validate_messages(node.message for node in result.history.nodes())


async def test_the_reasoning_before_a_summary_is_no_part_of_its_size() -> None:
    thought = "<think>\n" + "Hm. " * 300 + "\n</think>\n"
    async with stack(policy=Summarises(summary=thought + SUMMARY).reply) as world:
        result = await loop_of(world, ContextCompression(at=1000), max_turns=40).run(TASK)
        assert_exact(world, result.history)
    assert len(result.context_edits) >= 2
    assert all(edit.error is None and edit.tokens_after < 700 for edit in result.context_edits)
    assert all(edit.tokens_before < 1200 for edit in result.context_edits), "as soon as it has grown again"


@pytest.mark.parametrize("own", [False, True])
async def test_a_summary_that_is_longer_than_what_it_replaces_is_left_out(own: bool) -> None:
    async def notes(messages: Sequence[Message]) -> str:
        return f"{SUMMARY} " * 90

    policy = Summarises(summary=f"{SUMMARY} " * 90)
    async with stack(policy=policy.reply) as world:
        compression = ContextCompression(600, 400, summarise=None if own else notes)
        result = await loop_of(world, compression).run(TASK)
        found = assert_exact(world, result.history)
    first = result.context_edits[0]
    assert first.error == "the summary is no shorter than the messages that it would replace"
    assert first.tokens_after == first.tokens_before and SUMMARY not in str(result.messages)
    assert [span.purpose for sample in found for span in sample.spans].count("summary") == policy.asked


def answer(text: str, prompt: int | None, completion: int | None) -> ChatResponse:
    return ChatResponse(Message("assistant", text), FinishReason.STOP, usage=Usage(prompt, completion))


def test_sizes_are_those_that_the_server_counted() -> None:
    size = ContextSize()
    size.add(Message("system", "x" * 40))
    size.add(Message("user", "x" * 120))
    assert size.total == 40, "a quarter of the characters, until a server counts"
    size.add(answer("y", 100, 7))
    assert size.sizes == [25, 75, 7] and size.total == 107
    size.add(Message("tool", "x" * 100, tool_call_id="a"))
    size.add(answer("y", 157, 3))
    assert size.sizes == [25, 75, 7, 50, 3] and size.total == 160
    size.add(Message("tool", "x" * 10, tool_call_id="b"))
    assert size.total == 165, "what a character took before"
    size.cut(4)
    assert size.total == 157
    size.replace(2, 4, Message("user", "x" * 40))
    assert size.sizes == [25, 75, 20] and size.total == 120
    size.add(answer("y", 130, 5))
    assert size.sizes == [25, 75, 30, 5]
    size.add(answer("y", None, None))
    assert size.total == 136, "a server that does not count"


def test_images_and_what_a_template_drops_count_as_the_server_says() -> None:
    size = ContextSize()
    size.add(Message("user", "?"))
    size.add(answer("y", 40, 60))
    picture = freeze_dict({"type": "image_url", "image_url": {"url": "data:,"}})
    size.add(Message("tool", (picture,), tool_call_id="a"))
    assert size.total == 350, "an image alone is not nothing, also before it is counted"
    size.add(answer("y", 600, 5))
    assert size.sizes == [40, 60, 500, 5]
    size.add(Message("tool", "x" * 8, tool_call_id="b"))
    size.add(answer("y", 360, 5))
    assert size.total == 365 and all(each > 0 for each in size.sizes), "reasoning is no longer in the prompt"


def test_a_target_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ValueError, match="600 tokens cannot be compressed to 600"):
        ContextCompression(600, 600)
