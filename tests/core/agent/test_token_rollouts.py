"""Rollouts of the agent loop over a fake server that misbehaves: every token that was sampled is delivered once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from lachesis.loop.limits import LoopLimits
from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.outcome import Outcome
from lachesis_messages.messages import ToolCall
from lachesis_messages.tokens import MASKED
from lachesis_testing.fake_server import Lengths, RandomWords, Scripted, ToolUser
from lachesis_testing.fake_server.tokenizer import fake_tokenizer
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.group_shapes import GroupSettings, RolloutSamples, TrainingGroup, build_group
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tools import ToolResult
from tests.run import some
from tests.support.exactness import Stack, assert_exact, stack

EXAMPLES = some(15)
"""Rollouts of the agent loop. Raise it by hand."""
KEPT = (
    *("thinking", "trailing_space", "spelled_special", "broken_utf8_middle", "broken_utf8_end", "ambiguous"),
    *("cut_tool_call", "no_end_of_turn", "empty", "no_tokens"),
)
"""What a model may do to its tokens and still be trained."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look <up>.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    for name in ("search", "ping")
]
QUESTION = {"role": "user", "content": "When is the tide high in Zürich?"}
PREFILL = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Ahoy."}]


async def execute(calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Results that spell markup, and some that fail."""
    return [
        ToolResult(content=f"{call.name}: <tool_call> <|im_end|>\n 東京", error=None if call.name == "search" else "no")
        for call in calls
    ]


def loop_of(world: Stack, **more: Any) -> HermesAgentLoop:
    settings = {"execute": execute, "max_turns": 12, "limits": LoopLimits(max_resamples=20)} | more
    return HermesAgentLoop(world.tokens.for_rollout(), TOOLS, **settings)


@pytest.mark.slow
def test_rollouts_of_a_misbehaving_model_are_exact() -> None:
    """Malformed turns are sampled again, calls renamed, turns rolled back, ephemeral messages shown: all is kept."""
    with asyncio.Runner() as runner:
        closing = AsyncExitStack()
        policy = ToolUser(turns=6, calls=2, answer=RandomWords(Lengths(2, 12)))
        faults = dict.fromkeys(KEPT, 0.06) | {"server_error": 0.03, "cut_body": 0.03, "rate_limited": 0.03}
        world = runner.run(
            closing.enter_async_context(stack(policy=policy.reply, faults=faults, vary=True, retry_after=0.001))
        )

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            ephemeral=st.sampled_from([None, "Be brief."]),
            prefilled=st.booleans(),
            system=st.booleans(),
            turns=st.integers(1, 12),
            faulty=st.integers(1, 3),
        )
        def examples(ephemeral: str | None, prefilled: bool, system: bool, turns: int, faulty: int) -> None:
            world.fake.requests.clear()
            loop = loop_of(
                world,
                max_turns=turns,
                ephemeral_system_prompt=ephemeral,
                prefill_messages=PREFILL if prefilled else (),
                limits=LoopLimits(max_resamples=20, max_faulty_turns=faulty),
            )
            messages = [{"role": "system", "content": "You tell tides."}] if system else []
            result = runner.run(loop.run([*messages, QUESTION]))
            assert result.error is None, result.reason
            assert_exact(world, result.history)
            assert len(result.history.completions()) == result.api_calls

        try:
            examples()
        finally:
            runner.run(closing.aclose())


async def test_a_rollout_without_faults_is_one_sample() -> None:
    policy = ToolUser(turns=8, thinking=True, calls=2)
    async with stack(policy=policy.reply) as world:
        result = await loop_of(world).run([QUESTION])
        (sample,) = assert_exact(world, result.history)
        assert len(sample.spans) == result.turns_used == 9
        assert result.tokens.completion_tokens == sample.trained


async def test_ephemeral_messages_are_in_every_context_and_in_no_conversation() -> None:
    """The tokens are those of the context that the model was shown, ephemeral messages included."""
    policy = ToolUser(turns=4)
    async with stack(policy=policy.reply) as world:
        loop = loop_of(world, ephemeral_system_prompt="Be brief.", prefill_messages=PREFILL)
        result = await loop.run([QUESTION])
        (sample,) = assert_exact(world, result.history)
        text = world.text(sample.tokens)
        assert text.count("Be brief.") == text.count("Ahoy.") == 1
        assert not any("Be brief." in message["content"] for message in result.messages if message["content"])
        assert "Ahoy." not in world.text(token for token in sample.masks if token != MASKED)


async def test_a_retried_turn_shares_its_prompt_and_both_attempts_are_trained() -> None:
    policy = ToolUser(turns=5)
    async with stack(policy=policy.reply, faults={"cut_tool_call": [1, 3]}, vary=True) as world:
        result = await loop_of(world).run([QUESTION])
        found = assert_exact(world, result.history)
        assert len(found) == 3 and len(result.history.discarded) == 2
        assert [sample.spans[0].finish_reason for sample in found[1:]] == ["length", "length"]
        main = found[0]
        for other in found[1:]:
            start = other.spans[0].start
            assert other.tokens[:start] == main.tokens[:start]
            assert other.masks[:start] == [MASKED] * start


async def test_a_trainer_gets_the_path_that_earned_the_reward_and_not_a_longer_attempt_that_was_cut_off() -> None:
    cut = '<tool_call>\n{"name": "search", "arguments": {"query": "' + "tide " * 90
    script = Scripted(cut, '<tool_call>\n{"name": "search", "arguments": {"query": "tide"}}\n</tool_call>', "At noon.")
    async with stack(policy=script.reply) as world:
        won = await loop_of(world, max_tokens=64).run([QUESTION])
        lost = await loop_of(world, max_tokens=64).run([QUESTION])
        attempt = next(response for response in won.history.completions() if response.finish_reason == "length")
        assert attempt.tokens is not None and len(attempt.tokens) == 64
        group = build_group(
            [RolloutSamples("won", 1.0, won.samples("won")), RolloutSamples("lost", 0.0, lost.samples("lost"))],
            GroupSettings(group_size=2),
        )
        assert isinstance(group, TrainingGroup)
        assert [span.finish_reason for span in group.samples[0].spans] == ["tool_calls", "stop"]
        assert "At noon." in world.text(group.samples[0].tokens)
        assert group.undelivered == {"won": 64}


AT_MOST = """{%- for m in messages %}{% if m.tool_calls | default([], true) | length > MOST %}
{{- raise_exception('too many calls') }}{% endif %}{% endfor -%}"""


def taking(most: int) -> PromptBuilder:
    """Prompts of a template that takes so many calls in a turn."""
    tokenizer = fake_tokenizer()
    return PromptBuilder(tokenizer, chat_template=AT_MOST.replace("MOST", str(most)) + tokenizer.chat_template)


async def test_a_turn_that_the_template_cannot_show_is_the_models_doing_and_is_trained() -> None:
    """Two calls at once, where the template has room for one. A template that has none for any is nobody's lesson."""
    policy = ToolUser(turns=3, calls=2)
    async with stack(policy=policy.reply, prompts=taking(1)) as world:
        result = await loop_of(world).run([QUESTION])
        assert result.outcome is Outcome.MODEL_ERROR and "too many calls" in result.reason
        assert [message["role"] for message in result.messages] == ["user"]
        (sample,) = assert_exact(world, result.history)
        assert len(sample.spans) == 1
    async with stack(policy=policy.reply, prompts=taking(0)) as world:
        assert (await loop_of(world).run([QUESTION])).outcome is Outcome.INFRA_ERROR


async def test_a_model_that_continues_after_its_end_of_turn_is_rejected_with_the_reason() -> None:
    async with stack(policy=lambda ask: "At noon.", faults=["double_end_of_turn"]) as world:
        result = await loop_of(world).run([QUESTION])
        found = samples(result.history, rollout_id="r")
        assert [reason for sample in found for reason in verify(sample) if "after its end-of-turn" in reason]
        assert_exact(world, result.history, verifies=False)


async def test_many_rollouts_at_once_keep_their_tokens_apart() -> None:
    policy = ToolUser(turns=3, answer=RandomWords(Lengths(2, 8)))
    async with stack(policy=policy.reply, vary=True, latency=(0.0, 0.01)) as world:
        results = await asyncio.gather(*(loop_of(world).run([QUESTION]) for _ in range(24)))
        sampled = sum(world.sampled().values())
        assert sampled == sum(len(result.history.completions()) for result in results) == 24 * 4
        together = _All([result.history for result in results])
        assert_exact(world, together)


class _All:
    """Several rollouts as one."""

    def __init__(self, histories: Sequence[Any]) -> None:
        self.histories = histories

    def completions(self) -> list[Any]:
        return [response for history in self.histories for response in history.completions()]

    def ended_on(self) -> list[Any]:
        return []

    def replaced_attempts(self) -> list[Any]:
        return []

    def message_digests(self) -> dict[int, str]:
        return {}


@pytest.mark.slow
async def test_the_begun_part_of_a_completion_that_fails_is_counted() -> None:
    """Its tokens were sampled, and are in no message: the rollout that is played again reports them as lost."""
    faults = {"aborted": [0], "unavailable": range(1, 99)}
    async with stack(policy=RandomWords(Lengths(20, 21)), faults=faults, retry_after=0.001) as world:
        result = await loop_of(world).run([QUESTION])
        begun = [each for seen in list(world.fake.requests)[:1] for each in seen.completions]
        assert result.outcome is Outcome.INFRA_ERROR
        assert result.tokens.completion_tokens == sum(len(each.ids) for each in begun) > 0
