"""HTTP to one model server: bounded concurrency, bounded retries, keep-alive, plain JSON.

The client uses aiohttp and orjson because a call through the openai package costs milliseconds of CPU. It retries only
transient failures: no connection, timeout, 408, 409, 425, 429, 5xx and their relatives, and answers without a whole
completion. A rejection is final. A cancelled call closes its connection, and so the server stops generating.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn, TypeAlias
from urllib.parse import unquote

import aiohttp

from backends.retry_after import retry_after
from lachesis_client.affinity import Route
from lachesis_client.chat_format import finish_reasons
from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import (
    LOGIN,
    Asked,
    BadResponse,
    ContextExhausted,
    ConversationRefused,
    InferenceError,
    RequestRejected,
    ServerUnavailable,
)
from lachesis_client.finish_words import Ending, ending
from lachesis_client.http_attempts import ARRAY as ARRAY
from lachesis_client.http_attempts import Failed, check_answer, decode, retry_delay
from lachesis_client.http_session import HttpSessionOwner
from lachesis_client.rejections import names_no_part, of_conversation, rejection
from lachesis_client.request_body import json_body
from lachesis_client.server_words import REFUSING, error_of, is_transient
from lachesis_client.streaming import STREAMED, AnswerStream
from lachesis_messages.messages import FinishReason

_CONNECT_TIMEOUT = 15.0
_KEEP_ALIVE = 4.0  # below uvicorn's 5 s: the client closes idle connections, so no request hits a closing one
_RESTART = 5.0
"""Seconds without a request in which a server may have started again unnoticed, with another model."""
_RETRIED_STATUS = frozenset({408, 409, 420, 424, 425, 429, 498, 499})
_FIRST_RETRIES = 2
"""Further attempts after an answer without a completion, from a server that has never given one: its address may be
wrong."""
_GATEWAY_STATUS = frozenset({502, 503, 504})
_SESSION_HEADER: Final = re.compile(
    r"(?!(authorization|content-length|content-type|host|transfer-encoding|x-data-parallel-rank)$)[\w!#$%&'*+.^`|~-]*",
    re.ASCII | re.IGNORECASE,
)
Shorten: TypeAlias = Callable[[bytes], bytes]
"""Removes unused parts from a raw answer; see `HttpClient.send`."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The decoded body of a 200."""

    body: dict[str, Any]
    latency: float
    """Seconds that the successful attempt took."""
    attempts: int
    """Requests sent, failed ones included."""


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
        sent = {name for name, value in settings.headers.items() if name and value.isprintable()}
        if refused := [name for name in settings.headers if name not in sent or not _SESSION_HEADER.fullmatch(name)]:
            raise ValueError(
                f"openai.headers has {', '.join(map(repr, refused))}: no header has this name or value, or the client "
                "sets it itself; leave it out (a key is openai.api_key)"
            )
        self.outages = 0
        """Requests that found no server, and times without any: after one, another may be at the same address."""
        self.models: Sequence[str] = ()
        """What `check` found."""
        self.slowest = 0.0
        """Seconds of the slowest answer to a `send`; 0 before the first."""
        self._in_flight = 0
        self._completed_at = 0.0
        """When it gave the last completion; 0 before the first."""
        self._continues = False
        """It has answered a conversation in which a model had said something."""
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
        """Those of an answer. The client retries after those of a server that broke off, and after "abort" unless it
        takes partial answers."""
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
        self,
        path: str,
        payload: Mapping[str, Any],
        *,
        max_retries: int | None = None,
        route: Route | None = None,
        stream: AnswerStream | None = None,
        check: Callable[[dict[str, Any]], object] | None = None,
        harmless: Callable[[], Mapping[str, Any]] | None = None,
        continues: Callable[[], bool] | None = None,
    ) -> HttpAnswer:
        """`send` to a route of OpenAI's API, with the model's name and the settings' `extra_body`."""
        named = {"model": self.settings.model_name, **self.settings.extra_body, **payload}
        return await self.send(
            self.base_url + path,
            named,
            max_retries=max_retries,
            route=route,
            stream=stream,
            check=check,
            harmless=None if harmless is None else lambda: {**named, **harmless()},
            continues=continues,
        )

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
        stream: AnswerStream | None = None,
        check: Callable[[dict[str, Any]], object] | None = None,
        harmless: Callable[[], Mapping[str, Any]] | None = None,
        continues: Callable[[], bool] | None = None,
    ) -> HttpAnswer:
        """POST `payload` until an attempt succeeds, the retries are used up or the deadline passes.

        Args:
            shorten: removes unused parts before decoding. If the result is not JSON, the whole answer is decoded.
            in_slot: the caller holds a `concurrency_slot`.
            route: the rollout and the rank that the headers name.
            partial: aborted completions are answers too.
            stream: asks for a stream, and gets its pieces.
            check: raises `BadResponse` for an answer that has no completion; the request is then sent again.
            harmless: makes the payload of another conversation, for a completion. After a 403 or 404 it tells whether
                the server refuses this conversation (`ConversationRefused`) or everybody.
            continues: whether the model has said something in this conversation. A 400 that names nothing is then about
                what was said, if the server takes the later turns of others.
        """
        headers = self._route_headers(route) if route is not None else None
        retries = self.settings.max_retries if max_retries is None else max_retries
        async with nullcontext() if in_slot else self.concurrency_slot():
            deadline = time.monotonic() + self.settings.retry_deadline
            for attempt in range(1, retries + 2):
                started = time.monotonic()
                try:
                    answer = await self._request(
                        url, payload, shorten=shorten, headers=headers, partial=partial, stream=stream
                    )
                    check_answer(answer, check)
                    ended = time.monotonic()
                    latency = ended - started
                    self.slowest = max(self.slowest, latency)
                    if harmless is not None:
                        self._completed_at = ended
                    if continues is not None and not self._continues:
                        self._continues = continues()
                    return HttpAnswer(answer, latency, attempt)
                except RequestRejected as refused:
                    if harmless is None or not self._may_be_meant(refused, continues):
                        raise
                    meant = await self._meant(refused, url, harmless(), headers, started)
                    if refused.status != 401 or not isinstance(meant, ConversationRefused):
                        raise meant from refused
                    # A key is not refused for what a conversation says: one of several machines has not heard of it.
                    delay = retry_delay(attempt, None, self.settings.first_retry_delay)
                    if attempt > retries:
                        raise ServerUnavailable(self.base_url, refused.reason, attempt) from refused
                except Failed as failure:
                    delay = retry_delay(attempt, failure.retry_after, self.settings.first_retry_delay)
                    enough = retries if failure.final is None or self._completed_at else min(retries, _FIRST_RETRIES)
                    if attempt > enough or time.monotonic() + delay > deadline:
                        self._give_up(failure, attempt)
                await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def _get(self, path: str, *, root: bool = False) -> dict[str, Any]:
        base = self.root_url if root else self.base_url
        try:
            return await self._request(base + path, None, expect_json=not root)
        except Failed as failure:
            self._give_up(failure, 1)

    def _may_be_meant(self, refused: RequestRejected, continues: Callable[[], bool] | None) -> bool:
        """Whether a rejection may be of one conversation, and its words do not tell."""
        if isinstance(refused, ContextExhausted | ConversationRefused):
            return False
        if refused.status in REFUSING or (refused.status == 401 and self._completed_at):
            return True
        unclear = self._continues and names_no_part(refused)
        return unclear and continues is not None and continues()

    async def _meant(
        self,
        refused: RequestRejected,
        url: str,
        harmless: Mapping[str, Any],
        headers: Mapping[str, str] | None,
        started: float,
    ) -> InferenceError:
        """What a rejection is about. The same words may be about one conversation (a moderation, a routing) or about
        the key and the model: the server answers others meanwhile, or it does not."""
        if self._completed_at < started:
            try:
                await self._request(url, harmless, headers=headers)
            except RequestRejected:
                if not self._completed_at:
                    return refused
                return ServerUnavailable(self.base_url, f"it refuses every request now: {refused.reason}", 2)
            except (Failed, BadResponse) as failure:
                return ServerUnavailable(self.base_url, f"{refused.reason}; then {failure}", 2)
            self._completed_at = time.monotonic()
        return ConversationRefused(self.base_url, refused.status, refused.body)

    def _give_up(self, failure: Failed, attempts: int) -> NoReturn:
        if failure.final is not None:
            raise failure.final from failure.__cause__
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
        stream: AnswerStream | None = None,
    ) -> dict[str, Any]:
        """One attempt: the decoded answer, `Failed` for a transient failure, or the final error.

        Without a `payload` it is a GET.
        """
        if stream is not None and payload is not None:
            payload = {**payload, **STREAMED}
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
                raw = await (response.read() if stream is None else stream.read(response))
                status, answered = response.status, response.headers
        except TimeoutError as error:
            self.outages += 1
            reason = str(error) or f"no answer within {self.settings.timeout:g} s"
            raise Failed(f"timeout: {reason}") from error
        except aiohttp.InvalidURL as error:
            raise BadResponse(self.base_url, f"{url!r} is not a URL") from error
        except (aiohttp.ClientError, OSError) as error:
            self.outages += 1
            raise Failed(_unsent(error)) from error
        finally:
            self._in_flight -= 1
            self._answered_at = time.monotonic()
        short = raw if shorten is None else shorten(raw)
        answer = decode(short)
        if answer is None and short is not raw:
            answer = decode(raw)
        error_object = error_of(answer)
        said = status
        if status == 200 and error_object:
            code = str(error_object.get("code"))  # OpenRouter reports upstream failures under a 200
            number = int(code) if code.isdecimal() else 0
            status, said = (number, number) if 400 <= number < 600 else (502, 400)
        if status < 300:
            for reason in self.finish_reasons(answer or {}):
                meant = ending(reason)
                if meant is Ending.BROKEN or (meant is FinishReason.ABORT and not partial):
                    raise Failed(f"the server broke the completion off (finish_reason {reason!r})")
            if answer is None and expect_json:
                nothing = BadResponse(self.base_url, f"{url} answered {status} with no JSON object: {raw[:200]!r}")
                if payload is None or not (self._completed_at or raw.lstrip()[:1] in (b"", b"{", b"[")):
                    raise nothing  # a page of another service
                raise Failed(nothing.reason, final=nothing)
            return answer or {}
        text = raw.decode("utf-8", "replace")
        self.outages += status in _GATEWAY_STATUS
        if payload is not None and (about := of_conversation(self.base_url, said, text, error_object)) is not None:
            raise about
        out_of_money = error_object.get("code") == "insufficient_quota"
        may_pass = status in _RETRIED_STATUS or status >= 500 or (payload is not None and is_transient(status, text))
        if may_pass and status != 501 and not out_of_money:
            pause = retry_after(answered.get("Retry-After"), answered.get("Date"))
            raise Failed(f"status {status}: {text[:300]}", pause)
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
        headers = {"Content-Type": "application/json", **self.settings.headers}
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


def _unsent(error: Exception) -> str:
    """Why a request has no answer: aiohttp calls plain HTTP `ssl:default`, and has the system's word in brackets."""
    system = getattr(error, "os_error", None)
    if not isinstance(system, OSError):
        return f"{type(error).__name__}: {error}"
    number = system.errno or 0  # those of name servers are negative
    return f"cannot connect: {os.strerror(number) if number > 0 else system.strerror or system}"
