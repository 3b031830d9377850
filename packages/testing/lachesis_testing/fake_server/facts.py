"""The routes of the fake server that sample nothing: health, names, tokens of texts, counts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import orjson
from aiohttp import web

from lachesis_testing.fake_server.engine import FakeEngine
from lachesis_tokens.model_routes.host import JSON, model_info, model_list, openai_error, tokenized
from lachesis_tokens.wire.service import json_response

VERSION: Final = "0.33.0"
"""The vLLM release whose routes it imitates."""
UNAUTHORIZED: Final = {"error": "Unauthorized"}


def fact_routes(
    server: FakeEngine, tokenizer: Any, *, is_ready: Callable[[], bool], authorized: Callable[[web.Request], bool]
) -> Iterable[web.RouteDef]:
    """Those of vLLM and SGLang, and `/fake/stats`."""

    def fact(tell: Callable[[], Any], *, once_ready: bool = False) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            if once_ready and not is_ready():
                raise web.HTTPServiceUnavailable(text="")
            told = tell()
            return web.Response() if told is None else json_response(told)

        return handle

    async def models(request: web.Request) -> web.Response:
        if not authorized(request):
            return json_response(UNAUTHORIZED, 401)
        return await fact(lambda: model_list(server.host), once_ready=True)(request)

    def tokens(body: JSON) -> JSON:
        answer = tokenized(server.host, body)
        if body.get("return_token_strs"):
            answer["token_strs"] = tokenizer.convert_ids_to_tokens(answer["tokens"])
        return answer

    def text(body: JSON) -> JSON:
        ids, known = body.get("tokens"), range(server.model.vocabulary_size)
        if not isinstance(ids, list) or not all(isinstance(index, int) and index in known for index in ids):
            raise ValueError("tokens: a list of ids of the vocabulary is required")
        return {"prompt": server.host.codec.decode(ids)}

    def converting(convert: Callable[[JSON], JSON]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                return json_response(convert(orjson.loads(await request.read())))
            except ValueError as error:
                return json_response(openai_error(400, str(error)), 400)

        return handle

    healthy, info = fact(lambda: None, once_ready=True), fact(lambda: model_info(server.host), once_ready=True)
    return (
        *(web.get(path, healthy) for path in ("/health", "/health_generate", "/ping")),
        *(web.get(path, info) for path in ("/get_model_info", "/model_info")),
        web.get("/v1/models", models),
        web.get("/version", fact(lambda: {"version": VERSION})),
        web.get("/weight_info", fact(lambda: {"weight_version": server.host.weight_version})),
        web.post("/tokenize", converting(tokens)),
        web.post("/detokenize", converting(text)),
        web.get("/fake/stats", fact(lambda: {**server.stats, "cpu_seconds": time.process_time()})),
    )
