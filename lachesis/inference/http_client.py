"""HTTP to one model server: bounded concurrency, bounded retries, keep-alive, plain JSON.

aiohttp and orjson, because the openai package costs milliseconds of CPU a call. Only what may pass by itself is retried
(no connection, timeout, 408, 425, 429, 5xx); a rejection is final, and a cancelled call closes its connection, which is
how a server learns to stop generating.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn, TypeAlias

import aiohttp
import orjson
from yarl import URL

from lachesis.inference import wire
from lachesis.inference.errors import BadResponse, RequestRejected, ServerUnavailable, rejection
from lachesis.inference.request_body import json_body
from lachesis.inference.sampling import LogprobsKind
from lachesis.inference.scoped import Closing

_CONNECT_TIMEOUT = 15.0
_KEEP_ALIVE = 4.0  # below uvicorn's 5 s, so that it is we who close an idle connection and no request meets its end
_RETRIED_STATUS = frozenset({408, 425, 429})
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0
Echo: TypeAlias = Callable[[], bytes]
Shorten: TypeAlias = Callable[[bytes], bytes]
"""An answer without parts of it that nobody reads; see `send`."""
ARRAY: Final = "array"
"""The key under which `Answer.body` holds an answer that is a JSON array (several completions of one request)."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where a model is served, and how to talk to it."""

    base_url: str
    """With its version, as for the openai package: `http://127.0.0.1:8000/v1`."""
    model_name: str
    api_key: str = field(default="", repr=False)
    timeout: float = 1200.0
    """Seconds for one attempt, connection and whole answer included."""
    max_concurrency: int = 512
    """Requests in flight at once."""
    max_eval_concurrency: int = 64
    """Of these, requests with `split="eval"`; the `Router` holds it."""
    weight: float = 1.0
    """The share of requests that the `Router` sends here, relative to `weight * max_concurrency` of the others."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every request; the arguments of a call win over it."""
    tool_call_parser: str | None = None
    """Reads calls out of the text when the server returns none of its own (Phase 1 servers without a parser)."""
    reasoning_field: Literal["reasoning_content", "reasoning"] | None = "reasoning_content"
    """Under which field earlier reasoning is sent back; None leaves it out."""
    logprobs_mode: LogprobsKind | None = None
    """What a token engine's logprobs are of, where a switch at its start decides. None: what it does without one."""
    max_retries: int = 6
    """Further attempts after a failed one."""
    retry_deadline: float = 300.0
    """Seconds after which no further attempt starts; a call thus ends within `retry_deadline + timeout`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A 200, decoded; seconds of the attempt that brought it, and how many attempts there were."""

    body: dict[str, Any]
    latency: float
    attempts: int


