"""One server at the wire: what is retried and what is not, what is bounded, what is sent and what is read."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace

import orjson
import pytest
from aiohttp import web

from lachesis_client import (
    BadResponse,
    ContextExhausted,
    OpenAIServer,
    RequestRejected,
    ServerSettings,
    ServerUnavailable,
    Unauthorized,
)
from lachesis_client import http_attempts as module
from lachesis_messages.messages import FinishReason, Message, ToolCall
from tests.support.completions import completion
from tests.support.ports import free_port

ASK = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_DELAY", 0.02)


class Script:
    """Answers request after request from a list (the last one for good) and keeps what was asked."""

    def __init__(self, *answers):
        self.answers, self.requests, self.times = list(answers), [], []

    async def __call__(self, request):
        self.times.append(time.monotonic())
        self.requests.append(request)
        self.body = orjson.loads(await request.read())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            return await answer(request)
        status, body, *headers = answer
        return web.Response(body=orjson.dumps(body), status=status, headers=headers[0] if headers else None)


OK = (200, completion())


async def cut_body(request):
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


async def say_hi(_):
    return web.json_response(completion())


async def hang(_):
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    "trouble",
    [(500, {"error": "boom"}), (503, {}), (429, {}), (408, {}), cut_body, hang, (200, {"error": {"code": 502}})],
    ids=["500", "503", "429", "408", "cut body", "hang", "error under 200"],
)
async def test_what_may_pass_is_retried_and_counted(serve, trouble):
    script = Script(trouble, trouble, OK)
    server = await serve(script, timeout=1.0 if trouble is hang else 60.0)
    response = await server.chat(ASK)
    assert (response.message.text, response.attempts, len(script.requests)) == ("hi", 3, 3)
    assert response.latency < time.monotonic() - script.times[1], "it is that of the attempt that answered"


async def test_retry_after_is_honoured(serve):
    script = Script((429, {}, {"Retry-After": "0.4"}), OK)
    await (await serve(script)).chat(ASK)
    assert script.times[1] - script.times[0] >= 0.4


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "bad temperature"}}, RequestRejected),
        (401, {"error": "no"}, Unauthorized),
        (429, {"error": {"code": "insufficient_quota"}}, RequestRejected),
        (400, {"error": {"code": "context_length_exceeded", "message": "x"}}, ContextExhausted),
        (
            400,
            {"error": {"code": 400, "type": "exceed_context_size_error", "message": "request (9) exceeds"}},
            ContextExhausted,
        ),
        (400, {"object": "error", "message": "This model's maximum context length is 2048 tokens."}, ContextExhausted),
        (
            400,
            {"error": {"message": "The decoder prompt (length 9) is longer than the maximum model length of 4."}},
            ContextExhausted,
        ),
        (
            400,
            {"error": {"message": "The input (9 tokens) is longer than the model's context length (4 tokens)."}},
            ContextExhausted,
        ),
    ],
)
async def test_a_rejection_is_never_retried(serve, status, body, kind):
    script = Script((status, body))
    server = await serve(script, api_key="sk-secret")
    with pytest.raises(RequestRejected) as caught:
        await server.chat(ASK)
    assert type(caught.value) is kind
    assert caught.value.status == status and len(script.requests) == 1
    assert server.base_url in str(caught.value)
    assert "sk-secret" not in str(caught.value) + repr(server.settings)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "no such thing"}}', "with 400: no such thing"),
        ('{"error": "plain"}', "with 400: plain"),
        ('{"error": {"message": " "}}', '{"error": {"message": " "}}'),
        ("a\n  b", "with 400: a b"),
        (
            "<!DOCTYPE HTML>\n<html>\n",
            "an HTML page, so this is not an OpenAI-compatible server; set base_url to the address of its API",
        ),
        ("[" * 100_000, "[[[["),
    ],
)
def test_a_rejection_shows_the_servers_message_and_any_other_body_in_a_line(body, said):
    assert said in str(RequestRejected("server", 400, body))


@pytest.mark.parametrize(("key", "words"), [("sk-x", "was sent"), ("", "no api_key is set")])
async def test_unauthorized_says_which_key_was_used(serve, key, words):
    script = Script((401, {}))
    server = await serve(script, api_key=key)
    with pytest.raises(Unauthorized, match=words):
        await server.chat(ASK)
    assert script.requests[0].headers.get("Authorization") == (f"Bearer {key}" if key else None)


async def test_a_login_in_the_url_is_sent_and_shown_nowhere(serve):
    script = Script(OK, (400, {"error": {"message": "no"}}))
    server = await serve(script)
    client = OpenAIServer(replace(server.settings, base_url=server.base_url.replace("://", "://bob:p%40ss@")))
    response = await client.chat(ASK)
    assert script.requests[0].headers["Authorization"] == "Basic Ym9iOnBAc3M="  # bob:p@ss
    assert response.server == client.base_url == server.base_url
    with pytest.raises(RequestRejected) as caught:
        await client.chat(ASK)
    assert "bob" not in str(caught.value)
    await client.close()


async def test_retries_are_bounded_in_number(serve):
    script = Script((500, {"error": {"message": "boom"}}))
    with pytest.raises(
        ServerUnavailable, match=r"unavailable after 4 attempts, last cause: status 500.*boom"
    ) as caught:
        await (await serve(script, max_retries=3)).chat(ASK)
    assert caught.value.attempts == len(script.requests) == 4


async def test_retries_are_bounded_in_time(serve):
    script = Script((429, {}, {"Retry-After": "60"}))
    started = time.monotonic()
    with pytest.raises(ServerUnavailable):
        await (await serve(script, retry_deadline=30.0)).chat(ASK)
    assert time.monotonic() - started < 30.0, "no use waiting for what comes after the deadline"
    script = Script(hang)
    with pytest.raises(ServerUnavailable, match="timeout"):
        await (await serve(script, timeout=0.2, retry_deadline=0.5, max_retries=500)).chat(ASK)
    assert len(script.requests) < 50, "as many as there was time for, and not 501"


async def test_a_refused_connection_is_unavailable_and_names_the_address():
    with socket.socket() as deaf:  # the port stays taken, and nobody listens
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        settings = ServerSettings(f"http://127.0.0.1:{port}/v1", "m", max_retries=1)
        server = OpenAIServer(settings)
        for ask in (server.chat(ASK), server.check()):
            with pytest.raises(ServerUnavailable, match=rf"127\.0\.0\.1:{port}.*check that the server runs"):
                await ask
        await server.close()


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b'{"choices": []}', b'{"choices": [{"text": "x"}]}'])
async def test_an_answer_that_is_no_completion_says_so(serve, body):
    async def nonsense(_):
        return web.Response(body=body)

    with pytest.raises(BadResponse, match="base_url"):
        await (await serve(nonsense)).chat(ASK)


async def test_a_cancelled_call_reaches_the_server(serve):
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(_):
        began.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    call = asyncio.create_task((await serve(slow, timeout=60)).chat(ASK))
    await began.wait()
    call.cancel()
    await asyncio.wait_for(cancelled.wait(), 60)


async def test_concurrency_is_bounded_and_all_proceed(serve):
    now, most, full = 0, 0, asyncio.Event()

    async def count(_):
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)
        now -= 1
        return web.json_response(completion())

    server = await serve(count, max_concurrency=3, timeout=60)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(server.chat(ASK) for _ in range(20)))
    assert len(answers) == 20 and most == 3


async def test_only_what_was_chosen_is_sent(serve):
    script = Script(OK)
    server = await serve(script, extra_body={"top_k": 5, "seed": 1})
    response = await server.chat(ASK, temperature=0.0, seed=2, extra_body={"min_p": 0.1}, tool_choice="auto")
    assert script.body == {
        "model": "m", "messages": ASK, "top_k": 5, "seed": 2, "temperature": 0.0, "min_p": 0.1
    }  # fmt: skip
    assert response.sampling == {"top_k": 5, "seed": 2, "temperature": 0.0, "min_p": 0.1}
    await server.chat(ASK, tools=TOOLS, tool_choice="required", max_tokens=7, top_p=0.5, stop=["x"])
    assert script.body["tools"] == TOOLS and script.body["tool_choice"] == "required"
    assert (script.body["max_tokens"], script.body["top_p"], script.body["stop"]) == (7, 0.5, ["x"])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", None])
async def test_reasoning_is_sent_back_as_the_server_takes_it(serve, field):
    script = Script(OK)
    server = await serve(script, reasoning_field=field)
    call = ToolCall("c1", "python", '{"a":1}')
    history = [
        Message("user", "q"),
        Message("assistant", None, (call,), reasoning="thought"),
        Message("tool", "1", tool_call_id="c1"),
        {"role": "assistant", "content": "a", "reasoning": "again"},
    ]
    await server.chat(history)
    sent = script.body["messages"]
    expected = {field: "thought"} if field else {}
    assert sent[1] == {"role": "assistant", "content": None, "tool_calls": [call.to_openai()], **expected}
    assert sent[2] == {"role": "tool", "content": "1", "tool_call_id": "c1"}
    assert sent[3] == {"role": "assistant", "content": "a", **({field: "again"} if field else {})}


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "why", "reasoning": "other"},
        {"reasoning_content": None, "reasoning": "why"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "w"}, {"type": "x"}, {"text": "hy"}]},
    ],
)
async def test_reasoning_is_read_from_every_spelling(serve, fields):
    response = await (await serve(Script((200, completion(**fields))))).chat(ASK)
    assert (response.message.reasoning, response.message.content) == ("why", "hi")


async def test_what_the_server_says_about_itself_is_kept(serve):
    response = await (await serve(Script((200, completion(finish_reason="eos_token"))))).chat(ASK)
    assert response.finish_reason is FinishReason.STOP
    assert (response.raw_finish_reason, response.model) == ("eos_token", "served-name")
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (5, 2)
    bare = {"choices": [{"message": {"content": None}}]}
    response = await (await serve(Script((200, bare)))).chat(ASK)
    assert (response.usage.prompt_tokens, response.model, response.message.content) == (None, None, None)
    assert response.finish_reason is FinishReason.UNKNOWN


async def test_text_parts_become_text_and_other_parts_stay(serve):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (await (await serve(Script((200, completion(parts))))).chat(ASK)).message.content == "ab"
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]
    assert (await (await serve(Script((200, completion(parts))))).chat(ASK)).message.content == tuple(parts)


@pytest.mark.parametrize(
    ("thought", "read"),
    [
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "six sevens"}]}], "six sevens"),
        ([{"type": "thinking", "thinking": "six", "signature": "x"}, {"type": "thinking", "thinking": "7"}], "six\n7"),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "six sevens"}]}], "six sevens"),
        ([{"type": "redacted_thinking", "data": "eA=="}], None),
    ],
)
async def test_parts_that_are_reasoning_become_reasoning(serve, thought, read):
    server = await serve(Script((200, completion([*thought, {"type": "text", "text": "42"}]))))
    said = (await server.chat(ASK)).message
    assert (said.content, said.reasoning) == ("42", read)
    both = await serve(Script((200, completion([*thought, {"type": "text", "text": "4"}], reasoning_content=read))))
    assert (await both.chat(ASK)).message.reasoning == read, "some servers send it twice"


async def test_arguments_that_a_server_encoded_twice_are_read_and_count_as_repaired(serve):
    calls = [
        {"id": str(n), "type": "function", "function": {"name": "python", "arguments": text}}
        for n, text in enumerate(['"{\\"a\\": 1}"', '{"a": 1}', '"no object"'])
    ]
    message = (await (await serve(Script((200, completion(None, tool_calls=calls))))).chat(ASK)).message
    assert [(c.arguments, c.ok) for c in message.tool_calls] == [
        ('{"a": 1}', False),
        ('{"a": 1}', True),
        ('"no object"', True),
    ]


async def test_sloppy_tool_calls_keep_their_meaning_and_get_unique_ids(serve):
    def call(id_, arguments):
        return {"id": id_, "type": "function", "function": {"name": "python", "arguments": arguments}}

    calls = [call("x", '{"a": 1.0}'), call("x", {"b": [1]}), call("", None), call(None, "{broken"), {"junk": 1}]
    message = (await (await serve(Script((200, completion(None, tool_calls=calls))))).chat(ASK)).message
    assert [c.arguments for c in message.tool_calls] == ['{"a": 1.0}', '{"b":[1]}', "", "{broken"]
    ids = [c.id for c in message.tool_calls]
    assert ids[0] == "x" and all(ids) and len(set(ids)) == 4


async def test_calls_in_the_text_are_parsed_when_the_server_gave_none(serve):
    text = '<think>hm</think>I run it.\n<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'
    server = await serve(Script((200, completion(text))), tool_call_parser="hermes")
    response = await server.chat(ASK, tools=TOOLS)
    assert [(c.name, c.arguments) for c in response.message.tool_calls] == [("python", '{"code": "1"}')]
    assert (response.message.content, response.message.reasoning) == ("I run it.", "hm")
    assert response.finish_reason is FinishReason.STOP, "that is what the server said"
    assert (await server.chat(ASK)).message.content == text, "no tools were offered"
    plain = await serve(Script((200, completion(text))))
    assert (await plain.chat(ASK, tools=TOOLS)).message.content == text, "no parser was chosen"


async def test_calls_that_are_none_are_reported_and_stay_in_the_text(serve):
    text = 'So: <tool_call>\n{"name": "python", "arguments": {"code": "1'
    server = await serve(Script((200, completion(text, finish_reason="length"))), tool_call_parser="hermes")
    response = await server.chat(ASK, tools=TOOLS)
    assert (response.message.tool_calls, response.message.content) == ((), text)
    assert response.malformed_calls == (text.removeprefix("So: "),)


async def test_odd_answers_become_messages_that_can_be_written_down(serve):
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, {"text": "hi"}, {"type": 5}, "x"]
    odd_call = {"id": "a", "function": {"name": "python", "arguments": {"code": "\ud800"}}}
    for message in ({"content": parts}, {"content": None, "tool_calls": [odd_call]}):

        async def answers(_, message=message):
            return web.json_response(completion(**message))

        said = (await (await serve(answers)).chat(ASK)).message
        assert Message.from_openai(said.to_openai()) == said


async def test_text_that_utf8_cannot_hold_is_still_sent(serve):
    script = Script(OK)
    await (await serve(script)).chat([Message("user", "half \ud83c a pair, \ud83c\udf0d")])
    assert script.body["messages"][0]["content"] == "half \ufffd a pair, \U0001f30d"


async def test_check_costs_no_completion(serve):
    async def models(request):
        if request.path == "/v1/models" and request.headers.get("Authorization") == "Bearer right":
            return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})
        return web.Response(status=401, text="no")

    script = Script(OK)
    assert await (await serve(script, models, api_key="right")).check() == ["a", "b"]
    with pytest.raises(Unauthorized):
        await (await serve(script, models, api_key="wrong")).check()

    async def health_only(request):
        return web.Response(status=200 if request.path == "/health" else 404)

    assert await (await serve(script, health_only)).check() == []
    assert script.requests == []


def test_one_client_serves_one_event_loop_after_the_other():
    async def once(server):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", say_hi)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            return (await server.chat(ASK)).message.text
        finally:
            await server.close()
            await runner.cleanup()

    port = free_port()
    server = OpenAIServer(ServerSettings(f"http://127.0.0.1:{port}/v1", "m"))
    assert [asyncio.run(once(server)) for _ in range(2)] == ["hi", "hi"]


def test_the_settings_are_frozen_and_hide_the_key():
    settings = ServerSettings("http://h/v1", "m", api_key="sk-secret")
    assert "sk-secret" not in repr(settings)
    with pytest.raises(AttributeError):
        settings.api_key = "x"


async def test_the_first_choice_is_that_with_index_0(serve):
    late, first = completion("late")["choices"][0], completion("first")["choices"][0]
    server = await serve(Script((200, {**completion(), "choices": [{**late, "index": 1}, first]})))
    assert (await server.chat(ASK)).message.content == "first"
