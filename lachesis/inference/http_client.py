"""HTTP to one model server: bounded concurrency, bounded retries, keep-alive, plain JSON.

The client uses aiohttp and orjson because a call through the openai package costs milliseconds of CPU. It retries only
transient failures (no connection, timeout, 408, 425, 429, 5xx). A rejection is final. A cancelled call closes its
connection, and so the server stops generating.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, NoReturn, TypeAlias
from urllib.parse import unquote

import aiohttp
import orjson

from lachesis.inference.affinity import Route
from lachesis.inference.chat_format import finish_reasons
from lachesis.inference.errors import LOGIN, Asked, BadResponse, RequestRejected, ServerUnavailable, rejection
from lachesis.inference.http_session import HttpSessionOwner
from lachesis.inference.request_body import json_body
from lachesis.inference.sampling import LogprobsKind

_CONNECT_TIMEOUT = 15.0
_KEEP_ALIVE = 4.0  # below uvicorn's 5 s: the client closes idle connections, so no request hits a closing one
_RESTART = 5.0
"""Seconds without a request in which a server may have started again unnoticed, with another model."""
_RETRIED_STATUS = frozenset({408, 425, 429})
_GATEWAY_STATUS = frozenset({502, 503, 504})
_SESSION_HEADER: Final = re.compile(
    r"(?!(authorization|content-length|content-type|host|transfer-encoding|x-data-parallel-rank)$)[\w!#$%&'*+.^`|~-]*",
    re.ASCII | re.IGNORECASE,
)
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
Shorten: TypeAlias = Callable[[bytes], bytes]
"""Removes unused parts from a raw answer; see `HttpClient.send`."""
ARRAY: Final = "array"
"""The key under which `HttpAnswer.body` holds an answer that is a JSON array."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address of a model server and how to talk to it."""

    base_url: str
    """Includes the version, as for the openai package: `http://127.0.0.1:8000/v1`.

    A login in it (`http://user:password@host/v1`) is sent if there is no `api_key`.
    """
    model_name: str
    api_key: str = field(default="", repr=False)
    timeout: float = 1200.0
    """Seconds for one attempt, from connecting to the end of the answer."""
    max_concurrency: int = 512
    """Requests in flight at once."""
    max_eval_concurrency: int = 64
    """How many of these may have `split="eval"`. The `Balancer` enforces it."""
    weight: float = 1.0
    """Share of the requests that the `Balancer` sends here, relative to `weight * max_concurrency` of the others."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every request. The arguments of a call override it."""
    tool_call_parser: str | None = None
    """Reads calls from the text when the server returns none (Phase 1 servers without a parser)."""
    reasoning_field: Literal["reasoning_content", "reasoning"] | None = "reasoning_content"
    """The field that carries earlier reasoning back to the server. None omits it."""
    logprobs_mode: LogprobsKind | None = None
    """The kind of logprobs that the server was started with. None is the engine's default."""
    harmless_fields: tuple[str, ...] = ()
    """Fields of `extra_body` that `sampling_problem` does not know, and that do not change what is sampled."""
    max_retries: int = 6
    """Further attempts after a failed one."""
    first_retry_delay: float | None = None
    """Seconds before the first of them, where the server requests none; twice as long before each later one. None is
    0.5."""
    retry_deadline: float = 300.0
    """Seconds after which no further attempt starts. A call ends within `retry_deadline + timeout`."""
    session_header: str | None = None
    """Header that names the rollout, for routers. None is the API's default (`HttpClient.session_header`), "" sends
    none."""
    data_parallel_size: int = 1
    """Data-parallel ranks that the server balances itself. With more than one, each request names its rank."""
    routed_experts: bool = False
    """Whether every completion comes with the experts that processed its tokens (`Generation.experts`)."""
    sampling_mask: bool = False
    """Whether every completion comes with the ids that top-k, top-p and min-p left (`Generation.sampling_mask`)."""
    echo_limit: int | None = None
    """Tokens of the longest prompt that a token engine has repeated by the server, to compare its ids. Of longer ones
    only the length is compared. None is no limit."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The decoded body of a 200."""

    body: dict[str, Any]
    latency: float
    """Seconds that the successful attempt took."""
    attempts: int
    """Requests sent, failed ones included."""


