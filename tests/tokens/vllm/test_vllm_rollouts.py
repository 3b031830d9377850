"""Whole rollouts against a real vLLM: a trainer gets what the model sampled, after the prompts it sampled from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from real_vllm import END_OF_TURN, ROUNDING, RealVLLM, difference, forward_pass

from lachesis_client.sampling import Sampling
from lachesis_messages.history import MessageHistory
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_tokens.server.token_server import TokenServer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(params=["vllm", "vllm-generate"])
async def server(raw: RealVLLM, tokenizer: Any, request: pytest.FixtureRequest) -> AsyncIterator[TokenServer]:
    engine = create_engine(request.param, raw.settings())
    yield TokenServer([engine], PromptBuilder(tokenizer), "hermes")
    await engine.close()


async def test_samples_of_a_rollout_that_branches(server: TokenServer, tokenizer: Any) -> None:
    """Turns that end and turns that are cut, a forced call, an edit, a retry and n > 1."""
    managed = server.for_rollout()
    history = MessageHistory([{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hello!"}])
    history.append(await managed.chat(history, tools=TOOLS, max_tokens=60, temperature=1.0))
    history.append({"role": "user", "content": "What is the weather in Köln? 🌧"})
    for discarded in await managed.chat_n(history, 2, sampling=Sampling(max_tokens=12), tools=TOOLS):
        history.branch(discarded, "another attempt")
    history.append(await managed.chat(history, tools=TOOLS, tool_choice="required", max_tokens=40, temperature=1.0))
    called = history[-1].get("tool_calls")
    if called:
        history.append({"role": "tool", "tool_call_id": called[0]["id"], "content": "12 degrees, rain"})
    else:
        history.append({"role": "user", "content": "12 degrees, rain"})
    history.append(await managed.chat(history, tools=TOOLS, max_tokens=5, temperature=1.0))  # most likely cut
    history.append({"role": "user", "content": "Go on."})
    history.append(await managed.chat(history, tools=TOOLS, max_tokens=30, temperature=1.0))
    history[2]["content"] = "Hi."  # all later messages are context
    history.append({"role": "user", "content": "Thank you."})
    history.append(await managed.chat(history, tools=TOOLS, max_tokens=30, temperature=1.0))

    completions = history.completions()
    assert len(completions) == 7
    found = samples(history, rollout_id="rollout", outcome="completed")
    assert sum(sample.trained for sample in found) == sum(len(response.tokens or ()) for response in completions)
    for sample in found:
        assert verify(sample) == []
        assert all((mask == token) == (logprob <= 0) for token, mask, logprob in zip_all(sample))
    computed = forward_pass([(sample.tokens[:1], sample.tokens[1:]) for sample in found])
    trained = [
        [value for value, mask in zip([0.0, *logprobs], sample.masks, strict=True) if mask != -100]
        for sample, logprobs in zip(found, computed, strict=True)
    ]
    gap = difference([[p for p in sample.logprobs if p != 1.0] for sample in found], trained)
    print(f"{len(found)} samples of {sum(len(sample.tokens) for sample in found)} tokens: {gap}")
    assert gap.largest < ROUNDING
    for sample in found:
        text = tokenizer.decode(sample.tokens)
        assert "<|im_end|><|im_end|>" not in text
        assert "<|im_end|>\n<|im_start|>" in text


async def test_a_cut_turn_is_closed_by_the_next_prompt(server: TokenServer) -> None:
    managed = server.for_rollout()
    history = MessageHistory([{"role": "user", "content": "Write a long poem about rivers."}])
    first = await managed.chat(history, max_tokens=8)
    assert first.tokens is not None
    assert first.tokens.ids[-1] != END_OF_TURN
    history.append(first)
    history.append({"role": "user", "content": "Enough."})
    second = await managed.chat(history, max_tokens=8)
    assert second.tokens is not None
    assert second.tokens.prompt.parent is first.tokens.after
    assert second.tokens.prompt.own_ids[0] == END_OF_TURN
    (sample,) = samples(managed)
    assert sample.masks[first.tokens.after.length] == -100


def zip_all(sample: Any) -> Any:
    return zip(sample.tokens, sample.masks, sample.logprobs, strict=True)
