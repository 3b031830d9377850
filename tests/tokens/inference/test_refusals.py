"""A server refuses one conversation, or everybody; it answers with nothing, or breaks off; it asks for a pause."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web

from backends.retry_after import retry_after
from lachesis_client import BadResponse, OpenAIServer, RequestRejected, Router, ServerUnavailable, Unauthorized
from lachesis_client.errors import ConversationRefused, NothingThere
from lachesis_client.http_attempts import retry_delay
from lachesis_client.sampling import Sampling
from lachesis_client.server_words import REFUSING
from lachesis_messages.messages import FinishReason
from lachesis_tokens.engines import create_engine
from tests.support.completions import completion

Serve = Callable[..., Awaitable[OpenAIServer]]
ASK = [{"role": "user", "content": "hello"}]
FLAGGED = [{"role": "user", "content": "the flagged one"}]
TEXT = {
    "id": "c",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": "ab",
            "finish_reason": "stop",
            "prompt_token_ids": [5],
            "token_ids": [9, 2],
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
        }
    ],
}


def moderated(status: int, said: Any = "no") -> tuple[Callable[[web.Request], Awaitable[web.Response]], Counter[str]]:
    """Answers every conversation but the flagged one, of either phase."""
    asked: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        if "flagged" in json.dumps(body) or body.get("prompt") == [5, 6, 7]:
            asked["flagged"] += 1
            return web.json_response({"error": {"message": said}}, status=status)
        asked["other"] += 1
        if "prompt" not in body:
            return web.json_response(completion())
        shown = [{**TEXT["choices"][0], "prompt_token_ids": body["prompt"]}]  # type: ignore[index]
        return web.json_response({**TEXT, "choices": shown})

    return answer, asked


@pytest.mark.parametrize("status", sorted(REFUSING))
@pytest.mark.parametrize("answered_before", [True, False])
async def test_a_refusal_of_one_conversation_is_told_from_one_of_all(
    serve: Serve, status: int, answered_before: bool
) -> None:
    answer, asked = moderated(status)
    server = await serve(answer)
    if answered_before:
        await server.chat(ASK)
    with pytest.raises(ConversationRefused, match=rf"with {status}: no; other conversations are answered"):
        await server.chat(FLAGGED)
    assert asked == {"flagged": 1, "other": 1 + answered_before}
    assert (await server.chat(ASK)).message.text == "hi"


async def test_answers_to_others_meanwhile_are_evidence_enough(serve: Serve) -> None:
    answer, asked = moderated(403)
    answered = asyncio.Event()

    async def slowly(request: web.Request) -> web.Response:
        if "flagged" in await request.text():
            await answered.wait()
        return await answer(request)

    server = await serve(slowly)
    refused = asyncio.create_task(server.chat(FLAGGED))
    await asyncio.sleep(0.05)
    await server.chat(ASK)
    answered.set()
    with pytest.raises(ConversationRefused):
        await refused
    assert asked == {"flagged": 1, "other": 1}


@pytest.mark.parametrize(("status", "kind"), [(403, Unauthorized), (404, NothingThere), (451, RequestRejected)])
async def test_a_server_that_answers_nobody_refuses_the_key_or_the_model(
    serve: Serve, status: int, kind: type[RequestRejected]
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({}, status=status)

    with pytest.raises(RequestRejected) as caught:
        await (await serve(refuse)).chat(ASK)
    assert type(caught.value) is kind


async def test_a_server_that_stops_answering_everybody_is_unavailable_and_no_conversation_refused(serve: Serve) -> None:
    revoked = False

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({}, status=403) if revoked else web.json_response(completion())

    server = await serve(answer)
    await server.chat(ASK)
    revoked = True
    with pytest.raises(ServerUnavailable, match="refuses every request now"):
        await server.chat(ASK)


async def test_words_about_what_was_said_need_no_other_evidence(serve: Serve) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "flagged by our moderation"}}, status=403)

    with pytest.raises(ConversationRefused):
        await (await serve(refuse)).chat(ASK)


async def test_a_refusal_under_a_200_is_the_same(serve: Serve) -> None:
    bodies: list[dict[str, Any]] = [
        {"error": {"code": 403, "message": "Your input was flagged"}},
        {"error": {"code": "content_filter", "message": "blocked"}},
        {"choices": [], "promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}},
        {"choices": None, "prompt_feedback": {"block_reason": "SAFETY"}},
    ]
    for body in bodies:

        async def refuse(_: web.Request, body: dict[str, Any] = body) -> web.Response:
            return web.json_response(body)

        with pytest.raises(ConversationRefused):
            await (await serve(refuse)).chat(ASK)


@pytest.mark.parametrize("status", sorted(REFUSING))
async def test_token_engines_tell_the_two_apart_as_well(serve: Serve, status: int) -> None:
    answer, asked = moderated(status)
    engine = create_engine("vllm", (await serve(answer)).settings)
    with pytest.raises(ConversationRefused):
        await engine.generate([5, 6, 7], Sampling(max_tokens=4))
    [one] = await engine.generate([5], Sampling(max_tokens=4))
    await engine.close()
    assert (list(one.ids), asked) == ([9, 2], {"flagged": 1, "other": 2})


async def _cut(request: web.Request) -> web.Response:
    return web.Response(body=b'{"id": "c", "choices": [{"index": 0, "mess', content_type="application/json")


def _answers(body: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


NOTHING = {
    "cut JSON": _cut,
    "no bytes": lambda _: asyncio.sleep(0, web.Response(body=b"", content_type="application/json")),
    "no choices": _answers({"choices": []}),
    "null": _answers({"choices": None}),
    "no key": _answers({"id": "c"}),
    "no message": _answers({"choices": [{"index": 0, "finish_reason": "stop"}]}),
    "a null message": _answers({"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]}),
    "network_error": _answers(completion(content="half", finish_reason="network_error")),
    "insufficient_system_resource": _answers(completion(content="half", finish_reason="insufficient_system_resource")),
    "a word of tomorrow": _answers(completion(content="half", finish_reason="shard_rebalanced")),
}


@pytest.mark.parametrize("what", NOTHING)
async def test_an_answer_without_a_whole_completion_is_asked_for_again(serve: Serve, what: str) -> None:
    count = 0

    async def answer(request: web.Request) -> Any:
        nonlocal count
        count += 1
        return await (NOTHING[what](request) if count < 3 else _answers(completion())(request))

    server = await serve(answer, first_retry_delay=0.001)
    response = await server.chat(ASK)
    assert (response.message.text, response.attempts) == ("hi", 3)


@pytest.mark.parametrize("what", NOTHING)
async def test_one_that_never_comes_whole_is_a_failure_of_the_server(serve: Serve, what: str) -> None:
    server = await serve(NOTHING[what], first_retry_delay=0.001, max_retries=2)
    with pytest.raises((BadResponse, ServerUnavailable)) as caught:
        await server.chat(ASK)
    assert caught.value.__cause__ is not caught.value


async def test_a_page_of_another_service_is_no_answer_that_may_come_whole(serve: Serve) -> None:
    count = 0

    async def page(_: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return web.Response(text="<html>Welcome</html>", content_type="text/html")

    with pytest.raises(BadResponse, match="no JSON object"):
        await (await serve(page)).chat(ASK)
    assert count == 1


async def test_a_refusal_in_words_keeps_its_text_and_is_marked(serve: Serve) -> None:
    sorry = "I cannot help with that."
    parts = [{"type": "refusal", "refusal": sorry}]
    for message in ({"content": None, "refusal": sorry}, {"content": parts}):
        response = await (await serve(_answers(completion(**message)))).chat(ASK)
        assert (response.message.text, response.refusal, response.finish_reason) == (sorry, True, FinishReason.STOP)
    plain = await (await serve(_answers(completion(refusal=None)))).chat(ASK)
    assert not plain.refusal


@pytest.mark.parametrize("native", ["MALFORMED_FUNCTION_CALL", "content_filter", "length"])
async def test_the_word_of_the_provider_counts_where_the_router_says_error(serve: Serve, native: str) -> None:
    body = completion(finish_reason="error")
    body["choices"][0]["native_finish_reason"] = native
    assert (await (await serve(_answers(body))).chat(ASK)).raw_finish_reason == native


@pytest.mark.parametrize(
    "header",
    [
        "0",
        "-5",
        "nan",
        "inf",
        "-inf",
        "",
        "soon",
        "0.0",
        formatdate(0, usegmt=True),
        "Wed, 21 Oct 2015 07:28:00",
        "1e999",
    ],
)
def test_a_pause_that_is_none_keeps_the_clients_own(header: str) -> None:
    assert retry_after(header) is None
    assert retry_after(None) is None


def test_a_pause_is_at_least_as_long_as_asked_and_as_the_clients_own() -> None:
    assert retry_delay(1, 7.0) >= 7.0
    assert retry_delay(6, 0.1) >= 8.0
    assert (retry_after(formatdate(time.time() + 60, usegmt=True)) or 0) > 0
    assert retry_after("Wed, 21 Oct 2037 07:28:00 GMT") is None and retry_after("1e9") is None
    assert retry_after(str(int(time.time()) + 9)) == pytest.approx(9, abs=2)
    server_clock = formatdate(time.time() - 3600, usegmt=True)
    assert retry_after(formatdate(time.time() - 3595, usegmt=True), server_clock) == pytest.approx(5, abs=1)
    assert retry_after("2.5") == 2.5


async def test_calls_of_atropos_environments_are_refused_alike(serve: Serve) -> None:
    answer, asked = moderated(403)
    async with Router([await serve(answer)]) as router:
        with pytest.raises(ConversationRefused):
            await router.chat_completion(messages=FLAGGED)
        with pytest.raises(ConversationRefused):
            await router.completion(prompt="the flagged one")
    assert asked["flagged"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [], "error": {"code": 403, "message": "Your input was flagged"}},
        {"choices": [{"error": {"code": 403, "message": "flagged by moderation"}, "finish_reason": "error"}]},
        {"choices": None, "base_resp": {"status_code": 1026, "status_msg": "input new_sensitive"}},
    ],
)
async def test_an_error_beside_choices_is_that_error(serve: Serve, body: dict[str, Any]) -> None:
    with pytest.raises(ConversationRefused):
        await (await serve(_answers(body))).chat(ASK)


@pytest.mark.parametrize(
    "error", [{"code": 502, "message": "disconnected"}, {"message": "overloaded", "type": "server_error"}]
)
async def test_half_an_answer_with_an_error_is_asked_for_again(serve: Serve, error: dict[str, Any]) -> None:
    whole, count = completion(), 0

    async def answer(request: web.Request) -> Any:
        nonlocal count
        count += 1
        broken = {**whole, "choices": [{**whole["choices"][0], "error": error}]}
        return await _answers({**whole, "error": error} if count == 1 else broken if count == 2 else whole)(request)

    response = await (await serve(answer, first_retry_delay=0.001)).chat(ASK)
    assert response.attempts == 3


@pytest.mark.parametrize("error", [None, "", {}, {"code": 0, "message": "success"}])
async def test_an_error_that_is_none_beside_an_answer_changes_nothing(serve: Serve, error: Any) -> None:
    assert (await (await serve(_answers({**completion(), "error": error}))).chat(ASK)).attempts == 1


@pytest.mark.parametrize("choice", [{"message": None}, {}])
async def test_a_filter_that_left_no_message_is_a_refusal_and_no_failure(serve: Serve, choice: dict[str, Any]) -> None:
    body = {"choices": [{"index": 0, "finish_reason": "content_filter: SAFETY", **choice}]}
    assert (await (await serve(_answers(body))).chat(ASK)).finish_reason is FinishReason.CONTENT_FILTER


@pytest.mark.parametrize(
    ("status", "message"), [(403, "Rate limit exceeded"), (400, "The engine is currently overloaded, try again later")]
)
async def test_words_of_a_pause_are_a_pause_under_any_status(serve: Serve, status: int, message: str) -> None:
    count = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        said = {"error": {"message": message}}
        return web.json_response(said, status=status) if count == 1 else web.json_response(completion())

    assert (await (await serve(answer, first_retry_delay=0.001)).chat(ASK)).attempts == 2


async def test_a_key_that_is_refused_once_while_others_are_answered_is_asked_with_again(serve: Serve) -> None:
    answer, asked = moderated(401)
    server = await serve(answer, first_retry_delay=0.001, max_retries=2)
    await server.chat(ASK)
    with pytest.raises(ServerUnavailable):
        await server.chat(FLAGGED)
    assert asked["flagged"] == 3


@pytest.mark.parametrize("continues", [True, False])
async def test_a_400_that_names_nothing_is_of_what_was_said_where_others_go_on(serve: Serve, continues: bool) -> None:
    answer, _ = moderated(400, "Bad Request")
    server = await serve(answer)
    later = [*ASK, {"role": "assistant", "content": "yes"}, *ASK]
    if continues:
        await server.chat(later)
    with pytest.raises(ConversationRefused if continues else RequestRejected) as caught:
        await server.chat([*later[:-1], *FLAGGED])
    assert isinstance(caught.value, ConversationRefused) is continues


async def test_a_404_for_tools_of_everybody_is_no_refusal_of_a_conversation(serve: Serve) -> None:
    async def answer(request: web.Request) -> web.Response:
        with_tools = "tools" in await request.json()
        return web.json_response({}, status=404) if with_tools else web.json_response(completion())

    tool = {"type": "function", "function": {"name": "t", "parameters": {}}}
    with pytest.raises(NothingThere):
        await (await serve(answer)).chat(ASK, tools=[tool])


TODO = {"name": "todo", "arguments": "{}"}
CALLS = {
    "the retired field": {"content": None, "function_call": TODO},
    "an object": {"content": None, "tool_calls": {"id": "c", "function": TODO}},
    "a text": {"content": None, "tool_calls": json.dumps([{"id": "c", "function": TODO}])},
    "flat": {"content": None, "tool_calls": [{"id": "c", **TODO}]},
    "a part": {"content": [{"type": "tool_use", "id": "c", "name": "todo", "input": {}}]},
    "a list as arguments": {"content": None, "tool_calls": [{"id": "c", "function": {**TODO, "arguments": []}}]},
}


@pytest.mark.parametrize("form", CALLS)
async def test_a_call_in_another_form_is_a_call(serve: Serve, form: str) -> None:
    body = {"choices": [{"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", **CALLS[form]}}]}
    (call,) = (await (await serve(_answers(body))).chat(ASK)).message.tool_calls
    assert (call.name, call.arguments) == ("todo", "{}")


THOUGHTS = {
    "an object": {"reasoning": {"content": "six"}, "content": "42"},
    "a list": {"reasoning_content": [{"type": "text", "text": "six"}], "content": "42"},
    "blocks": {"thinking_blocks": [{"type": "thinking", "thinking": "six"}], "content": "42"},
    "thinking": {"thinking": "six", "content": "42"},
    "a part": {"content": [{"type": "reasoning_text", "text": "six"}, {"type": "text", "text": "42"}]},
    "a marked part": {"content": [{"type": "text", "text": "six", "thought": True}, {"type": "text", "text": "42"}]},
    "bedrock": {"content": [{"reasoningContent": {"reasoningText": {"text": "six"}}}, {"text": "42"}]},
}


@pytest.mark.parametrize("form", THOUGHTS)
async def test_reasoning_in_another_form_is_reasoning(serve: Serve, form: str) -> None:
    body = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **THOUGHTS[form]}}]}
    message = (await (await serve(_answers(body))).chat(ASK)).message
    assert (message.reasoning, message.text) == ("six", "42")
