"""An OpenAI-compatible server that answers with a Python function: whole rollouts without a model.

Its answers name the model `reference-policy`, whatever the request names. They have no `usage`, because the server has
no tokenizer.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import orjson
from aiohttp import web

from lachesis.tracebacks import explained
from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import POLICY_FAILED
from lachesis_client.wire.service import WebService, json_response
from lachesis_messages.messages import Message

log = logging.getLogger(__name__)

MODEL_NAME = "reference-policy"

Policy: TypeAlias = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], Message | Awaitable[Message]
]
"""`policy(messages, tools) -> Message`, with the messages and tools of the request. It may be async."""


class ReferenceServer(WebService):
    """Serves a policy on a loopback port; an async context manager.

    If the policy raises, the server answers 400 with the error, which no client retries.
    """

    title: ClassVar[str] = "the reference server"

    def __init__(self, policy: Policy, *, port: int = 0) -> None:
        super().__init__(port=port)
        self.policy = policy
        self.requests = 0
        """The number of requests for completions."""
        self._ids = itertools.count(1)
        self._shown: set[str] = set()

    def settings(self, **overrides: Any) -> ServerSettings:
        """Settings for an `OpenAIServer` that talks to it."""
        return ServerSettings(**{"base_url": self.base_url, "model_name": MODEL_NAME, **overrides})

    def routes(self) -> Iterable[web.RouteDef]:
        return (
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
            web.post("/v1/chat/completions", self._chat),
        )

    async def _health(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        return json_response(
            {"object": "list", "data": [{"id": MODEL_NAME, "object": "model", "owned_by": "lachesis"}]}
        )

    async def _chat(self, request: web.Request) -> web.Response:
        self.requests += 1
        try:
            payload = orjson.loads(await request.read())
            messages, tools = payload["messages"], payload.get("tools")
            count = int(payload.get("n") or 1)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            return _rejection(f"not a chat completion request: {error!r}")
        if payload.get("stream"):
            return _rejection("this server does not stream; send stream=false")
        try:
            choices = []
            for index in range(count):
                said = self.policy(messages, tools)
                message = await said if inspect.isawaitable(said) else said
                if not isinstance(message, Message):
                    raise TypeError(f"it returned {message!r:.80}, not a Message")
                reason = "tool_calls" if message.tool_calls else "stop"
                plain = message.to_openai("reasoning_content")
                choices.append({"index": index, "message": plain, "finish_reason": reason})
        except Exception as error:
            if (trace := explained(error)) not in self._shown:
                self._shown.add(trace)
                log.error("exception in the policy: %s", trace)
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
            return _rejection(f"the policy failed: {type(error).__name__}: {error} ({where})", POLICY_FAILED)
        return json_response(
            {
                "id": f"chatcmpl-reference-{next(self._ids)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": MODEL_NAME,
                "choices": choices,
            }
        )


def _rejection(reason: str, code: str | None = None) -> web.Response:
    error = {"message": reason, "type": "invalid_request_error", "code": code}
    return json_response({"error": error}, status=400)
