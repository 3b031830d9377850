"""Client of the rollout API: Atropos' `run-api`, or `lachesis api`.

The stock API keeps all its state in memory, and neither its process nor a request has an id. A group that reaches a new
process before a trainer has registered there makes that process unusable. The client therefore keeps one connection
alive, and sends a group only over the connection on which the API has just confirmed the registration of the
environment (`RolloutApi.send`). A new process means a new connection, so no group reaches a process that does not know
its environment.

Ours keeps its state on disk under an id, its `instance`, and takes each group id once. Groups for it name the instance.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import orjson

from backends.errors import LachesisError
from backends.retry_after import retry_after
from lachesis.runs.registration import Registration, TrainerInfo
from lachesis_client.http_session import HttpSessionOwner

EXTENSION: Final = "Lachesis rollout API"
"""What the API of `lachesis api` calls itself at `GET /`; see docs/rollout-api.md."""

INSTANCE_HEADER: Final = "X-Lachesis-Instance"
"""The memory of such an API that a group is meant for."""

TOKEN_VARIABLE: Final = "LACHESIS_API_TOKEN"
"""The environment variable with the bearer token, for the API and its clients."""

CHUNK = 1 << 16
"""Bytes written to the socket at once."""


_CONNECT_TIMEOUT = 15.0
_NOT_NOW = frozenset({408, 425, 429})
"""The API is full, or a proxy in front of it is busy. These say nothing about the group."""
UNAUTHORISED: Final = frozenset({401, 403})
"""Nor do these."""
_GROUP_ID = re.compile(rb'"group_id"\s*:\s*"([^"\\]*)"')


class RolloutApiError(LachesisError):
    """Base of the errors of the rollout API. `url` is its address."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(f"rollout API {url}: {reason}")


