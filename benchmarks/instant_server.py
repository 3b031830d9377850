"""An OpenAI-compatible server that answers at once, in a separate process, for both agents in a benchmark.

A conversation gets `tool_turns` answers with one call of a tool, then a final answer. The answers are precomputed
bytes, so that the server costs little. With a latency, each answer waits for a random time first.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
from aiohttp import web


def _body(message: dict[str, object], finish: str) -> dict[str, object]:
    return {
        "id": "chatcmpl-instant",
        "object": "chat.completion",
        "created": 0,
        "model": "instant",
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }


FINAL = orjson.dumps(_body({"content": "The answer is \\boxed{42}."}, "stop"))


ARGUMENTS = {"noop": {"text": "x"}, "terminal": {"command": "true"}, "bash": {"command": "true"}}
"""The tools that are called, `noop` unless the URL names another."""
SUBMIT = {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42"}
"""The last call of `bash`: mini-swe-agent ends with it, not with words."""


def _call(tool: str, turn: int, arguments: dict[str, str]) -> bytes:
    function = {"name": tool, "arguments": orjson.dumps(arguments).decode()}
    call = {"id": f"call_{turn}", "type": "function", "function": function}
    return orjson.dumps(_body({"content": None, "tool_calls": [call]}, "tool_calls"))


LATENCY = web.AppKey("latency", tuple)


async def _chat(request: web.Request) -> web.Response:
    body = await request.read()
    low, high = request.app[LATENCY]
    if high:
        await asyncio.sleep(random.uniform(low, high))
    # Counting bytes is enough to find the turn, and cheaper than parsing a body that grows with every turn.
    turn = body.count(b'"tool_call_id"')
    wanted, tool = int(request.match_info["tool_turns"]), request.match_info.get("tool", "noop")
    if turn < wanted:
        answer = _call(tool, turn, ARGUMENTS[tool])
    else:
        answer = _call(tool, turn, SUBMIT) if tool == "bash" else FINAL
    return web.Response(body=answer, content_type="application/json")


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "instant", "object": "model"}]})


def _serve(ports: multiprocessing.Queue[int], latency: tuple[float, float]) -> None:
    async def run() -> None:
        app = web.Application()
        app[LATENCY] = latency
        for path in ("/{tool_turns}", "/{tool}/{tool_turns}"):
            app.router.add_post(f"{path}/v1/chat/completions", _chat)
            app.router.add_get(f"{path}/v1/models", _models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def instant_server(latency: tuple[float, float] = (0.0, 0.0)) -> Iterator[int]:
    """The port of a running server. `http://127.0.0.1:PORT/K/v1` plays K tool turns, `.../TOOL/K/v1` those of a tool.

    Args:
        latency: seconds from a request to its answer, at least and at most.
    """
    context = multiprocessing.get_context("spawn")
    ports: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=_serve, args=(ports, latency), daemon=True)
    process.start()
    try:
        yield ports.get(timeout=60)
    finally:
        process.terminate()
        process.join()
