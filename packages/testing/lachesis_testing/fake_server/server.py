"""The fake server: one event loop for thousands of concurrent requests. A library, and the command `fake-server`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import IO, Any, ClassVar

import orjson
from aiohttp import web

from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import LogprobsKind
from lachesis_testing.fake_server.answers import JSON_TYPE, cache_key, send_half, written
from lachesis_testing.fake_server.completions import Call, Policy
from lachesis_testing.fake_server.control import control_routes, keep_updating
from lachesis_testing.fake_server.engine import FakeEngine
from lachesis_testing.fake_server.facts import UNAUTHORIZED, fact_routes
from lachesis_testing.fake_server.faults import (
    WIRE,
    Fault,
    Occasion,
    drawn,
    fault_plan,
    truncated,
)
from lachesis_testing.fake_server.host import Host
from lachesis_testing.fake_server.model import FakeModel
from lachesis_testing.fake_server.policies import RandomWords, Speaker, as_policy
from lachesis_testing.fake_server.prefix_cache import Ranks
from lachesis_testing.fake_server.seen import Seen
from lachesis_testing.fake_server.tokenizer import IMAGE_TOKEN, Codec, fake_tokenizer
from lachesis_testing.fake_server.updates import PauseMode
from lachesis_tokens.model_routes.atropos import AtroposRoute
from lachesis_tokens.model_routes.chat import ChatRoute
from lachesis_tokens.model_routes.host import (
    JSON,
    ModelRoute,
    openai_error,
)
from lachesis_tokens.model_routes.requests import Rejected
from lachesis_tokens.model_routes.sglang import SGLangRoute
from lachesis_tokens.model_routes.vllm import CompletionsRoute, GenerateRoute
from lachesis_tokens.wire.service import WebService, has_bearer, json_response


class FakeServer(FakeEngine, WebService):
    """An HTTP server with the routes of vLLM, SGLang, OpenAI and Atropos, and no model; an async context manager.

    Args:
        policy: answers requests: a `Policy`, a function of the `Ask`, or a constant text. Default: `RandomWords()`. If
            it raises, the server answers 400 with the error.
        faults: names of `Fault`, each with a probability or the numbers of the requests; a list of names always occurs.
        tokenizer: a transformers fast tokenizer. Default: `fake_tokenizer()`.
        seed: the model's weights and all random numbers. The same seed, prompt and index give the same completion. With
            `vary`, each further request for a prompt gets another completion. A request's own `seed` has precedence.
        latency: seconds from the request to the answer, a number or (least, most). `tokens_per_second` adds time for
            the longest completion.
        max_concurrency: requests that are processed at once. The others wait.
        prefix_cache: tokens that each data-parallel rank keeps. 0 caches nothing.
        data_parallel_size: ranks, each with its own cache. A request names one, or gets the next in turn.
        prefill_tokens_per_second: time for the uncached tokens of a prompt; a rank computes one prompt at a time.
        logprobs_mode: vLLM's `--logprobs-mode`: "raw" or "processed". The SGLang route has "temperature", as in SGLang.
        mean_length: tokens of what `RandomTokens` samples. None makes the end of turn as likely as any other token.
        experts: (layers, experts of a token in each, experts of a layer) of a mixture of experts, which answers report.
            The server reports none by default.
        sampling_mask: whether `/inference/v1/generate` reports the ids that top-k, top-p and min-p left, as vLLM with
            --return-sampling-mask. The SGLang route does if the request asks for it.
        update_every: seconds between weight updates, each with a new version ("1", "2", ...) and another model, after
            a pause of `update_pause` seconds. Requests in flight are aborted, or with `update_mode` "keep" go on with
            the new weights, or with "wait" end first.
        images: whether the model takes images, by Qwen-VL's tokens, which `tokenizer` must have (the default one then
            does). `/inference/v1/generate` and SGLang's `/generate` take PNG images: a token for each 28 x 28 pixels.
        slow_start: seconds until it is ready. Until then it answers 503, or with `refuse_until_ready` refuses
            connections.
        absent: routes that answer 404, as at a proxy that passes on only some: `["/tokenize"]`.
        keep_requests: the number of latest requests in `requests`.
        record: a file that gets a JSON line for each request (`Seen.record`).
    """

    title: ClassVar[str] = "the fake server"

    def __init__(
        self,
        policy: Policy | Speaker | str | None = None,
        *,
        faults: Mapping[str, Occasion] | Iterable[str] = (),
        tokenizer: Any = None,
        seed: int = 0,
        vary: bool = False,
        model_name: str = "fake",
        weight_version: str = "default",
        context_length: int = 32768,
        api_key: str = "",
        logprobs_mode: LogprobsKind = "raw",
        tool_call_parser: str | None = "hermes",
        mean_length: float | None = 64.0,
        latency: float | tuple[float, float] = 0.0,
        tokens_per_second: float | None = None,
        max_concurrency: int | None = None,
        prefix_cache: int = 0,
        data_parallel_size: int = 1,
        prefill_tokens_per_second: float | None = None,
        experts: tuple[int, int, int] | None = None,
        sampling_mask: bool = False,
        images: bool = False,
        update_every: float | None = None,
        update_mode: PauseMode = "abort",
        update_pause: float = 0.0,
        slow_start: float = 0.0,
        refuse_until_ready: bool = False,
        retry_after: float = 1.0,
        absent: Collection[str] = (),
        keep_requests: int = 10_000,
        record: str | Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        WebService.__init__(self, host, port, has_token=bool(api_key), others="give it an api_key")
        self.tokenizer = fake_tokenizer(images=images) if tokenizer is None else tokenizer
        self.codec = Codec(self.tokenizer)
        model = FakeModel(self.codec.vocabulary_size, seed, end_ids=self.codec.end_ids, mean_length=mean_length)
        FakeEngine.__init__(
            self,
            Host(
                self.codec,
                model,
                model_name,
                weight_version,
                context_length,
                logprobs_mode,
                tool_call_parser,
                experts,
                sampling_mask,
                self.codec.encode(IMAGE_TOKEN)[0] if images else None,
            ),
            as_policy(policy) if policy is not None else RandomWords(),
            faults=fault_plan(faults),
            seed=seed,
            vary=vary,
            latency=latency if isinstance(latency, tuple) else (latency, latency),
            tokens_per_second=tokens_per_second,
            ranks=Ranks(data_parallel_size, prefix_cache, prefill_tokens_per_second),
            prefills=prefix_cache > 0 or prefill_tokens_per_second is not None,
        )
        self.api_key = api_key
        self.max_concurrency = max_concurrency
        self.update_every, self.update_mode, self.update_pause = update_every, update_mode, update_pause
        self.slow_start = slow_start
        self.refuse_until_ready = refuse_until_ready
        self.retry_after = retry_after
        self.absent = absent
        self.requests: deque[Seen] = deque(maxlen=keep_requests)
        """The latest requests for completions, oldest first."""
        self._record_path = Path(record) if record is not None else None
        self._record: IO[bytes] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._answers: dict[str, bytes] = {}
        """Of the cache that `Fault.REPLAYED` puts in front."""
        self._updating: asyncio.Task[None] | None = None

    def settings(self, **overrides: Any) -> ServerSettings:
        """Settings for a client of this server."""
        named = {"base_url": self.base_url, "model_name": self.host.model_name, "api_key": self.api_key}
        if self.host.logprobs_mode == "processed":
            named["logprobs_mode"] = "processed"
        return ServerSettings(**{**named, **overrides})

    async def start(self) -> None:
        """Bind the port and start to answer."""
        self._ready = asyncio.Event()
        self._slots = asyncio.Semaphore(self.max_concurrency or sys.maxsize)
        if self._record_path is not None:
            self._record = self._record_path.open("ab")
        await super().start()
        if self.update_every is not None:
            updating = keep_updating(self, self.update_every, self.update_mode, self.update_pause)
            self._updating = asyncio.create_task(updating)

    async def _listen(self, site: web.BaseSite) -> None:
        if not self.refuse_until_ready:
            await site.start()
        self._opening = asyncio.create_task(self._open(site))
        if not self.slow_start:
            await self._opening

    async def _open(self, site: web.BaseSite) -> None:
        if self.slow_start:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), self.slow_start)
        self._ready.set()
        if self.refuse_until_ready:  # the socket was bound and not listening, so connections were refused
            await site.start()

    def become_ready(self) -> None:
        """End the slow start now."""
        self._ready.set()

    async def started(self) -> None:
        """Wait until the slow start is over."""
        if self._opening is not None:
            await asyncio.shield(self._opening)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._updating is not None:
            self._updating.cancel()
            self._updating = None
        if self._opening is not None:
            self._opening.cancel()
            with suppress(asyncio.CancelledError):
                await self._opening
            self._opening = None
        await super().stop()
        if self._record is not None:
            self._record.close()
            self._record = None

    def routes(self) -> Iterable[web.RouteDef]:
        """Those of `docs/fake-server.md`."""
        sglang, atropos = SGLangRoute(), AtroposRoute()
        by_path: Mapping[str, ModelRoute] = {
            "/v1/completions": CompletionsRoute(),
            "/v1/chat/completions": ChatRoute(),
            "/inference/v1/generate": GenerateRoute(),
        }
        every = (
            *(web.post(path, self._handler(lambda body, route=route: route)) for path, route in by_path.items()),
            web.post("/generate", self._handler(lambda body: atropos if "prompt" in body else sglang)),
            *fact_routes(self, self.tokenizer, is_ready=lambda: self.ready, authorized=self.authorized),
            *control_routes(self),
        )
        return [each for each in every if each.path not in self.absent]

    def _handler(self, choose: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            try:
                body = orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                return json_response(openai_error(400, f"Invalid JSON: {error}"), 400)
            if not isinstance(body, dict):
                return json_response(openai_error(400, "The body must be a JSON object."), 400)
            return await self._serve(request, choose(body), body)

        return handle

    async def _serve(self, request: web.Request, route: ModelRoute, body: JSON) -> web.StreamResponse:
        number, stats = self.stats["requests"], self.stats
        seen = Seen(number, route.name, body, request.headers, time.monotonic())
        stats["requests"] += 1
        stats[f"requests.{route.name}"] += 1
        stats["in_flight"] += 1
        stats["most_in_flight"] = max(stats["most_in_flight"], stats["in_flight"])
        self.requests.append(seen)
        try:
            return await self._answer(request, route, seen)
        except Rejected as rejected:
            status = rejected.status
            if seen.state == "open":
                seen.status, seen.state = status, "rejected"
                stats[f"status.{status}"] += 1
            failure = UNAUTHORIZED if status == 401 else route.failure(status, str(rejected), rejected.param)
            if isinstance(failure, str):
                return web.Response(text=failure, status=status, headers=rejected.headers)
            return json_response(failure, status, rejected.headers)
        except asyncio.CancelledError:
            seen.state = "cancelled"
            stats["cancelled"] += 1
            raise
        finally:
            stats["in_flight"] -= 1
            seen.seconds = time.monotonic() - seen.started
            if self._record is not None:
                self._record.write(orjson.dumps(seen.record()) + b"\n")
                self._record.flush()

    async def _answer(self, request: web.Request, route: ModelRoute, seen: Seen) -> web.StreamResponse:
        if not self.authorized(request):
            raise Rejected("Unauthorized", 401)
        if not self.ready:
            raise Rejected("The model is still loading.", 503)
        rng = Random(f"{self.seed}/wire/{seen.number}") if self.faults else None
        faults = drawn(self.faults, WIRE, seen.number, rng) if rng is not None else []
        for fault in faults:
            seen.faults.append(fault)
            self.stats[f"faults.{fault}"] += 1
            await self._fail(request, seen, fault)
        try:
            seen.call = call = Call.of(route.read(self.host, seen.body))
            seen.rank = self.ranks.choose(route.rank(seen.body, request.headers))
        except ValueError as error:
            raise Rejected(str(error), route.rejects_with) from error
        if Fault.TRUNCATED_PROMPT in faults:
            seen.call = call = truncated(call)
        cached = cache_key(seen, call, faults)
        if cached in self._answers:
            seen.status, seen.state = 200, "answered"
            self.stats["status.200"] += 1
            return web.Response(body=self._answers[cached], content_type=JSON_TYPE)
        with self.flow.request(_names(request, seen.body)) as running:
            self.stats["waiting"] += 1
            try:
                await self.flow.begin(running)
                await self._slots.acquire()
            finally:
                self.stats["waiting"] -= 1
            try:
                host = await self.work(route, seen, call, running)
            finally:
                self._slots.release()
        payload = written(route, host, seen, call, faults, rng)
        if cached:
            self._answers[cached] = payload
        seen.status = 200
        if Fault.CUT_BODY in faults:
            seen.state = "cut"
            return await send_half(request, payload)
        if Fault.NOT_JSON in faults:
            seen.state = "cut"
            return web.Response(text="<html><body><h1>It works!</h1></body></html>", content_type="text/html")
        seen.state = "answered"
        self.stats["status.200"] += 1
        return web.Response(body=payload, content_type=JSON_TYPE)

    async def _fail(self, request: web.Request, seen: Seen, fault: Fault) -> None:
        """Raise, or never return, for faults without an answer."""
        match fault:
            case Fault.RATE_LIMITED:
                headers = {"Retry-After": f"{self.retry_after:g}"}
                raise Rejected("Too many requests.", 429, headers=headers)
            case Fault.SERVER_ERROR:
                raise Rejected("The engine died.", 500)
            case Fault.UNAVAILABLE:
                raise Rejected("The server is overloaded.", 503)
            case Fault.HANG:
                await asyncio.Event().wait()
            case Fault.DISCONNECT:
                seen.state = "cut"
                if request.transport is not None:
                    request.transport.abort()
                raise Rejected("The connection is closed.", 500)

    @property
    def ready(self) -> bool:
        """The slow start is over."""
        return self._ready.is_set()

    def authorized(self, request: web.Request) -> bool:
        return not self.api_key or has_bearer(request, self.api_key)


def _names(request: web.Request, body: Mapping[str, Any]) -> frozenset[str]:
    """The names by which a client may abort its request."""
    given = (body.get("request_id"), body.get("rid"), request.headers.get("X-Request-Id"))
    return frozenset(name for name in given if isinstance(name, str))
