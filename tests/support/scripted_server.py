"""A real HTTP server with OpenAI's chat route that answers from a script, and records its requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from aiohttp import web

Answer = dict[str, Any] | int | Callable[[dict[str, Any]], Any]
"""A message, with `finish_reason` and `usage` beside it if they matter; a status code; or a function of the request."""


def say(text: str | None, **extra: Any) -> dict[str, Any]:
    """An assistant message."""
    return {"content": text, **extra}


def call(*calls: tuple[str, Any], content: str | None = None, **extra: Any) -> dict[str, Any]:
    """An assistant message with tool calls. Arguments that are not text become JSON."""
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


class ScriptedServer:
    """Plays `script` answer by answer, and repeats the last one."""

    def __init__(self, script: Sequence[Answer] | Callable[[dict[str, Any]], Any]) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if callable(self.script):
            answer: Any = self.script(body)
        else:
            answer = self.script[min(len(self.requests), len(self.script)) - 1]
        if callable(answer):
            answer = answer(body)
        if hasattr(answer, "__await__"):
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
