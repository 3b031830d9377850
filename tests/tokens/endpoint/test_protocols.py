"""The other routes, asked with the openai and anthropic packages and with plain HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from lachesis.loop.outcome import Outcome
from lachesis_client import OpenAIServer, Router
from lachesis_testing.fake_server import FakeServer, Scripted
from lachesis_tokens.endpoint import Recording, RecordingEndpoint
from tests.support.exactness import Stack, assert_exact, stack

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CALL = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"path": "a.txt"}}\n</tool_call>'
SCRIPT = Scripted(CALL, "It says hello.", by_turn=True)


@asynccontextmanager
async def opened(world: Stack, **options: Any) -> AsyncIterator[Recording]:
    async with RecordingEndpoint(world.tokens, ping_interval=0.05) as endpoint:
        yield endpoint.open(**options)


def openai_of(recording: Recording) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{recording.base_url}/v1", api_key="none", max_retries=0)


async def post(recording: Recording, route: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(f"{recording.base_url}{route}", json=body)


# Responses

RESPONSES_TOOL: Any = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_responses_continue_by_items_and_by_id(stateful: bool, streams: bool) -> None:
    async with stack(policy=SCRIPT) as world, opened(world) as recording, openai_of(recording) as client:

        async def ask(**options: Any) -> Any:
            options = {"model": "m", "tools": [RESPONSES_TOOL], "instructions": "Be brief.", **options}
            if not streams:
                return await client.responses.create(**options)
            async with client.responses.stream(**options) as stream:
                return await stream.get_final_response()

        first = await ask(input="What does a.txt say?")
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        assert first.output[0].content[0].text == "I look."
        call = first.output[1]
        assert (call.name, json.loads(call.arguments)) == ("look", {"path": "a.txt"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "hello"}
        if stateful:
            second = await ask(input=[result], previous_response_id=first.id)
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            second = await ask(input=[{"role": "user", "content": "What does a.txt say?"}, *items, result])
        assert second.output_text == "It says hello." and second.status == "completed"
        assert second.usage and second.usage.output_tokens == len(recording.completions()[1].tokens or ())
        assert len(assert_exact(world, recording.history())) == 1


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("tools", [{"type": "web_search"}], 400),
        ("text", {"format": {"type": "json_object"}}, 400),
        ("truncation", "auto", 400),
        ("background", True, 400),
        ("previous_response_id", "resp_none", 404),
        ("input", [{"type": "item_reference", "id": "x"}], 400),
    ],
)
async def test_what_responses_cannot_honour_is_refused_by_name(field: str, value: Any, status: int) -> None:
    async with stack() as world, opened(world) as recording, openai_of(recording) as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.responses.create(**{"model": "m", "input": "?", field: value})
        assert raised.value.status_code == status and raised.value.body["param"] == field  # type: ignore[index,call-overload]


# Anthropic

TOOL: Any = {"name": "look", "description": "Look at a file.", "input_schema": PARAMETERS}


@pytest.mark.parametrize("streams", [False, True])
async def test_messages_continue_with_the_exact_tokens(streams: bool) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    async with (
        stack(policy=SCRIPT) as world,
        opened(world) as recording,
        anthropic.AsyncAnthropic(base_url=recording.base_url, api_key="none", max_retries=0) as client,
    ):

        async def ask(messages: list[Any]) -> Any:
            options: Any = {"model": "m", "max_tokens": 500, "messages": messages, "tools": [TOOL]}
            options["system"] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
            if not streams:
                return await client.messages.create(**options)
            async with client.messages.stream(**options) as stream:
                return await stream.get_final_message()

        question: Any = {"role": "user", "content": "What does a.txt say?"}
        first = await ask([question])
        assert [block.type for block in first.content] == ["thinking", "tool_use"]
        assert first.stop_reason == "tool_use" and first.content[1].input == {"path": "a.txt"}
        content = [block.model_dump(exclude_none=True) for block in first.content]
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "hello", "is_error": False}
        answered = {"role": "user", "content": [result]}
        second = await ask([question, {"role": "assistant", "content": content}, answered])
        assert second.content[0].text == "It says hello." and second.stop_reason == "end_turn"
        assert second.usage.output_tokens == len(recording.completions()[1].tokens or ())
        assert len(assert_exact(world, recording.history())) == 1
        count = await client.messages.count_tokens(model="m", messages=[question])
        assert 0 < count.input_tokens < first.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="web_search"):
            await client.messages.create(
                model="m", max_tokens=5, messages=[question], tools=[{"type": "web_search_20250305", "name": "w"}]
            )


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 10**29 + 1])
async def test_arguments_may_have_numbers_beyond_64_bits(number: int) -> None:
    call = f'<tool_call>\n{{"name": "look", "arguments": {{"at": {number}}}}}\n</tool_call>'
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    async with stack(policy=Scripted(call, "Done.", by_turn=True)) as world, opened(world) as recording:
        talk: list[Any] = [{"role": "user", "content": "?"}]
        for _ in range(2):
            sent = {"max_tokens": 200, "tools": tools, "messages": talk}
            async with httpx.AsyncClient(timeout=20) as client:
                answer = await client.post(f"{recording.base_url}/v1/messages", content=json.dumps(sent))
            talk.append({"role": "assistant", "content": answer.json()["content"]})
            done = {"type": "tool_result", "tool_use_id": talk[1]["content"][0]["id"], "content": "It is."}
            talk.append({"role": "user", "content": [done]})
        assert talk[1]["content"][0]["input"] == {"at": number}
        assert len(assert_exact(world, recording.history())) == 1


async def test_messages_have_anthropics_form() -> None:
    async with stack(policy=SCRIPT) as world, opened(world) as recording:
        question = {"role": "user", "content": [{"type": "text", "text": "?"}]}
        body = {"model": "m", "max_tokens": 500, "messages": [question], "tools": [TOOL]}
        first = (await post(recording, "/v1/messages", body)).json()
        assert first["type"] == "message" and first["stop_reason"] == "tool_use"
        thinking, call = first["content"]
        assert thinking["thinking"] == "I look." and call["input"] == {"path": "a.txt"}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "hello"}]}
        body["messages"] = [question, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        text = (await post(recording, "/v1/messages", {**body, "stream": True})).text
        named = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
        events = [name for name in named if name != "ping"]  # a machine under load sends some
        assert events == [
            *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
            *("message_delta", "message_stop"),
        ]
        assert len(assert_exact(world, recording.history())) == 1
        refused = await post(recording, "/v1/messages", {"model": "m", "messages": [question]})
        assert refused.status_code == 400
        assert refused.json()["error"] == {"type": "invalid_request_error", "message": "max_tokens: Field required"}


async def test_a_full_context_has_anthropics_words() -> None:
    async with stack(context_length=64) as world, opened(world) as recording:
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "word " * 99}]}
        answer = (await post(recording, "/v1/messages", body)).json()
        assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].startswith("prompt is too long")


async def test_a_stop_sequence_is_named() -> None:
    async with stack(policy=Scripted("one STOP two")) as world, opened(world) as recording:
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "?"}], "stop_sequences": ["END", "STOP"]}
        answer = (await post(recording, "/v1/messages", body)).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")


# Text


async def test_a_text_continues_from_the_tokens_of_the_one_before() -> None:
    async with stack(policy=Scripted("It is")) as world, opened(world) as recording, openai_of(recording) as client:
        first = await client.completions.create(model="m", prompt="The sky. ", max_tokens=2, logprobs=1)
        assert first.choices[0].logprobs and len(first.choices[0].logprobs.token_logprobs or ()) == 2
        text = "The sky. " + first.choices[0].text
        stream = await client.completions.create(model="m", prompt=text + " blue.", max_tokens=2, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream])
        two = await client.completions.create(model="m", prompt=["One", "Two"], n=2)
        assert len(two.choices) == 4
        history = recording.history()
        found = assert_exact(world, history)
        assert max(len(sample.spans) for sample in found) == 2 and len(history.completions()) == 6
        with pytest.raises(openai.BadRequestError, match="echo"):
            await client.completions.create(model="m", prompt="?", echo=True)


async def test_token_ids_continue_from_the_tokens_of_the_ones_before() -> None:
    async with stack(policy=Scripted("It is")) as world, opened(world) as recording:
        ids = world.tokens.prompts.encode("The sky.")
        body: Any = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "top_k": -1}, "return_logprob": True}
        first = (await post(recording, "/generate", body)).json()
        assert [entry[1] for entry in first["meta_info"]["output_token_logprobs"]] == first["output_ids"]
        assert first["meta_info"]["finish_reason"]["type"] == "length"
        body = {**body, "input_ids": [*ids, *first["output_ids"], *world.tokens.prompts.encode(" Now")]}
        second = (await post(recording, "/generate", {**body, "stream": True})).text
        assert second.startswith("data: ") and second.endswith("data: [DONE]\n\n")
        body["sampling_params"] = {"n": 2}
        assert len((await post(recording, "/generate", body)).json()) == 2
        refused = await post(recording, "/generate", {**body, "sampling_params": {"regex": "a+"}})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "regex"
        assert max(len(sample.spans) for sample in assert_exact(world, recording.history())) == 2


async def test_texts_are_passed_on_in_phase_1() -> None:
    async with (
        FakeServer(Scripted("Hello.")) as fake,
        Router([OpenAIServer(fake.settings())]) as router,
        RecordingEndpoint(router) as endpoint,
    ):
        recording = endpoint.open()
        async with openai_of(recording) as client:
            said = await client.completions.create(model="m", prompt="Say hello.")
        assert said.choices[0].text == "Hello."
        result = recording.result(Outcome.COMPLETED, "ended")
        assert result.final_response == "Hello." and result.tokens.completion_tokens
        refused = await post(recording, "/generate", {"text": "?"})
        assert refused.status_code == 400 and "logprobs" in refused.json()["error"]["message"]


async def test_cached_tokens_of_a_program_are_counted_as_those_of_the_loop() -> None:
    async with (
        FakeServer(Scripted("Hello."), prefix_cache=10_000) as fake,
        Router([OpenAIServer(fake.settings())]) as router,
        RecordingEndpoint(router) as endpoint,
    ):
        recording = endpoint.open()
        async with openai_of(recording) as client:
            for _ in range(2):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Say it. " * 50}])
        cached = [response.usage.cached_tokens or 0 for response in recording.completions()]
        assert cached[1] > 0
        assert recording.result(Outcome.COMPLETED, "ended").tokens.cached_tokens == sum(cached)
