"""The policy server with the `openai` package as its client, and with tool-call formats of other models."""

from __future__ import annotations

import json

import openai
import pytest
from serving import serving
from test_policy_routes import ASK, CALL, WEATHER, template_ids

FORMATS = {
    "hermes": CALL,
    "llama3_json": '{"name": "weather", "parameters": {"city": "Köln"}}',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>",
    "pythonic": '[weather(city="Köln")]',
}


def client_of(it, **settings):
    return openai.AsyncOpenAI(base_url=it.server.base_url, **{"api_key": "any", "max_retries": 0, **settings})


@pytest.mark.parametrize("parser", FORMATS)
async def test_tool_calls_of_each_format_reach_the_client(parser):
    async with serving(FORMATS[parser], tool_call_parser=parser) as it, client_of(it) as client:
        asked = {"model": "policy", "tools": [WEATHER], "max_tokens": 200}
        answer = await client.chat.completions.create(messages=[ASK], **asked)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})
        assert not choice.message.content
        result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees, rain"}
        await client.chat.completions.create(messages=[ASK, choice.message, result], **asked)
        assert "12 degrees, rain" in it.sampler.codec.decode(it.sampler.calls[1]["prompt_ids"])


async def test_what_the_openai_client_reads():
    async with serving("Rain all day.", token="secret") as it:
        async with client_of(it, api_key="secret") as client:
            chat = await client.chat.completions.create(model="policy", messages=[ASK], n=2, logprobs=True, seed=1)
            assert [choice.message.content for choice in chat.choices] == ["Rain all day."] * 2
            ids = template_ids(it.sampler.codec.tokenizer, [ASK])
            assert chat.usage.prompt_tokens == len(ids)
            assert all(token.logprob <= 0 for choice in chat.choices for token in choice.logprobs.content)
            assert chat.system_fingerprint == "run:0"
            text = await client.completions.create(model="policy", prompt=ids, logprobs=0, max_tokens=3)
            assert (text.choices[0].finish_reason, len(text.choices[0].logprobs.token_logprobs)) == ("length", 3)
            assert [model.id for model in (await client.models.list()).data] == ["policy"]
            with pytest.raises(openai.NotFoundError, match="policy"):
                await client.chat.completions.create(model="other", messages=[ASK])
            with pytest.raises(openai.BadRequestError, match="stream"):
                await client.chat.completions.create(model="policy", messages=[ASK], stream=True)
        async with client_of(it, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="policy", messages=[ASK])
