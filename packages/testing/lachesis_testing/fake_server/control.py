"""The control routes of vLLM and SGLang for weight updates, and updates that come by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, get_args
from zlib import crc32

import orjson
from aiohttp import web

from lachesis_testing.fake_server.engine import FakeEngine
from lachesis_testing.fake_server.updates import PauseMode
from lachesis_tokens.model_routes.host import JSON
from lachesis_tokens.wire.service import json_response

_OF_SGLANG: Final[Mapping[str, PauseMode]] = {"abort": "abort", "retract": "keep", "in_place": "keep"}


def control_routes(server: FakeEngine) -> Iterable[web.RouteDef]:
    """Those of vLLM with `VLLM_SERVER_DEV_MODE=1`, and those of SGLang."""

    def route(path: str, act: Callable[[JSON, web.Request], Any]) -> web.RouteDef:
        async def handle(request: web.Request) -> web.Response:
            raw = await request.read()
            body = orjson.loads(raw) if raw else {}
            try:
                found = act(body if isinstance(body, dict) else {}, request)
                return json_response(await found if asyncio.iscoroutine(found) else found)
            except (KeyError, ValueError) as error:
                return json_response({"error": str(error)}, 400)

        return web.post(path, handle)

    async def pause(mode: str, known: Mapping[str, PauseMode], answer: JSON) -> JSON:
        if mode not in known:
            raise ValueError(f"Invalid mode: {mode!r}; expected one of {', '.join(known)}")
        await server.pause(known[mode])
        return answer

    def resume(answer: JSON) -> JSON:
        server.resume()
        return answer

    def abort(ids: Collection[str]) -> JSON:
        return {"status": "aborted", "aborted": server.abort_requests(ids)}

    def new_weights(path: str, version: str | None) -> None:
        """A path names the weights: the same path gives the same model."""
        server.update_weights(version or server.host.weight_version, seed=crc32(path.encode()))

    def named(version: str) -> JSON:
        server.update_weights(version, seed=server.model.seed)
        return {"success": True, "new_version": version}

    def rpc(body: JSON) -> JSON:
        if body.get("method") != "reload_weights":
            raise ValueError("The fake server knows no other method than reload_weights.")
        new_weights(str((body.get("kwargs") or {}).get("weights_path")), None)
        return {"results": [None]}

    def from_disk(body: JSON) -> JSON:
        if body.get("abort_all_requests"):
            server.abort_requests()
        new_weights(str(body["model_path"]), body.get("weight_version"))
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def is_paused(request: web.Request) -> web.Response:
        return json_response({"is_paused": server.flow.paused})

    of_vllm: dict[str, PauseMode] = {mode: mode for mode in get_args(PauseMode)}
    return (
        route("/pause", lambda body, at: pause(at.query.get("mode", "abort"), of_vllm, {"status": "paused"})),
        route("/resume", lambda body, at: resume({"status": "resumed"})),
        route("/abort_requests", lambda body, at: abort(body.get("request_ids") or ())),
        route("/update_weight_version", lambda body, at: named(body["new_version"])),
        route("/collective_rpc", lambda body, at: rpc(body)),
        web.get("/is_paused", is_paused),
        route("/pause_generation", lambda body, at: pause(body.get("mode", "abort"), _OF_SGLANG, {"status": "ok"})),
        route("/continue_generation", lambda body, at: resume({"status": "ok"})),
        route("/abort_request", lambda body, at: abort(() if body.get("abort_all") else [body["rid"]])),
        route("/update_weights_from_disk", lambda body, at: from_disk(body)),
    )


async def keep_updating(server: FakeEngine, every: float, mode: PauseMode, pause: float) -> None:
    """New weights every `every` seconds, each after a pause of `pause` seconds. The versions are "1", "2", ..."""
    version = 0
    while True:
        await asyncio.sleep(every)
        version += 1
        await server.pause(mode)
        await asyncio.sleep(pause)
        server.update_weights(str(version), seed=server.seed + version)
        server.resume()
