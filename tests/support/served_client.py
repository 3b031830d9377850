"""A real HTTP server for each test, with a handler from the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from lachesis_client import OpenAIServer, ServerSettings
from tests.support.completions import completion

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def always_hi(_: web.Request) -> web.Response:
    return web.json_response(completion())


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[OpenAIServer]]]:
    """`await serve(handler, **settings)` starts a server and returns the client under test."""
    async with AsyncExitStack() as stack:

        async def start(handler: Handler = always_hi, get: Handler | None = None, **settings: Any) -> OpenAIServer:
            app = web.Application()

            async def post(request: web.Request) -> web.StreamResponse:
                return await handler(request)

            app.router.add_post("/v1/{tail:.*}", post)
            if get:
                app.router.add_get("/{tail:.*}", get)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            merged = {"base_url": f"http://127.0.0.1:{port}/v1", "model_name": "m", "timeout": 60.0, **settings}
            client = OpenAIServer(ServerSettings(**merged))
            stack.push_async_callback(client.close)
            return client

        yield start