class _Failed(Exception):
    """An attempt that may be repeated. `retry_after` is the delay that the server asked for, in seconds."""

    def __init__(self, cause: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(cause)


class HttpClient(Closing):
    """Requests to one server. Usable from one event loop at a time; made without one."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.base_url = settings.base_url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gate: asyncio.Semaphore = asyncio.Semaphore(settings.max_concurrency)
        self._urls: dict[str, URL] = {}

    @property
    def root_url(self) -> str:
        """`base_url` without its version: where the routes are that belong to a server and not to OpenAI's API."""
        return self.base_url.removesuffix("/v1")

    def broken_off(self, body: Mapping[str, Any]) -> str | None:
        """Why the server gave this completion up half-written, which is worth another attempt; None if it did not."""
        reason = wire.broken_off(body)
        return f"finish_reason {reason!r}" if reason else None

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def check(self) -> list[str]:
        """Ask for the models (free, no completion) and return their names.

        Raises `ServerUnavailable` at the first failure, or `Unauthorized`. A server without a `/models` route counts as
        well if its `/health` answers.
        """
        try:
            answer = await self._get("/models")
        except RequestRejected as error:
            if error.status not in (404, 405, 501):
                raise
            await self._get("/health", root=True)
            return []
        listed = answer.get("data")
        return [str(model["id"]) for model in listed or () if isinstance(model, Mapping) and "id" in model]

    async def post(self, path: str, payload: Mapping[str, Any], *, max_retries: int | None = None) -> Answer:
        """`send` with the model's name and the settings' `extra_body`, as OpenAI's routes take them."""
        named = {"model": self.settings.model_name, **self.settings.extra_body, **payload}
        return await self.send(self.base_url + path, named, max_retries=max_retries)

    async def send(
        self,
        url: str,
        payload: Mapping[str, Any],
        *,
        max_retries: int | None = None,
        echo: Echo | None = None,
        shorten: Shorten | None = None,
    ) -> Answer:
        """POST `payload` as it is until an attempt answers, the retries are used up or the deadline passes.

        `echo` gives a field as JSON text, `"name":value`, that the server may repeat; a verbatim copy is read as null,
        for comparing a long prompt as text takes a hundredth of the time that reading its numbers does. `shorten` takes
        out what need not be read at all; where that leaves no JSON, the answer is read as it came.
        """
        async with self.place():
            return await self.send_at_once(url, payload, max_retries=max_retries, echo=echo, shorten=shorten)

    def place(self) -> asyncio.Semaphore:
        """One of the `max_concurrency` places, to be held while requests that belong together are sent `at_once`."""
        self._open_session()  # a new event loop gets a new gate
        return self._gate

    async def send_at_once(
        self,
        url: str,
        payload: Mapping[str, Any],
        *,
        max_retries: int | None = None,
        echo: Echo | None = None,
        shorten: Shorten | None = None,
    ) -> Answer:
        """`send` for who holds a place already."""
        settings, session = self.settings, self._open_session()
        retries = settings.max_retries if max_retries is None else max_retries
        deadline = time.monotonic() + settings.retry_deadline
        for attempt in range(1, retries + 2):
            started = time.monotonic()
            try:
                answer = await self._request(session, "POST", url, payload, echo=echo, shorten=shorten)
                return Answer(answer, time.monotonic() - started, attempt)
            except _Failed as failure:
                delay = _delay(attempt, failure.retry_after)
                if attempt > retries or time.monotonic() + delay > deadline:
                    self._give_up(failure, attempt)
            await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def _get(self, path: str, *, root: bool = False) -> dict[str, Any]:
        base = self.root_url if root else self.base_url
        try:
            return await self._request(self._open_session(), "GET", base + path, None, expect_json=not root)
        except _Failed as failure:
            self._give_up(failure, 1)

    def _give_up(self, failure: _Failed, attempts: int) -> NoReturn:
        raise ServerUnavailable(self.base_url, str(failure), attempts) from failure.__cause__

    async def _request(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        payload: Mapping[str, Any] | None,
        *,
        expect_json: bool = True,
        echo: Echo | None = None,
        shorten: Shorten | None = None,
    ) -> dict[str, Any]:
        """One attempt: the decoded answer, `_Failed` for what may pass by itself, or the final error."""
        to = self._parsed(url)
        try:
            # No name for the body: thousands of requests may be in flight, and aiohttp lets go of what it has sent.
            async with session.request(method, to, data=None if payload is None else json_body(payload)) as response:
                raw, status, headers = await response.read(), response.status, response.headers
        except TimeoutError as error:
            reason = str(error) or f"no answer within {self.settings.timeout:g} s"
            raise _Failed(f"timeout: {reason}") from error
        except aiohttp.InvalidURL as error:
            raise BadResponse(self.base_url, f"{url!r} is not a URL") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(f"{type(error).__name__}: {error}") from error
        told = raw if echo is None else _without_echo(raw, echo())
        short = told if shorten is None else shorten(told)
        answer = _decode(short)
        if answer is None and short is not told:
            answer = _decode(told)
        error_object = _error_of(answer)
        if status == 200 and error_object and "choices" not in (answer or {}):
            code = error_object.get("code")  # OpenRouter reports upstream failures under a 200
            status = code if isinstance(code, int) and code >= 400 else 502
        if status < 300:
            if answer is not None and (broken := self.broken_off(answer)):
                raise _Failed(f"the server broke the completion off ({broken})")
            if answer is None and expect_json:
                raise BadResponse(self.base_url, f"{url} answered {status} with no JSON object: {raw[:200]!r}")
            return answer or {}
        text = raw.decode("utf-8", "replace")
        out_of_money = error_object.get("code") == "insufficient_quota"
        if (status in _RETRIED_STATUS or status >= 500) and status != 501 and not out_of_money:
            raise _Failed(f"status {status}: {text[:300]}", _retry_after(headers.get("Retry-After")))
        raise rejection(self.base_url, status, text, error_object, has_key=bool(self.settings.api_key))

    def _parsed(self, url: str) -> URL:
        """The few URLs that there are, each taken apart once."""
        parsed = self._urls.get(url)
        if parsed is None:
            try:
                parsed = self._urls[url] = URL(url)
            except ValueError as error:
                raise BadResponse(self.base_url, f"{url!r} is not a URL") from error
        return parsed

    def _open_session(self) -> aiohttp.ClientSession:
        """The session of the running loop. A session of an earlier, finished loop is left to the garbage collector."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            headers = {"Content-Type": "application/json"}
            if self.settings.api_key:
                headers["Authorization"] = f"Bearer {self.settings.api_key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
                timeout=aiohttp.ClientTimeout(total=self.settings.timeout, sock_connect=_CONNECT_TIMEOUT),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),  # one that keeps cookies looks for them at every request
            )
            if self._loop is not loop:
                self._gate = asyncio.Semaphore(self.settings.max_concurrency)
            self._loop = loop
        return self._session


def _without_echo(raw: bytes, field: bytes) -> bytes:
    # Looked for by its name: a search for all of a long prompt costs more than to read it as numbers.
    name = field[: field.index(b":") + 1]
    parts: list[bytes] = []
    done, at = 0, raw.find(name)
    while at >= 0:
        behind = at + len(name)
        if raw.startswith(field, at):
            parts += (raw[done:behind], b"null")
            done = behind = at + len(field)
        at = raw.find(name, behind)
    return b"".join((*parts, raw[done:])) if parts else raw


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


def _delay(attempt: int, asked: float | None) -> float:
    """Seconds before the next attempt: what the server asked for, else exponential; jitter parts the crowd."""
    if asked is not None:
        return asked + random.uniform(0.0, min(1.0, 0.1 * asked))
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def _retry_after(header: str | None) -> float | None:
    """Seconds, from a Retry-After header in either of its forms."""
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
