"""The door of MCP against servers of our own: over lines in a sandbox, and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from backends import SandboxSpec, create_backend
from backends.errors import SettingsError
from lachesis.cli.environment_classes import environment_class
from lachesis_doors.mcp_http import McpHttpClient
from lachesis_tools.mcp.client import McpLate, McpLost, McpRefused, McpStdioClient
from tests.support.scripted_server import call, say
from tests.support.small_envs import lines, process, rollouts

SERVER = Path(__file__).with_name("mcp_server.py").read_text()


async def play(folder: Path, model: Any, task: Any, *, habit: str = "", query: str = "", **settings: Any) -> Any:
    tasks = folder / "tasks.jsonl"
    row = {"prompt": "Add.", "answer": "7", "files": {"server.py": SERVER}, **task}
    tasks.write_text(json.dumps(row) + "\n")
    command = quote(f"python3 server.py {habit}".strip())
    env_cls = environment_class(f"mcp:{tasks}?command={command}&name=sums{query}")
    chosen = {"total_steps": 1, "group_size": 1, "max_infra_retries": 2, **settings}
    return await process(env_cls, folder, model, enabled_toolsets=[], **chosen)


def calls_once(name: str, **arguments: Any) -> Any:
    def model(request: dict[str, Any]) -> Any:
        return say("7") if request["messages"][-1]["role"] == "tool" else call((name, arguments))

    return model


def answers(result: Any) -> list[str]:
    (group,) = lines(result.files.groups)
    return [message["content"] for message in group["messages"][0] if message["role"] == "tool"]


@asynccontextmanager
async def in_sandbox(habit: str = "", timeout: float = 30) -> AsyncIterator[McpStdioClient]:
    sandbox = await create_backend("local").create(SandboxSpec())
    client = McpStdioClient("sums", sandbox, f"python3 server.py {habit}", timeout=timeout)
    try:
        await sandbox.write_bytes("server.py", SERVER.encode())
        yield client
    finally:
        await client.close()
        await sandbox.close()


async def test_each_rollout_has_a_server_and_every_name_can_be_called(tmp_path: Path) -> None:
    offered: list[str] = []

    def model(request: dict[str, Any]) -> Any:
        offered[:] = [tool["function"]["name"] for tool in request["tools"]]
        seen = [message["content"] for message in request["messages"] if message["role"] == "tool"]
        wanted = (("sums__add", {"by": 3}), ("sums__add", {"by": 4}))
        named = (("sums__files_read_now", {}), ("sums__files_read_now_2", {}))
        return call(*wanted) if not seen else call(*named) if len(seen) == 2 else say("The sum is\n7")

    result = await play(tmp_path, model, {}, group_size=2)
    assert [each["reward"] for each in rollouts(result.files.groups)] == [1.0, 1.0]
    for messages in lines(result.files.groups)[0]["messages"]:
        seen = [message["content"] for message in messages if message["role"] == "tool"]
        assert seen == ["3", "7", "the tool files.read/now", "the tool files.read_now"]
    assert len(offered) == len(set(offered)) == 14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fail", {}, "the disk is full"),
        ("refuse", {}, "no such argument"),
        ("raise", {}, "no such argument"),
        ("slow", {}, "took longer than 8 s"),
        ("big", {"by": 30_000_000}, "the answer was too large"),
    ],
)
async def test_a_call_that_fails_is_an_answer_and_the_rollout_has_a_score(
    tmp_path: Path, name: str, arguments: Any, said: str
) -> None:
    result = await play(tmp_path, calls_once(f"sums__{name}", **arguments), {}, query="&timeout=8")
    (each,) = rollouts(result.files.groups)
    assert (each["reward"], each["attempts"], len(each["tool_errors"])) == (1.0, 1, 1)
    assert said in answers(result)[0]


@pytest.mark.parametrize("name", ["die", "half", "overload", "text"])
async def test_a_server_that_ends_or_breaks_the_protocol_is_the_infrastructures(tmp_path: Path, name: str) -> None:
    result = await play(tmp_path, calls_once(f"sums__{name}"), {})
    (each,) = rollouts(result.files.failures)
    assert (each["reward"], each["unscored_kind"], each["attempts"]) == (None, "infra_error", 3)
    said = {"die": "ended with 3", "half": "neither a result nor an error", "overload": "with the error -32000: busy"}
    said["text"] = "which no request had"
    assert said[name] in each["reason"]
    if name == "die":
        assert each["reason"].endswith("the wheel came off") and len(each["reason"]) < 1500


async def test_the_client_answers_what_the_server_asks_and_takes_answers_in_any_order() -> None:
    async with in_sandbox() as client:
        await client.open()
        assert len(await client.tools()) == 14
        first = asyncio.create_task(client.call("later", {}))
        while not client._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await client.call("add", {"by": 1}))["text"] == "1"
        assert (await first)["text"] == "after an answer to a later call"
        ping, sampling = json.loads((await client.call("asked", {}))["text"])
        assert (ping["id"], ping["result"]) == ("a", {})
        assert (sampling["id"], sampling["error"]["code"]) == (1, -32601)
        for number in range(300):
            assert (await client.call("add", {"by": 1}))["text"] == str(number + 2)
        assert (await client.call("big", {"by": 700_000}))["text"] == "x" * 700_000
        with pytest.raises(McpLost, match=r"ended with 3: y+the wheel came off"):
            await client.call("die", {})
        with pytest.raises(McpLost, match="ended with 3"):
            await client.call("add", {"by": 1})


@pytest.mark.parametrize(
    ("habit", "error", "said"),
    [
        ("dies", McpLost, "ended with 1: no licence"),
        ("sleeps", McpLate, "did not answer initialize in 2 s"),
        ("pages", McpRefused, "has not listed its tools after 1000 pages"),
    ],
)
async def test_a_server_that_does_not_start_is_named(habit: str, error: type[Exception], said: str) -> None:
    async with in_sandbox(habit, timeout=2 if habit == "sleeps" else 60) as client:
        with pytest.raises(error, match=said):
            await client.open()
            await client.tools()


async def test_a_late_answer_is_to_what_was_asked() -> None:
    async with in_sandbox() as client:
        await client.open()
        client.timeout = 1
        with pytest.raises(McpLate):
            await client.ask("tools/call", {"name": "later", "arguments": {}})
        client.timeout = 30
        for number in (1, 2):
            assert (await client.call("add", {"by": 1}))["text"] == str(number)


async def test_a_server_that_does_not_read_is_late() -> None:
    async with in_sandbox() as client:
        await client.open()
        client.timeout = 1
        with pytest.raises(McpLate):
            await client.ask("tools/call", {"name": "slow", "arguments": {}})
        with pytest.raises(McpLate):
            await client.ask("tools/call", {"name": "add", "arguments": {"by": "x" * 5_000_000}})


@pytest.mark.parametrize("servers", [{"a__b": {"command": "x"}}, {"a": {"args": []}}, [1]])
async def test_servers_that_cannot_be_used_are_named_at_the_start(tmp_path: Path, servers: Any) -> None:
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    line = '{"prompt": "two\u2028lines", "answer": "a\x85b"}'  # where Python's splitlines would cut
    (tmp_path / "tasks.jsonl").write_text(line, encoding="utf-8")
    env_cls = environment_class(f"mcp:{tmp_path}/tasks.jsonl?servers={tmp_path}/servers.json")
    with pytest.raises(SettingsError, match=r"servers\.json"):
        await process(env_cls, tmp_path, [], enabled_toolsets=[])


# --- HTTP


class HttpServer:
    """Streamable HTTP: answers as JSON or as events, with a session."""

    def __init__(self, habit: str = "") -> None:
        self.habit = habit
        self.answer: tuple[int, dict[str, Any]] | None = None
        """A status and an error, for calls."""
        self.url = ""
        self.seen: list[Any] = []
        self.ended = asyncio.Event()

    async def post(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        self.seen.append((message, dict(request.headers)))
        number, method = message.get("id"), message.get("method")
        if method is None or number is None:
            return web.Response(status=202)
        if method == "initialize":
            result = {"protocolVersion": "2025-06-18", "capabilities": {}}
            return web.json_response({"id": number, "result": result}, headers={"Mcp-Session-Id": "s1"})
        if request.headers.get("Mcp-Session-Id") != "s1":
            return web.Response(status=404)
        if method == "tools/list":
            return web.json_response([{"id": number, "result": {"tools": [{"name": "see"}]}}])
        if self.habit == "refuses":
            error = {"jsonrpc": "2.0", "id": number, "error": {"code": -32602, "message": "no such argument"}}
            return web.json_response(error, status=400)
        if self.habit == "fails":
            return web.Response(status=503, text="busy")
        if self.answer is not None:
            status, error = self.answer
            return web.json_response({"jsonrpc": "2.0", "id": number, "error": error}, status=status)
        if self.habit == "large":
            return web.json_response({"id": number, "result": {"content": "x" * (1 << 24)}})
        if self.habit == "half":
            return web.Response(text='{"id": 3, "resu', content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.habit == "endless":
            await response.write(b": hello\n\ndata: ")
            with contextlib.suppress(ConnectionError):
                while True:
                    await response.write(b"x" * (1 << 16))
        if self.habit == "breaks":
            await response.write(b'data: {"id"')
            return response
        image = {"type": "image", "mimeType": "image/png", "data": "A" * 400_000}
        result = {"content": [{"type": "text", "text": "grün"}, image]}
        await response.write(b": hello\n\nid: 1\ndata:\n\n")
        for event in (
            {"id": 9, "method": "ping"},
            {"method": "notifications/message"},
            {"id": f"{number}" if self.habit == "text" else number, "result": result, "jsonrpc": "2.0"},
        ):
            said = f"event: message\r\ndata: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()
            for at in range(0, len(said), 1 << 15):
                await response.write(said[at : at + (1 << 15)])
        return response

    async def delete(self, request: web.Request) -> web.Response:
        self.ended.set()
        return web.Response(status=405)


@asynccontextmanager
async def over_http(habit: str = "") -> AsyncIterator[tuple[HttpServer, McpHttpClient]]:
    server, app = HttpServer(habit), web.Application()
    app.router.add_post("/mcp", server.post)
    app.router.add_delete("/mcp", server.delete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    client = McpHttpClient("eyes", url, timeout=30, headers={"Authorization": "Bearer x"})
    try:
        await client.open()
        yield server, client
    finally:
        await client.close()
        await runner.cleanup()


async def test_over_http_the_session_the_version_and_long_events_are_kept() -> None:
    async with over_http() as (server, client):
        assert [tool["name"] for tool in await client.tools()] == ["eyes__see"]
        found = await client.call("see", {})
        assert (found["text"], len(found["images"][0])) == ("grün", len("data:image/png;base64,") + 400_000)
        last, headers = server.seen[-1]
        assert (last["id"], last["result"]) == (9, {})
        assert (headers["Mcp-Session-Id"], headers["Authorization"]) == ("s1", "Bearer x")
        assert headers["MCP-Protocol-Version"] == "2025-06-18"
    assert server.ended.is_set()


@pytest.mark.parametrize("habit", ["fails", "half", "breaks", "text"])
async def test_over_http_a_server_that_fails_is_lost(habit: str) -> None:
    async with over_http(habit) as (_, client):
        with pytest.raises(McpLost, match=r"eyes at http://127"):
            await client.call("see", {})


async def test_over_http_a_refusal_with_a_reason_is_an_answer() -> None:
    async with over_http("refuses") as (_, client):
        assert (await client.call("see", {}))["error"] == "eyes: no such argument"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *((200, code) for code in (-32602, -32601, -32603, -32002, 0, 404)),
        *((400, code) for code in (-32602, -32700, 17)),
        (422, -32602),
        (413, -32600),
    ],
)
async def test_over_http_an_error_that_arguments_may_have_caused_is_an_answer(status: int, code: int) -> None:
    async with over_http() as (server, client):
        server.answer = (status, {"code": code, "message": "not so"})
        assert (await client.call("see", {}))["error"] in ("eyes: not so", "eyes: the arguments are too large")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        *(
            (status, code)
            for status in (401, 403, 404, 408, 429, 500, 502, 503)
            for code in (-32603, -32602, -32001, 17)
        ),
        *((400, code) for code in (-32000, -32001, -32600, -32603, None, 503)),
        *((200, code) for code in (-32000, -32001, -32042, 401, 429, 503)),
    ],
)
async def test_over_http_an_error_of_the_server_is_never_what_a_model_reads(status: int, code: int | None) -> None:
    async with over_http() as (server, client):
        server.answer = (status, {"code": code, "message": "the key has expired"})
        with pytest.raises(
            McpLost, match=r"the MCP server eyes .*: the key has expired\. Next step: look why in its log"
        ):
            await client.call("see", {})


async def test_over_http_a_failed_server_gives_no_score(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Look.", "answer": "7"}\n')
    async with over_http() as (server, _):
        server.answer = (429, {"code": -32000, "message": "too many requests"})
        env_cls = environment_class(f"mcp:{tmp_path}/tasks.jsonl?url={quote(server.url)}&name=eyes")
        settings: dict[str, Any] = {"enabled_toolsets": [], "total_steps": 1, "group_size": 1, "max_infra_retries": 0}
        result = await process(env_cls, tmp_path, calls_once("eyes__see"), **settings)
    (each,) = rollouts(result.files.failures)
    assert (each["reward"], each["unscored_kind"]) == (None, "infra_error")
    assert "answered tools/call with HTTP 429" in each["reason"] and "too many requests" in each["reason"]


@pytest.mark.parametrize("habit", ["large", "endless"])
async def test_over_http_an_answer_that_is_too_large_is_not_read_to_its_end(habit: str) -> None:
    async with over_http(habit) as (_, client):
        assert (await client.call("see", {}))["error"] == "eyes: the answer was too large"


@pytest.mark.parametrize("query", ["url=http://127.0.0.1:9/mcp&name=eyes", "command=no-such-program&name=eyes"])
async def test_a_server_that_is_away_is_named_with_the_next_step(tmp_path: Path, query: str) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "", "answer": ""}')
    env_cls = environment_class(f"mcp:{tmp_path}/tasks.jsonl?{query}")
    with pytest.raises(McpLost, match=r"the MCP server eyes .*Next step: start the server"):
        await process(env_cls, tmp_path, [], enabled_toolsets=[], total_steps=1)
