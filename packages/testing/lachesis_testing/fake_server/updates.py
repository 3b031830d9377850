"""Pausing, resuming and aborting of requests for weight updates, and the control routes of vLLM and SGLang for these.

A request in flight has sampled `tokens_per_second` since its latency ended; without a speed, all of its tokens come at
the end. Whether a token was sampled before an interrupt therefore depends on the time alone, never on what follows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args
from zlib import crc32

import orjson
from aiohttp import web

from lachesis_tokens.model_routes.host import JSON
from lachesis_tokens.wire.service import json_response

if TYPE_CHECKING:
    from lachesis_testing.fake_server.server import FakeServer

PauseMode: TypeAlias = Literal["abort", "keep", "wait"]
"""What happens to requests in flight: they are answered with what they have, or frozen, or they end first."""
_OF_SGLANG: Final[Mapping[str, PauseMode]] = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class Running:
    """A request in flight. `ids` are the names by which its client may abort it."""

    __slots__ = ("_interrupted", "aborted", "begun", "ids")

    def __init__(self, ids: frozenset[str]) -> None:
        self.ids = ids
        self.begun = False
        """It did not arrive during a pause, or the pause is over."""
        self.aborted = False
        self._interrupted = asyncio.Event()

    def interrupt(self, *, abort: bool) -> None:
        """Stop its sampling: for good, or until the server goes on."""
        self.aborted = self.aborted or abort
        self._interrupted.set()

    async def undisturbed(self, seconds: float) -> bool:
        """Sleep. False, and at once, if the request is interrupted."""
        try:
            async with asyncio.timeout(seconds):
                await self._interrupted.wait()
        except TimeoutError:
            return True
        return False

    def take_interrupt(self) -> bool:
        """Whether it was interrupted since the last call."""
        interrupted = self._interrupted.is_set()
        self._interrupted.clear()
        return interrupted


class Flow:
    """Whether the server samples, and its requests in flight."""

    def __init__(self) -> None:
        self.paused = False
        self.running: set[Running] = set()
        self._changed = asyncio.Event()

    @contextmanager
    def request(self, ids: frozenset[str]) -> Iterator[Running]:
        """A request, from its arrival to its answer."""
        running = Running(ids)
        self.running.add(running)
        try:
            yield running
        finally:
            self.running.remove(running)
            self._wake()

    async def begin(self, running: Running) -> None:
        """Wait while the server is paused, unless the request is aborted."""
        while self.paused and not running.aborted:
            await self._changed.wait()
        running.begun = True

    async def unfrozen(self, running: Running) -> None:
        """`begin` again, if the request was interrupted."""
        while running.take_interrupt():
            await self.begin(running)

    async def idle(self) -> None:
        """Wait until all requests that have begun have ended."""
        while any(each.begun for each in self.running):
            await self._changed.wait()

    def pause(self, mode: PauseMode) -> None:
        """Start no request and, except with "wait", sample no further token until `resume`."""
        self.paused = True
        if mode != "wait":
            self.interrupt(abort=mode == "abort")

    def resume(self) -> None:
        self.paused = False
        self._wake()

    def interrupt(self, ids: Collection[str] = (), *, abort: bool) -> int:
        """Interrupt the requests with these ids, or all; how many."""
        chosen = [each for each in self.running if not ids or not each.ids.isdisjoint(ids)]
        for each in chosen:
            each.interrupt(abort=abort)
        self._wake()
        return len(chosen)

    def _wake(self) -> None:
        """All waits look at the state again."""
        self._changed.set()
        self._changed = asyncio.Event()


def control_routes(server: FakeServer) -> Iterable[web.RouteDef]:
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


async def keep_updating(server: FakeServer, every: float, mode: PauseMode, pause: float) -> None:
    """New weights every `every` seconds, each after a pause of `pause` seconds. The versions are "1", "2", ..."""
    version = 0
    while True:
        await asyncio.sleep(every)
        version += 1
        await server.pause(mode)
        await asyncio.sleep(pause)
        server.update_weights(str(version), seed=server.seed + version)
        server.resume()