class _Failed(Exception):
    """A transient failure of one attempt. `retry_after` is the delay in seconds that the server requests."""

    def __init__(self, cause: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(cause)


class HttpClient(HttpSessionOwner):
    """Requests to one server. It can be created without an event loop and used from one loop at a time."""

    session_header: ClassVar[str] = "X-Session-ID"
    """Read by vLLM, its router and many gateways."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.base_url = LOGIN.sub(r"\g<scheme>", settings.base_url.rstrip("/"))
        """Without a login: it appears in errors and records."""
        if settings.session_header is not None and not _SESSION_HEADER.fullmatch(settings.session_header):
            raise ValueError(
                f"openai.session_header {settings.session_header!r} cannot name the rollout: no header has this name, "
                "or the client sets it itself; take the one that the router reads"
            )
        self.outages = 0
        """Requests that found no server, and times without any: after one, another may be at the same address."""
        self.models: Sequence[str] = ()
        """What `check` found."""
        self.slowest = 0.0
        """Seconds of the slowest answer to a `send`; 0 before the first."""
        self._in_flight = 0
        self._waiting_since = self._answered_at = time.monotonic()
        self._gate = asyncio.Semaphore(settings.max_concurrency)

    @property
    def config(self) -> ServerSettings:
        """The settings, under Atropos' name."""
        return self.settings

    @property
    def root_url(self) -> str:
        """`base_url` without its version: the base of routes that are not part of OpenAI's API."""
        return self.base_url.removesuffix("/v1")

    @property
    def silence(self) -> float:
        """Seconds for which requests have waited, and none has ended."""
        return time.monotonic() - max(self._waiting_since, self._answered_at) if self._in_flight else 0.0

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return self._in_flight

    def finish_reasons(self, body: Mapping[str, Any]) -> Sequence[str]:
        """Those of an answer. The client retries after "error", and after "abort" unless it takes partial answers."""
        return finish_reasons(body)

    async def check(self) -> list[str]:
        """Return the names of the models. Requests no completion.

        Without a `/models` route, an answer of `/health` is enough. Raises `ServerUnavailable` at the first failure, or
        `Unauthorized`.
        """
        try:
            answer = await self._get("/models")
        except RequestRejected as error:
            if error.status not in (404, 405, 501):
                raise
            await self._get("/health", root=True)
            return []
        listed = answer.get("data")
        self.models = [str(model["id"]) for model in listed or () if isinstance(model, Mapping) and "id" in model]
        return list(self.models)

    async def post(
        self, path: str, payload: Mapping[str, Any], *, max_retries: int | None = None, route: Route | None = None
    ) -> HttpAnswer:
        """`send` to a route of OpenAI's API, with the model's name and the settings' `extra_body`."""
        named = {"model": self.settings.model_name, **self.settings.extra_body, **payload}
        return await self.send(self.base_url + path, named, max_retries=max_retries, route=route)

    def concurrency_slot(self) -> asyncio.Semaphore:
        """A context manager that holds one of the `max_concurrency` slots."""
        self._open_session()  # a new event loop gets a new gate
        return self._gate

    async def send(
        self,
        url: str,
        payload: Mapping[str, Any],
        *,
        max_retries: int | None = None,
        shorten: Shorten | None = None,
        in_slot: bool = False,
        route: Route | None = None,
        partial: bool = False,
    ) -> HttpAnswer:
        """POST `payload` until an attempt succeeds, the retries are used up or the deadline passes.

        Args:
            shorten: removes unused parts before decoding. If the result is not JSON, the whole answer is decoded.
            in_slot: the caller holds a `concurrency_slot`.
            route: the rollout and the rank that the headers name.
            partial: aborted completions are answers too.
        """
        headers = self._route_headers(route) if route is not None else None
        retries = self.settings.max_retries if max_retries is None else max_retries
        async with nullcontext() if in_slot else self.concurrency_slot():
            deadline = time.monotonic() + self.settings.retry_deadline
            for attempt in range(1, retries + 2):
                started = time.monotonic()
                try:
                    answer = await self._request(url, payload, shorten=shorten, headers=headers, partial=partial)
                    latency = time.monotonic() - started
                    self.slowest = max(self.slowest, latency)
                    return HttpAnswer(answer, latency, attempt)
                except _Failed as failure:
                    delay = retry_delay(attempt, failure.retry_after, self.settings.first_retry_delay)
                    if attempt > retries or time.monotonic() + delay > deadline:
                        self._give_up(failure, attempt)
                await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def _get(self, path: str, *, root: bool = False) -> dict[str, Any]:
        base = self.root_url if root else self.base_url
        try:
            return await self._request(base + path, None, expect_json=not root)
        except _Failed as failure:
            self._give_up(failure, 1)

    def _give_up(self, failure: _Failed, attempts: int) -> NoReturn:
        raise ServerUnavailable(self.base_url, str(failure), attempts) from failure.__cause__

    async def _request(
        self,
        url: str,
        payload: Mapping[str, Any] | None,
        *,
        expect_json: bool = True,
        shorten: Shorten | None = None,
        headers: Mapping[str, str] | None = None,
        partial: bool = False,
    ) -> dict[str, Any]:
        """One attempt: the decoded answer, `_Failed` for a transient failure, or the final error.

        Without a `payload` it is a GET.
        """
        session, method = self._open_session(), "GET" if payload is None else "POST"
        if not self._in_flight:
            self._waiting_since = time.monotonic()
            self.outages += self._waiting_since - self._answered_at > _RESTART
        self._in_flight += 1
        try:
            # No variable for the body: aiohttp frees what it has sent, and thousands of requests may be in flight.
            async with session.request(
                method, url, data=None if payload is None else json_body(payload), headers=headers
            ) as response:
                raw, status, answered = await response.read(), response.status, response.headers
        except TimeoutError as error:
            self.outages += 1
            reason = str(error) or f"no answer within {self.settings.timeout:g} s"
            raise _Failed(f"timeout: {reason}") from error
        except aiohttp.InvalidURL as error:
            raise BadResponse(self.base_url, f"{url!r} is not a URL") from error
        except (aiohttp.ClientError, OSError) as error:
            self.outages += 1
            raise _Failed(f"{type(error).__name__}: {error}") from error
        finally:
            self._in_flight -= 1
            self._answered_at = time.monotonic()
        short = raw if shorten is None else shorten(raw)
        answer = _decode(short)
        if answer is None and short is not raw:
            answer = _decode(raw)
        error_object = _error_of(answer)
        if status == 200 and error_object and "choices" not in (answer or {}):
            code = error_object.get("code")  # OpenRouter reports upstream failures under a 200
            status = code if isinstance(code, int) and code >= 400 else 502
        if status < 300:
            retried = ("error",) if partial else ("error", "abort")
            for reason in self.finish_reasons(answer or {}):
                if reason.startswith(retried):
                    raise _Failed(f"the server aborted the completion (finish_reason {reason!r})")
            if answer is None and expect_json:
                raise BadResponse(self.base_url, f"{url} answered {status} with no JSON object: {raw[:200]!r}")
            return answer or {}
        text = raw.decode("utf-8", "replace")
        self.outages += status in _GATEWAY_STATUS
        out_of_money = error_object.get("code") == "insufficient_quota"
        if (status in _RETRIED_STATUS or status >= 500) and status != 501 and not out_of_money:
            raise _Failed(f"status {status}: {text[:300]}", _retry_after(answered.get("Retry-After")))
        raise rejection(
            self.base_url,
            status,
            text,
            error_object,
            has_key=bool(self.settings.api_key),
            asked=Asked(url, self.settings.model_name, self.models),
        )

    def _route_headers(self, route: Route) -> dict[str, str]:
        """vLLM and SGLang read the rank from a header; it is a number from 0."""
        chosen = self.settings.session_header
        name = self.session_header if chosen is None else chosen
        headers = {name: route.session} if name and route.session else {}
        return headers if route.rank is None else {**headers, "X-Data-Parallel-Rank": str(route.rank)}

    def _new_session(self) -> aiohttp.ClientSession:
        headers = {"Content-Type": "application/json"}
        if self.settings.api_key:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        elif (found := LOGIN.match(self.settings.base_url)) and found["login"]:
            user, _, password = map(unquote, found["login"].partition(":"))
            headers["Authorization"] = f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"
        if self._session_loop is not asyncio.get_running_loop():
            self._gate = asyncio.Semaphore(self.settings.max_concurrency)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=self.settings.timeout, sock_connect=_CONNECT_TIMEOUT),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),  # a real one searches for cookies at every request
        )


def _decode(raw: bytes) -> dict[str, Any] | None:
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        try:
            answer = json.loads(raw)  # NaN logprobs, lone surrogates
        except (ValueError, RecursionError):
            return None
    if isinstance(answer, list):
        return {ARRAY: answer}
    return answer if isinstance(answer, dict) else None


def _error_of(answer: Mapping[str, Any] | None) -> dict[str, Any]:
    error = (answer or {}).get("error")
    if isinstance(error, Mapping):
        return dict(error)
    if isinstance(error, str):
        return {"message": error}
    if answer is not None and answer.get("object") == "error":  # vLLM before 0.10: the body itself is the error
        return dict(answer)
    return {}


def retry_delay(attempt: int, asked: float | None = None, first: float | None = None) -> float:
    """Seconds before the next attempt: the server's request, else exponential; jitter spreads the clients."""
    if asked is not None:
        return asked + random.uniform(0.0, min(1.0, 0.1 * asked))
    first = _FIRST_DELAY if first is None else first
    return min(_LONGEST_DELAY, first * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def _retry_after(header: str | None) -> float | None:
    """Seconds from a Retry-After header in either of its forms."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None
