"""The chat route, asked with the openai package over a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
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

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
CALL = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"path": "a.txt"}}\n</tool_call>'


@asynccontextmanager
async def opened(world: Stack, **options: Any) -> AsyncIterator[tuple[Recording, AsyncOpenAI]]:
    async with RecordingEndpoint(world.tokens, ping_interval=0.05) as endpoint:
        recording = endpoint.open(**options)
        async with AsyncOpenAI(base_url=f"{recording.base_url}/v1", api_key="none", max_retries=0) as client:
            yield recording, client


async def test_a_conversation_with_calls_is_one_sample_with_the_exact_tokens() -> None:
    async with stack(policy=Scripted(CALL, "It says hello.", by_turn=True)) as world, opened(world) as (rec, client):
        messages: list[Any] = [{"role": "user", "content": "What does a.txt say?"}]
        first = (await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.tool_calls
        assert first.message.model_extra == {"reasoning_content": "I look."}
        call = first.message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"path": "a.txt"})
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "hello"}]
        second = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It says hello."
        assert second.usage and second.usage.completion_tokens == len(rec.completions()[1].tokens or ())
        assert len(assert_exact(world, rec.history())) == 1
        result = rec.result(Outcome.COMPLETED, "the program ended")
        assert [message["role"] for message in result.messages] == ["user", "assistant", "tool", "assistant"]
        assert (result.final_response, result.turns_used, result.api_calls) == ("It says hello.", 2, 2)


async def test_a_stream_has_the_parts_of_the_whole_answer() -> None:
    async with stack(policy=Scripted(CALL)) as world, opened(world) as (rec, client):
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "?"}],
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert "".join(call.function.arguments or "" for call in calls if call.function) == '{"path": "a.txt"}'
        assert [call.id for call in calls if call.id] == [rec.completions()[0].message.tool_calls[0].id]
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage and chunks[-1].usage.total_tokens > 0 and not chunks[-1].choices
        assert_exact(world, rec.history())


async def test_a_stream_that_waits_shows_signs_of_life() -> None:
    async with stack(policy=Scripted("Late."), latency=0.2) as world, opened(world) as (rec, _):
        body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True}
        async with httpx.AsyncClient() as client:
            text = (await client.post(f"{rec.base_url}/v1/chat/completions", json=body)).text
        assert text.startswith(": waiting") and '"Late."' in text and text.endswith("data: [DONE]\n\n")


async def test_the_key_in_a_header_finds_the_rollout() -> None:
    async with stack(policy=Scripted("Hi.")) as world, RecordingEndpoint(world.tokens) as endpoint:
        one, other = endpoint.open(), endpoint.open()
        url = f"http://127.0.0.1:{endpoint.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key=other.key, max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
            assert [model.id async for model in client.models.list()] == ["fake"]
        assert (len(one.completions()), len(other.completions())) == (0, 1)
        async with AsyncOpenAI(base_url=url, api_key="sk-other", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="no rollout"):
                await client.models.list()
        await other.close()
        async with AsyncOpenAI(base_url=url, api_key=other.key, max_retries=0) as client:
            with pytest.raises(openai.APIStatusError, match="over") as raised:
                await client.models.list()
            assert raised.value.status_code == 410


async def test_the_run_decides_the_sampling_and_the_client_the_end() -> None:
    async with stack(policy=Scripted("one two STOP three")) as world:
        async with opened(world, temperature=0.7, max_tokens=50, extra_body={"top_p": 0.9}) as (rec, client):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "?"}], temperature=0, top_p=0.1, stop=["STOP"]
            )
            said = rec.completions()[0]
            assert said.message.text == "one two "
            assert [said.sampling[name] for name in ("temperature", "top_p", "max_tokens")] == [0.7, 0.9, 50]
            assert rec.overruled == {"temperature", "top_p"}
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "?"}], max_completion_tokens=3
            )
            assert len(rec.completions()[1].tokens or ()) == 3
        async with opened(world, client_sampling=True) as (rec, client):
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "?"}], temperature=0.3
            )
            assert rec.completions()[0].sampling["temperature"] == 0.3 and not rec.overruled


@pytest.mark.parametrize(
    ("field", "value"),
    [("response_format", {"type": "json_object"}), ("logit_bias", {"5": 1}), ("top_logprobs", 3), ("guided", "x")],
)
async def test_what_would_change_the_sampling_is_refused_by_name(field: str, value: Any) -> None:
    async with stack() as world, opened(world) as (rec, client):
        with pytest.raises(openai.BadRequestError, match=field) as raised:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "?"}], extra_body={field: value}
            )
        assert raised.value.param == field
        assert not rec.completions() and rec.refused and rec.error is None


async def test_a_full_context_is_an_error_that_clients_know() -> None:
    async with stack(context_length=64) as world, opened(world) as (rec, client):
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 99}])
        assert raised.value.code == "context_length_exceeded"
        assert rec.limit and rec.error is None


async def test_a_failure_of_the_model_server_leaves_the_rollout_without_a_score() -> None:
    async with stack(policy=Scripted("Hi."), faults={"server_error": 1.0}) as world, opened(world) as (rec, client):
        engine = world.tokens.servers[0]
        engine.settings = replace(engine.settings, max_retries=1)
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        assert raised.value.status_code == 503 and raised.value.response.headers["retry-after"] == "1"
        result = rec.result(Outcome.COMPLETED, "ended")
        assert result.outcome is Outcome.INFRA_ERROR and result.error is rec.error is not None


async def test_a_program_that_loops_meets_the_limit() -> None:
    async with stack(policy=Scripted("Again.")) as world, opened(world, max_requests=2) as (rec, client):
        with pytest.raises(openai.PermissionDeniedError, match="limit of 2 requests"):
            for _ in range(3):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        assert len(rec.completions()) == 2 and rec.limit


async def test_an_openai_server_answers_in_phase_1() -> None:
    async with (
        FakeServer(Scripted("Hello.")) as fake,
        Router([OpenAIServer(fake.settings())]) as router,
        RecordingEndpoint(router) as endpoint,
    ):
        recording = endpoint.open()
        async with AsyncOpenAI(base_url=f"{recording.base_url}/v1", api_key="none") as client:
            said = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}], n=2)
        assert [choice.message.content for choice in said.choices] == ["Hello.", "Hello."]
        result = recording.result(Outcome.COMPLETED, "ended")
        assert result.final_response == "Hello." and not result.tracked
        assert result.samples() == [] and result.api_calls == 2