class ApiDown(RolloutApiError):
    """No answer, a 5xx, or no room: worth another try.

    `status` is that of a 5xx; `retry_after` the seconds that the API asks to wait, if it does.
    """

    def __init__(self, url: str, reason: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        self.status = status
        self.retry_after = retry_after
        super().__init__(url, reason)


class ApiRefused(RolloutApiError):
    """A 4xx: another try would not help. `body` gives the reason."""

    def __init__(self, url: str, status: int, body: str) -> None:
        self.status = status
        self.body = body
        super().__init__(url, f"refused with {status}: {body[:500]}")


class UnknownEnv(RolloutApiError):
    """The API has no status for this env_id: it was restarted, reset, or every environment has disconnected."""


class ConnectionReplaced(RolloutApiError):
    """The connection on which the registration was confirmed is gone. Nothing was sent: confirm it again first."""


@dataclass(frozen=True, slots=True)
class TrainerRegistration:
    """What a trainer tells the API of itself, in the words of `POST /register`."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    """Sequences of a step."""
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    num_steps: int
    starting_step: int = 0
    acknowledges: bool = False
    """Extension: it acknowledges batches with `POST /ack`."""


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """The registration of an environment."""

    desired_name: str
    max_token_length: int
    group_size: int
    weight: float = 1.0
    min_batch_allocation: float | None = None
    """Share of each batch, 0 to 1, that must come from this environment."""


@dataclass(frozen=True, slots=True)
class EnvStatus:
    """The API's view of one environment. Sizes are in groups of the environment's own size."""

    current_step: int
    """Batches formed so far, from the `starting_step` of the trainer."""
    queue_size: int
    self_queue_size: int
    unallocated_fraction: float
    env_weight: float
    waiting: frozenset[str] | None = None
    """Extension: the ids of the environment's groups in the queue. None: the API does not say."""
    sequences: int | None = None
    """Extension: the sequences of these groups."""
    registrations: int = 0
    """Extension: counts registrations of trainers, each of which may have other settings."""


@dataclass(frozen=True, slots=True)
class ApiIdentity:
    """The API's description of itself."""

    stock: bool = False
    """Atropos' own server, which hands out no group of more than `group_size` sequences."""
    instance: str = ""
    """Of our own server: the id of its database. Empty: another server."""
    version: str = ""


class RolloutApi(HttpSessionOwner):
    """A client of one rollout API. Requests go one after the other over one connection.

    Args:
        token: bearer token; the value of `LACHESIS_API_TOKEN` if empty.
        timeout: seconds for one answer. The stock API forms and encodes whole batches in its event loop.
        send_timeout: seconds for a group to be sent and answered.
    """

    def __init__(self, url: str, *, token: str = "", timeout: float = 120.0, send_timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.identity = ApiIdentity()
        """The result of the last `identify`."""
        self.connection = 0
        """Counts connections. While the number stays the same, so does the API process."""
        token = token or os.environ.get(TOKEN_VARIABLE, "")
        self._authorization = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._send_timeout = send_timeout
        self._turn = asyncio.Lock()

    @property
    def has_token(self) -> bool:
        """Whether it sends one."""
        return bool(self._authorization)

    async def identify(self) -> ApiIdentity:
        """Ask the API which server it is."""
        try:
            answer = self._object(await self._request("GET", "/", None))
        except ApiRefused as error:
            if error.status in UNAUTHORISED:
                raise
            answer = {}
        if answer.get("message") == EXTENSION:
            self.identity = ApiIdentity(instance=str(answer["instance"]), version=str(answer.get("version", "")))
        else:
            self.identity = ApiIdentity(stock=answer.get("message") == "AtroposLib API")
        return self.identity

    async def info(self) -> TrainerInfo | None:
        """The trainer's settings; None while none has registered."""
        answer = await self._json("GET", "/info")
        if answer.get("batch_size", -1) == -1:
            return None
        return TrainerInfo(self._number(answer, "batch_size"), self._number(answer, "max_token_len"))

    async def register(self, env: EnvDescription) -> Registration | None:
        """Register; None while the trainer has not asked for its first batch."""
        answer = await self._json("POST", "/register-env", asdict(env))
        if answer.get("status") != "success":
            return None
        return Registration(
            env_id=self._number(answer, "env_id"),
            starting_step=int(answer.get("starting_step", 0)),
            num_steps=int(answer.get("num_steps") or -1),
            checkpoint_dir=str(answer.get("checkpoint_dir") or ""),
            checkpoint_interval=int(answer.get("checkpoint_interval") or -1),
        )

    async def status_env(self, env_id: int) -> EnvStatus:
        """The step of the trainer and the length of the queue.

        Raises:
            UnknownEnv: a 404, or a 5xx, the stock API's answer to an id that it does not know.
        """
        asked = {"env_id": env_id, "group_ids": True} if self.identity.instance else {"env_id": env_id}
        try:
            answer = await self._json("GET", "/status-env", asked)
        except (ApiDown, ApiRefused) as error:
            if error.status is None or (isinstance(error, ApiRefused) and error.status != 404):
                raise
            raise UnknownEnv(self.url, f"no status for env_id {env_id} ({error.reason})") from error
        return EnvStatus(
            current_step=self._number(answer, "current_step"),
            queue_size=self._number(answer, "queue_size"),
            self_queue_size=int(answer.get("self_queue_size", 0)),
            unallocated_fraction=float(answer.get("unallocated_fraction", 1.0)),
            env_weight=float(answer.get("env_weight", 1.0)),
            waiting=frozenset(answer["group_ids"]) if "group_ids" in answer else None,
            sequences=answer.get("self_sequences"),
            registrations=int(answer.get("registrations", 0)),
        )

    async def last_group_id(self) -> str | None:
        """The id of the group that the API received last; None where it does not say.

        The answer holds that whole group, so ask only when in doubt.
        """
        raw = await self._request("GET", "/latest_example", None)
        return await asyncio.to_thread(_last_group_id, raw)

    async def disconnect(self, env_id: int, *, connection: int) -> None:
        """Announce that nothing more will come, so that no batch waits for us. `connection` as in `send`."""
        await self._json("POST", "/disconnect-env", {"env_id": env_id}, connection=connection)

    async def send(self, body: bytes, *, connection: int) -> int:
        """POST one gzipped group over the connection number `connection`, never over another.

        Returns:
            The sequences of this environment that the API holds back until they make up a whole group; 0 when the
            group went to the queue.

        Raises:
            ConnectionReplaced: nothing was sent, or the API's instance is not the one that `identify` found.
            ApiRefused: the group was not taken.
            ApiDown: the group may have been taken or not.
        """
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", "Content-Length": str(len(body))}
        if self.identity.instance:
            headers[INSTANCE_HEADER] = self.identity.instance
        try:
            raw = await self._request("POST", "/scored_data", _chunks(body), headers=headers, connection=connection)
        except ApiRefused as error:
            if error.status == 409 and self.identity.instance:
                raise ConnectionReplaced(self.url, error.body) from error
            raise
        answer = self._object(raw)
        return int(answer.get("buffer_size", 0)) if answer.get("status") == "buffered" else 0

    async def ask(self, method: str, path: str, body: Any = None, *, connection: int | None = None) -> bytes:
        """One request with a JSON body; the body of the answer. `connection` as in `send`.

        Raises:
            ApiRefused: a 4xx.
            ApiDown: no answer, a 5xx, or no room.
        """
        data = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        return await self._request(method, path, data, headers=headers, connection=connection)

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, connection: int | None = None
    ) -> dict[str, Any]:
        return self._object(await self.ask(method, path, body, connection=connection))

    def _number(self, answer: Mapping[str, Any], name: str) -> int:
        if not isinstance(value := answer.get(name), int | float):
            raise ApiDown(self.url, f"the answer has no number {name}: {str(answer)[:200]}")
        return int(value)

    def _object(self, raw: bytes) -> dict[str, Any]:
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise ApiDown(self.url, f"the answer is not a JSON object: {raw[:200]!r}")
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        data: bytes | AsyncIterator[bytes] | None,
        *,
        headers: Mapping[str, str] | None = None,
        connection: int | None = None,
    ) -> bytes:
        timeout = self._timeout if connection is None else self._send_timeout
        async with self._turn:
            if connection is not None and connection != self.connection:
                raise ConnectionReplaced(self.url, "the connection was replaced")
            try:
                async with self._open_session().request(
                    method,
                    self.url + path,
                    data=data,
                    headers={"Accept-Encoding": "identity", **self._authorization, **(headers or {})},
                    timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_TIMEOUT),
                    trace_request_ctx=connection is not None,
                ) as response:
                    raw, status = await response.read(), response.status
                    pause = retry_after(response.headers.get("Retry-After"), response.headers.get("Date"))
            except TimeoutError as error:
                raise ApiDown(self.url, str(error) or f"no answer to {path} within {timeout:g} s") from error
            except aiohttp.InvalidURL as error:
                raise ApiRefused(self.url, 0, "this is not a URL; set rollout_server_url") from error
            except aiohttp.ClientConnectorError as error:
                step = "start one with `lachesis api`, or train with `lachesis train`"
                raise ApiDown(
                    self.url, f"nothing answers there ({error.os_error.strerror or error}); {step}"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                raise ApiDown(self.url, f"{type(error).__name__}: {error}") from error
        if status >= 500:
            raise ApiDown(self.url, f"{path} answered {status}: {_text(raw)}", status=status, retry_after=pause)
        if status in _NOT_NOW:
            raise ApiDown(self.url, f"{path} answered {status}: {_text(raw)}", retry_after=pause)
        if status in UNAUTHORISED:
            raise ApiRefused(self.url, status, f"{_text(raw)}; set env.rollout_server_token or {TOKEN_VARIABLE}")
        if status >= 400:
            raise ApiRefused(self.url, status, _text(raw))
        return raw

    def _new_session(self) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(self._on_connect)
        trace.on_connection_create_end.append(self._on_connected)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, keepalive_timeout=60.0), trace_configs=[trace]
        )

    async def _on_connect(self, _: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
        if context.trace_request_ctx:
            raise ConnectionReplaced(self.url, "the connection was closed")

    async def _on_connected(self, _: aiohttp.ClientSession, __: SimpleNamespace, ___: Any) -> None:
        self.connection += 1


def _last_group_id(raw: bytes) -> str | None:
    # Search from the end, where the API puts it: the lists before take megabytes, and a search holds the GIL.
    found = _GROUP_ID.search(raw, max(0, raw.rfind(b'"group_overrides"')))
    return found[1].decode() if found else None


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    """In pieces: aiohttp copies a bytes object to the socket at once, and the event loop waits."""
    view = memoryview(body)
    for start in range(0, len(body), CHUNK):
        yield bytes(view[start : start + CHUNK])


def _text(raw: bytes) -> str:
    return raw[:2000].decode("utf-8", "replace").strip()
