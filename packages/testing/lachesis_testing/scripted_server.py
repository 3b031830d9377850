"""A real HTTP server with OpenAI's chat route, streams too, that plays a script and keeps the requests.

async with ScriptedServer([call(("terminal", {"command": "ls"})), say("done")]) as server:
    client = OpenAIServer(server.settings())
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

from aiohttp import web

from lachesis_client.client_settings import ServerSettings
from lachesis_tokens.wire.openai_chat import chunks
from lachesis_tokens.wire.service import WebService

Answer: TypeAlias = dict[str, Any] | int | Callable[[dict[str, Any]], Any]
"""A message, with optional `finish_reason` and `usage`; a status code; or a function of the request, also async, that
returns one of these or an aiohttp response."""


def say(text: str | None, **extra: Any) -> dict[str, Any]:
    """An assistant message."""
    return {"content": text, **extra}


def call(*calls: tuple[str, Any], content: str | None = None, **extra: Any) -> dict[str, Any]:
    """An assistant message with tool calls, each a name and arguments. Arguments that are not text become JSON."""
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


class ScriptedServer(WebService):
    """Plays `script` answer by answer. The last answer repeats."""

    title: ClassVar[str] = "the scripted server"

    def __init__(self, script: Sequence[Answer] | Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self.script = script
        self.requests: list[dict[str, Any]] = []
        """The JSON bodies of all requests."""
        self.headers: list[dict[str, str]] = []

    def settings(self, **overrides: Any) -> ServerSettings:
        """Settings for an `OpenAIServer` that talks to it."""
        return ServerSettings(**{"base_url": self.base_url, "model_name": "scripted", **overrides})

    def routes(self) -> Iterable[web.RouteDef]:
        return (web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._models))

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
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
        whole = {
            "id": "chatcmpl-scripted",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "scripted",
            "choices": [choice],
            "usage": answer.get("usage", {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}),
        }
        if body.get("stream"):
            choice.update(logprobs=None, message={"content": None, **choice["message"]})
            include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            pieces = b"".join(chunks(whole, include_usage=include_usage))
            return web.Response(body=pieces, content_type="text/event-stream")
        return web.json_response(whole)
