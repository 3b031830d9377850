"""A real HTTP server with OpenAI's chat route that plays a script and keeps the requests.

async with ScriptedServer([call(("terminal", {"command": "ls"})), say("done")]) as server:
    client = OpenAIServer(server.settings())
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from aiohttp import web

from lachesis.inference.http_client import ServerSettings
from lachesis.inference.lifecycle import AsyncService

Answer: TypeAlias = dict[str, Any] | int | Callable[[dict[str, Any]], Any]
"""A message, with optional `finish_reason` and `usage`; a status code; or a function of the request, also async, that
returns one of these or an aiohttp response."""


def say(text: str | None, **extra: Any) -> dict[str, Any]:
    """An assistant message."""
    return {"content": text, **extra}


def call(*calls: tuple[str, Any], content: str | None = None, **extra: Any) -> dict[str, Any]:
    """An assistant message with tool calls, each a name and arguments. Arguments that are no text become JSON."""
    listed = [
        {
            "id": f"call_{number}_{name}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            },
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"content": content, "tool_calls": listed, **extra}


class ScriptedServer(AsyncService):
    """Plays `script` answer by answer. The last answer repeats."""

    def __init__(self, script: Sequence[Answer] | Callable[[dict[str, Any]], Any]) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        """The JSON bodies of all requests."""
        self.headers: list[dict[str, str]] = []
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible API, once started."""
        if self._runner is None:
            raise RuntimeError("the scripted server is not running; call start(), or use it as a context manager")
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def settings(self, **overrides: Any) -> ServerSettings:
        """Settings for an `OpenAIServer` that talks to it."""
        return ServerSettings(**{"base_url": self.base_url, "model_name": "scripted", **overrides})

    async def start(self) -> None:
        """Bind a free port and start to answer."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def stop(self) -> None:
        """Close the port and the connections."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        answer: Any = self.script
        if not callable(answer):
            answer = answer[min(len(self.requests), len(answer)) - 1]
        if callable(answer):
            answer = answer(body)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, web.StreamResponse):
            return answer
        if isinstance(answer, int):
            return web.json_response({"error": {"message": f"status {answer}, as the script says"}}, status=answer)
        message = {key: value for key, value in answer.items() if key not in ("finish_reason", "usage")}
        finish = answer.get("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
        return web.json_response(
            {
                "id": "chatcmpl-scripted",
                "object": "chat.completion",
                "model": "scripted",
                "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}],
                "usage": answer.get("usage", {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}),
            }
        )
