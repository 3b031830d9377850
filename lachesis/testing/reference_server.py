"""An OpenAI-compatible server that answers with a Python function: whole rollouts without a model.

Its answers name the model `reference-policy`, whatever the request names. They have no `usage`, because the server has
no tokenizer.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from lachesis.inference.lifecycle import AsyncService
from lachesis.inference.openai_server import ServerSettings
from lachesis.testing.worked_solutions import (
    UNKNOWN_PROBLEM,
    WorkedSolution,
    WorkedSolutionPolicy,
    arithmetic_steps,
    gsm8k_steps,
)
from lachesis.trajectories.messages import Message

__all__ = [
    "MODEL_NAME",
    "UNKNOWN_PROBLEM",
    "Policy",
    "ReferenceServer",
    "WorkedSolution",
    "WorkedSolutionPolicy",
    "arithmetic_steps",
    "gsm8k_steps",
]

MODEL_NAME = "reference-policy"
_LARGEST_REQUEST = 256 * 2**20

Policy: TypeAlias = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], Message | Awaitable[Message]
]
"""`policy(messages, tools) -> Message`, with the messages and tools of the request. It may be async."""


class ReferenceServer(AsyncService):
    """Serves a policy on a loopback port; an async context manager.

    If the policy raises, the server answers 400 with the error, which no client retries.
    """

    def __init__(self, policy: Policy, *, port: int = 0) -> None:
        self.policy = policy
        self.requests = 0
        """The number of requests for completions."""
        self._port = port
        self._runner: web.AppRunner | None = None
        self._ids = itertools.count(1)

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible API, once started."""
        if self._runner is None:
            raise RuntimeError("the reference server is not running; call start(), or use it as a context manager")
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}/v1"

    def settings(self, **overrides: Any) -> ServerSettings:
        """Settings for an `OpenAIServer` that talks to it."""
        return ServerSettings(**{"base_url": self.base_url, "model_name": MODEL_NAME, **overrides})

    async def start(self) -> None:
        """Bind the port and start to answer."""
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Close the port and the connections."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": MODEL_NAME, "object": "model", "owned_by": "lachesis"}]})

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
            choices = [_choice(index, await self._answer(messages, tools)) for index in range(count)]
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return _rejection(f"the policy failed: {type(error).__name__}: {error}")
        return _json(
            {
                "id": f"chatcmpl-reference-{next(self._ids)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": MODEL_NAME,
                "choices": choices,
            }
        )

    async def _answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> Message:
        message = self.policy(messages, tools)
        return await message if inspect.isawaitable(message) else message


def _choice(index: int, message: Message) -> dict[str, Any]:
    reason = "tool_calls" if message.tool_calls else "stop"
    return {"index": index, "message": message.to_openai("reasoning_content"), "finish_reason": reason}


def _rejection(reason: str) -> web.Response:
    return _json({"error": {"message": reason, "type": "invalid_request_error"}}, status=400)


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
