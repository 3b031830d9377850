"""Streams at the wire: the completion is the one without a stream, and what breaks off is sampled again."""

from __future__ import annotations

import dataclasses
import json

import pytest
from aiohttp import web

from lachesis_client import OpenAIServer, Router, ServerUnavailable
from lachesis_client.streaming import AnswerStream, Delta
from lachesis_testing.scripted_server import ScriptedServer, call, say

ASK = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]


def events(*chunks, done=True):
    lines = [f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n" for chunk in chunks]
    return web.Response(text="".join([*lines, "data: [DONE]\n\n" if done else ""]), content_type="text/event-stream")


def piece(finish=None, **delta):
    return {"id": "1", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


async def streamed(script, **settings):
    """The answer to one streamed request, its pieces, and the requests."""
    deltas: list[Delta] = []
    async with (
        ScriptedServer(script) as server,
        Router([OpenAIServer(server.settings(first_retry_delay=0.01, **settings))]) as router,
    ):
        answer = await router.chat(ASK, tools=TOOLS, stream=AnswerStream(deltas.append))
    return answer, deltas, server.requests


@pytest.mark.parametrize(
    "message",
    [
        say("Hello, wörld \ud83d."),
        say("2", reasoning_content="1 + 1"),
        call(("python", {"code": "1"}), ("python", '{"code": "\\ud83d"}'), content="Look:"),
        call(("python", "not json")),
        say("cut", finish_reason="length"),
        say("", usage={"prompt_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 2}}),
    ],
)
async def test_a_stream_gives_the_completion_that_one_gets_without_it(message):
    async with ScriptedServer([message]) as server, Router([OpenAIServer(server.settings())]) as router:
        whole = await router.chat(ASK, tools=TOOLS)
    answer, deltas, (asked,) = await streamed([message])
    assert asked["stream"] is True and asked["stream_options"] == {"include_usage": True}
    same = {"latency": 0.0, "server": ""}
    assert dataclasses.replace(answer, **same) == dataclasses.replace(whole, **same)
    assert "".join(delta.text for delta in deltas if delta.kind == "text") == (whole.message.content or "")
    assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == (whole.message.reasoning or "")
    assert [delta.text for delta in deltas if delta.kind == "call"] == [each.name for each in whole.message.tool_calls]


async def test_pieces_are_joined_in_the_forms_that_servers_have():
    answer, deltas, _ = await streamed(
        lambda _: events(
            piece(role="assistant", content=""),
            piece(reasoning="Let me "),
            piece(reasoning="see.", content=None),
            piece(role="assistant", content="A" * 200_000),
            # Two calls of one index, as Gemini writes them, and a name in every piece.
            piece(tool_calls=[{"index": 0, "id": "a", "function": {"name": "python", "arguments": '{"code":'}}]),
            piece(tool_calls=[{"index": 0, "id": "a", "function": {"name": "python", "arguments": ' "1"}'}}]),
            piece(
                "tool_calls", tool_calls=[{"index": 0, "id": "b", "function": {"name": "python", "arguments": "{}"}}]
            ),
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
        )
    )
    message = answer.message
    assert (message.reasoning, len(message.text), answer.usage.prompt_tokens) == ("Let me see.", 200_000, 7)
    assert [(each.id, each.arguments) for each in message.tool_calls] == [("a", '{"code": "1"}'), ("b", "{}")]
    assert [delta.kind for delta in deltas] == ["reasoning", "reasoning", "text", "call", "call"]


@pytest.mark.parametrize(
    "broken",
    [
        [piece(content="Hel")],
        [piece(content="Hel"), "{"],
        [piece(content="Hel"), {"error": {"message": "overloaded", "code": 503}}],
        [piece(content="Hel"), piece("error")],
    ],
)
async def test_a_stream_that_breaks_off_is_sampled_again_and_its_pieces_are_void(broken):
    script = [lambda _: events(*broken, done=False), 500, say("Hello.")]
    answer, deltas, requests = await streamed(script)
    assert (answer.message.content, answer.attempts, len(requests)) == ("Hello.", 3, 3)
    assert [(delta.kind, delta.text) for delta in deltas] == [("text", "Hel"), ("restart", ""), ("text", "Hello.")]


async def test_a_server_that_only_breaks_off_is_unavailable():
    with pytest.raises(ServerUnavailable, match="broke off"):
        await streamed(lambda _: events(piece(content="Hel"), done=False), max_retries=1)


async def test_a_server_that_streams_nothing_is_read_at_the_end():
    body = {"choices": [{"message": {"content": "Whole."}, "finish_reason": "stop"}]}
    answer, deltas, _ = await streamed(lambda _: web.json_response(body))
    assert answer.message.content == "Whole." and deltas == [Delta("text", "Whole.")]
