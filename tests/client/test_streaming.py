"""Streams at the wire: the completion is the one without a stream, and what breaks off is sampled again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from itertools import pairwise
from uuid import uuid4

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


HABITS = {
    "as OpenAI": lambda number, first, name: {"index": number, **({"id": f"c{number}"} if first else {})},
    "no index": lambda number, first, name: {"id": f"c{number}"} if first else {},
    "one index": lambda number, first, name: {"index": 0, **({"id": f"c{number}"} if first else {"id": ""})},
    "one index, the id in every piece": lambda number, first, name: {"index": 0, "id": f"c{number}"},
    "no index, the id in every piece": lambda number, first, name: {"id": f"c{number}", "index": None},
    "no id": lambda number, first, name: {"index": number},
    "an id for every piece": lambda number, first, name: {"index": number, "id": str(uuid4())},
    "one id": lambda number, first, name: {"index": number, "id": "call"},
    "one index, no id": lambda number, first, name: {"index": 0, "id": ""},
    "no index, no id": lambda number, first, name: {},
    "one index, the name as the id": lambda number, first, name: {"index": 0, "id": name},
}
"""What servers write beside a piece of a call."""
MIXED = {"as OpenAI", "no id", "an id for every piece", "one id"} | {habit for habit in HABITS if "the id in" in habit}
"""In which the pieces of several calls may be mixed."""
TEXTS = st.text(st.sampled_from('a"{}[]\\, \n\ud800'), max_size=6)
ARGUMENTS = st.dictionaries(
    TEXTS, st.one_of(TEXTS, st.integers(), st.dictionaries(TEXTS, TEXTS, max_size=1)), max_size=2
)


@st.composite
def streams_of_calls(draw):
    """Calls, and the pieces in which a server gives them."""
    habit = draw(st.sampled_from(sorted(HABITS)))
    repeats = draw(st.booleans()) and habit != "an id for every piece"  # else nothing tells a call from a piece
    calls = draw(st.lists(st.tuples(st.sampled_from(["python", "look"]), ARGUMENTS.map(json.dumps)), max_size=4))
    queues = []
    for number, (name, arguments) in enumerate(calls):
        cuts = sorted(draw(st.lists(st.integers(0, len(arguments)), max_size=4)))
        if "name as the id" in habit:
            cuts = []
        elif repeats and "no id" in habit:  # a name after whole arguments is another call
            cuts = [cut for cut in cuts if cut < len(arguments)]
        parts = [arguments[start:end] for start, end in pairwise([0, *cuts, len(arguments)])]
        named = [{"name": name} if not at or repeats else {} for at in range(len(parts))]
        functions = [{**first, "arguments": part} for first, part in zip(named, parts, strict=True)]
        queues.append([{**HABITS[habit](number, not at, name), "function": each} for at, each in enumerate(functions)])
    order = [number for number, queue in enumerate(queues) for _ in queue]
    if habit in MIXED and draw(st.booleans()):
        rest = [number for at, number in enumerate(order) if order.index(number) != at]
        order = [*range(len(calls)), *draw(st.permutations(rest))]
    pieces = [queues[number].pop(0) for number in order]
    together = draw(st.booleans())
    return calls, [pieces] if together else [[each] for each in pieces]


def test_calls_are_read_from_the_pieces_of_every_server():
    sent = []
    with asyncio.Runner() as runner:
        server = ScriptedServer(lambda _: events(*sent, piece("tool_calls")))
        runner.run(server.__aenter__())
        router = Router([OpenAIServer(server.settings(first_retry_delay=0.01))])
        runner.run(router.__aenter__())

        @settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
        @given(streams_of_calls())
        def reads(stream):
            calls, deltas = stream
            sent[:] = [piece(content="Look:"), *(piece(tool_calls=delta) for delta in deltas)]
            said = []
            answer = runner.run(router.chat(ASK, tools=TOOLS, stream=AnswerStream(said.append)))
            assert [(each.name, each.arguments) for each in answer.message.tool_calls] == calls
            assert [delta.text for delta in said if delta.kind == "call"] == [name for name, _ in calls]

        try:
            reads()
        finally:
            runner.run(router.__aexit__(None, None, None))
            runner.run(server.__aexit__(None, None, None))


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
