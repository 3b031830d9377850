"""Whole rollouts with tool calls over the policy server, and versions that change in the middle of them."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from serving import serving

from lachesis.loop.loop import HermesAgentLoop
from lachesis.loop.outcome import Outcome
from lachesis_client import OpenAIServer, Router
from lachesis_client.sampling import Sampling
from lachesis_messages.tokens import MASKED
from lachesis_testing.engine_bench import until
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tools import ToolResult
from lachesis_train.policy import CurrentPolicy, PolicyVersion, Sampled

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK = [{"role": "user", "content": "How is the weather in Köln and in Lyon?"}]
CITIES = ("Köln", "Lyon")


def speaks(ask):
    """Two calls, then an answer."""
    if ask.turn < 2:
        return f'<tool_call>\n{{"name": "weather", "arguments": {{"city":  "{CITIES[ask.turn]}"}}}}\n</tool_call>'
    return "It rains in Köln. The sun shines in Lyon."


async def run_tools(calls):
    return [ToolResult(content=f"{call.arguments}: 12 degrees") for call in calls]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "atropos"])
async def test_the_samples_of_a_rollout_are_verified_and_what_the_sampler_sampled(kind):
    async with serving(speaks) as it:
        tokenizer = it.sampler.codec.tokenizer
        async with TokenServer([create_engine(kind, it.settings())], PromptBuilder(tokenizer), "hermes") as server:
            loop = HermesAgentLoop(server.for_rollout(), [TOOL], max_turns=5, max_tokens=200, execute=run_tools)
            result = await loop.run(ASK)
        assert result.outcome is Outcome.COMPLETED and result.turns_used == 3
        [sample] = samples(result.history, rollout_id="r", outcome="completed")
        assert verify(sample) == []
        assert [span.prompt_checked for span in sample.spans] == ["ids"] * 3
        for span, call in zip(sample.spans, it.sampler.calls, strict=True):
            assert sample.tokens[: span.start] == call["prompt_ids"]
            if kind != "atropos":  # that API has no field for it
                assert span.versions == (("run:0", 0, span.end - span.start),)
        trained = [place for place, mask in enumerate(sample.masks) if mask != MASKED]
        scores = it.sampler.model.score(sample.tokens[:1], sample.tokens[1:], Sampling(1))
        assert [sample.logprobs[place] for place in trained] == pytest.approx([scores[place - 1] for place in trained])


async def test_a_rollout_over_the_chat_route():
    async with serving(speaks) as it, Router([OpenAIServer(it.settings())]) as router:
        loop = HermesAgentLoop(router, [TOOL], max_turns=5, max_tokens=200, execute=run_tools)
        result = await loop.run(ASK)
        assert result.outcome is Outcome.COMPLETED and result.turns_used == 3
        calls = [call for message in result.messages for call in message.get("tool_calls") or ()]
        assert [call["function"]["arguments"] for call in calls] == ['{"city":  "Köln"}', '{"city":  "Lyon"}']
        answered = [message["tool_call_id"] for message in result.messages if message["role"] == "tool"]
        assert answered == [call["id"] for call in calls]


class Named:
    """A sampler each of whose tokens is the number of its version, and that samples as long as it is told to."""

    def __init__(self, number):
        self.number = number
        self.waiting = {}

    async def sample(self, prompt_ids, *, n, max_tokens, **_):
        go_on = self.waiting.setdefault(tuple(prompt_ids), asyncio.Event())
        await go_on.wait()
        return [Sampled([self.number] * max_tokens, [-0.5] * max_tokens, "length")] * n

    async def logprobs(self, ids):
        raise NotImplementedError


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_no_completion_has_tokens_of_two_versions_and_each_names_its_own(kind):
    """Weights are swapped while completions of several versions are in flight, which end in a random order."""
    rng, samplers = Random(7), [Named(number) for number in range(100, 106)]
    async with serving(sampler=samplers[0]) as it:
        engine = create_engine(kind, it.settings())
        asked = []
        for sampler in samplers:
            it.policy.publish(PolicyVersion(sampler.number, f"run:{sampler.number}", sampler))
            for _ in range(20):
                sampling = Sampling(1 + rng.randrange(30))
                asked.append(asyncio.create_task(engine.generate([5 + len(asked)], sampling, n=2)))
            await until(lambda: _is(len(sampler.waiting) == 20))  # noqa: B023
            in_flight = [event for each in samplers for event in each.waiting.values() if not event.is_set()]
            for event in in_flight if sampler is samplers[-1] else rng.sample(in_flight, 15):
                event.set()
        answers = await asyncio.gather(*asked)
        for number, answer in enumerate(answers):
            sampler = samplers[number // 20]
            for one in answer:
                assert set(one.ids) == {sampler.number}
                assert one.versions == ((f"run:{sampler.number}", 0, len(one.ids)),)
        await engine.close()


async def _is(value):
    return value


async def test_a_request_that_waits_for_a_place_is_sampled_from_the_version_of_then():
    old, new = Named(100), Named(101)
    async with serving(sampler=old, max_concurrency=1) as it:
        first = asyncio.create_task(it.ask("/v1/completions", {"prompt": [5]}))
        await until(lambda: _is(old.waiting))
        second = asyncio.create_task(it.ask("/v1/completions", {"prompt": [6]}))
        await until(lambda: _is(it.server.in_flight == 2))
        it.policy.publish(PolicyVersion(1, "run:1", new))
        old.waiting[5,].set()
        assert (await first).body["system_fingerprint"] == "run:0"
        await until(lambda: _is(new.waiting))
        new.waiting[6,].set()
        assert (await second).body["system_fingerprint"] == "run:1"


async def test_the_spans_of_a_rollout_have_the_versions_of_their_turns():
    async with serving(speaks) as it:

        async def swapping(calls):
            step = it.policy.current.step + 1
            it.policy.publish(PolicyVersion(step, f"run:{step}", it.sampler))
            return await run_tools(calls)

        prompts = PromptBuilder(it.sampler.codec.tokenizer)
        async with TokenServer([create_engine("vllm", it.settings())], prompts, "hermes") as server:
            loop = HermesAgentLoop(server.for_rollout(), [TOOL], max_tokens=200, execute=swapping)
            result = await loop.run(ASK)
        [sample] = samples(result.history, rollout_id="r", outcome="completed")
        assert verify(sample) == []
        assert [span.versions[0][0] for span in sample.spans] == ["run:0", "run:1", "run:2"]


def test_two_versions_of_one_name_are_refused():
    policy = CurrentPolicy(PolicyVersion(0, "run:0", Named(0)))
    with pytest.raises(ValueError, match="run:0"):
        policy.publish(PolicyVersion(1, "run:0", Named(1)))
    assert policy.current.step == 0
