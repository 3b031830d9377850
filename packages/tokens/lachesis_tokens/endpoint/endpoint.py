"""The HTTP server: one for a run. Each rollout has a key, in the path of its URL or in a header, or session ids."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import socket
import zlib
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final, Unpack

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from backends.tasks import seen
from lachesis_client.errors import (
    ContextExhausted,
    ConversationRefused,
    InferenceError,
    PromptError,
    RequestRejected,
    TurnRejected,
)
from lachesis_client.lifecycle import AsyncService
from lachesis_client.model_server import ModelServer
from lachesis_messages.errors import MessageError
from lachesis_tokens.endpoint.anthropic import CountTokens, Messages
from lachesis_tokens.endpoint.protocol import Protocol, RecordedChatRoute, RecordedGenerateRoute, RecordedTextRoute
from lachesis_tokens.endpoint.recording import Recording, RecordingOptions
from lachesis_tokens.endpoint.responses import Responses
from lachesis_tokens.templates.forced_calls import ToolChoiceError
from lachesis_tokens.wire.request import JSON, Refused
from lachesis_tokens.wire.writing import dump, load

_LARGEST_REQUEST: Final = 256 * 2**20
_LARGE_REQUEST: Final = 2**20
"""Bytes of a body above which a rollout's bodies are read one after the other: they are held in memory."""
_PATH: Final = re.compile(r"(?:/(?P<key>sk-[^/]+))?(?:/v1)?(?P<route>/.*)")
_CHAT: Final = RecordedChatRoute()
_ROUTES: Final[Mapping[str, Protocol]] = {
    "/chat/completions": _CHAT,
    "/completions": RecordedTextRoute(),
    "/responses": Responses(),
    "/messages": Messages(),
    "/messages/count_tokens": CountTokens(),
    "/generate": RecordedGenerateRoute(),
}
_JSON: Final = "application/json"
_log: Final = logging.getLogger(__name__)


def _is_of_ours(record: logging.LogRecord) -> bool:
    """Whether it is no request of a program that is not HTTP: programs could fill the log with these."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_log.addFilter(_is_of_ours)


class RecordingEndpoint(AsyncService):
    """Serves the model of `server` to programs, and records what each rollout asks; an async context manager.

    Args:
        server: a `TokenServer`, whose completions come with their exact tokens (Phase 2), or a `Router` (Phase 1).
        host, port: the address. Port 0 is a free port.
        ping_interval: seconds between the signs of life of a stream that waits for the model.
        retry_after: seconds in the header Retry-After after a failure of the model server.
    """

    def __init__(
        self,
        server: ModelServer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ping_interval: float = 10.0,
        retry_after: float = 1.0,
    ) -> None:
        self.server = server
        self.host = host
        self.ping_interval = ping_interval
        self.retry_after = retry_after
        self._port = port
        self._socket: socket.socket | None = None
        self._runner: web.ServerRunner | None = None
        self._recordings: dict[str, Recording] = {}
        self._keys = f"sk-lachesis-{secrets.token_hex(4)}-"
        """How the keys of this endpoint begin."""

    @property
    def port(self) -> int:
        """The port that it listens on."""
        if self._socket is None:
            raise RuntimeError("the endpoint is not running; call start(), or use it as a context manager")
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def root_url(self) -> str:
        """Without a key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def open(self, **options: Unpack[RecordingOptions]) -> Recording:
        """A recording for one rollout; see `RecordingOptions`."""
        key = self._keys + secrets.token_urlsafe(24)
        recording = Recording(self.server, key, self.root_url, self._forget, **options)
        self._recordings[recording.key] = recording
        return recording

    def accept_session(self, session: str, recording: Recording) -> None:
        """Take requests without a key whose header `X-Session-ID` is `session` as those of a recording, until it is
        closed. It serves programs that share one client among rollouts; the ids have to be as hard to guess as keys."""
        recording.sessions.add(session)
        self._recordings[session] = recording

    def _forget(self, recording: Recording) -> None:
        for name in (recording.key, *recording.sessions):
            self._recordings.pop(name, None)

    async def start(self) -> None:
        """Bind the port and start to answer."""
        # The low-level server: a route is one look-up, and there is no middleware.
        server = web.Server(
            self._handle,
            request_factory=_large_request,
            access_log=None,
            logger=_log,
            handler_cancellation=True,
            auto_decompress=False,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=0.2)
        await self._runner.setup()
        try:
            self._socket = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((self.host, self._port))
            await web.SockSite(self._runner, self._socket, backlog=4096).start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close all recordings and the port."""
        for recording in list(self._recordings.values()):
            await recording.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        bound, self._socket = self._socket, None
        if bound is not None:
            bound.close()

    # One request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        parts = _PATH.fullmatch(request.path)
        protocol = _ROUTES.get(parts["route"]) if parts else None
        recording: Recording | None = None
        try:
            recording = self._recording(parts["key"] if parts else None, request.headers)
            if protocol is not None and request.method == "POST":
                return await self._serve(request, protocol, recording)
            if parts and parts["route"] == "/models" and request.method == "GET":
                return _response(200, models(await self._models(recording)))
            raise Refused(404, f"there is no route {request.method} {request.path}", code="not_found")
        except Refused as refused:
            if recording is not None:
                recording.refused[str(refused)] += 1
            return self._refusal(protocol or _CHAT, refused)

    def _recording(self, key: str | None, headers: Mapping[str, str]) -> Recording:
        """The recording of a request. Raises `Refused`."""
        bearer = headers.get("Authorization", "").rpartition(" ")[2]
        key = key or headers.get("x-api-key") or bearer
        recording = self._recordings.get(key)
        if recording is None and key.startswith(self._keys):
            raise _over()
        if recording is None:
            recording = self._recordings.get(headers.get("X-Session-ID", ""))
        if recording is None:
            raise Refused(401, "this key is of no rollout; use the recording's base_url or key", code="invalid_api_key")
        return recording

    async def _serve(self, request: web.BaseRequest, protocol: Protocol, recording: Recording) -> web.StreamResponse:
        if request.headers.get("Expect", "").lower() == "100-continue":  # curl, with a body of a megabyte
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer has not begun
        try:
            packing = request.headers.get("Content-Encoding", "identity").lower()
            if packing == "identity" and (request.content_length or _LARGEST_REQUEST) <= _LARGE_REQUEST:
                body = load(await request.read())
            else:
                async with recording.reading:
                    body = load(await _unpacked(await request.read(), packing))
        except web.HTTPRequestEntityTooLarge:
            raise _too_large() from None
        except web.RequestPayloadError as error:
            raise Refused(400, f"the body cannot be read: {error}") from None
        if recording.closed:  # while the body came
            raise _over()
        await recording.end_abandoned()
        work = recording.run(protocol.complete(body, recording))
        stream: web.StreamResponse | None = None
        try:
            if body.get("stream"):
                while not (await asyncio.wait([work], timeout=self.ping_interval))[0]:
                    stream = stream or await _stream(request)
                    await stream.write(protocol.ping)
            answer = await self._answer(work, recording)
            if not body.get("stream"):
                return _response(200, protocol.body(answer))
            stream = stream or await _stream(request)
            await stream.write(b"".join(protocol.events(body, answer)))
        except Refused as refused:
            if stream is None:
                raise
            recording.refused[str(refused)] += 1
            await stream.write(protocol.error_event(refused))
        except ConnectionResetError:  # the client of a stream is gone
            assert stream is not None
        finally:
            if not work.done():  # the client is gone
                recording.abandon(work)
                if not recording.finish_abandoned:
                    await recording.end_abandoned()
            work.add_done_callback(seen)
        return stream

    async def _models(self, recording: Recording) -> list[str]:
        try:
            return list(dict.fromkeys(chain.from_iterable(await self.server.check())))
        except InferenceError as error:
            recording.failed(error)
            raise Refused(503, str(error), code="model_server_failed") from None

    async def _answer(self, work: asyncio.Task[JSON], recording: Recording) -> JSON:
        """The result. Errors become what the client may read of them."""
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():  # by `Recording.close`
                raise _over() from None
            raise
        except (MessageError, ToolChoiceError, TurnRejected) as error:
            raise Refused(400, str(error)) from None
        except ContextExhausted as error:
            recording.failed(error)
            raise Refused(
                400, f"prompt is too long: {error.reason}", code="context_length_exceeded", param="messages"
            ) from None
        except ConversationRefused as error:
            recording.failed(error)
            raise Refused(400, str(error), code="content_filter", param="messages") from None
        except PromptError as error:
            recording.failed(error)
            raise Refused(400, str(error)) from None
        except InferenceError as error:
            recording.failed(error)
            if isinstance(error, RequestRejected) and error.refuses_content:
                raise Refused(error.status, str(error)) from None
            raise Refused(503, str(error), code="model_server_failed") from None
        except Refused:
            raise
        except RecursionError:
            raise Refused(400, "the request is nested too deeply") from None
        except Exception as error:
            recording.failed(error)
            raise Refused(
                500, f"the endpoint failed: {type(error).__name__}: {error}", code="endpoint_failed"
            ) from error

    def _refusal(self, protocol: Protocol, refused: Refused) -> web.Response:
        headers = {"Retry-After": f"{self.retry_after:g}"} if refused.status == 503 else None
        return _response(refused.status, protocol.error(refused), headers)


def _over() -> Refused:
    return Refused(410, "this rollout is over", code="rollout_is_over")


def _large_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_LARGEST_REQUEST)


async def _unpacked(body: bytes, packing: str) -> bytes:
    """The body without its compression, unpacked in a thread and only up to the limit. Raises `Refused`."""
    if packing == "identity":
        return body
    if packing not in ("gzip", "x-gzip", "deflate"):
        raise Refused(415, f"Content-Encoding is {packing!r}; supported are gzip and deflate")
    unpacking = zlib.decompressobj(47)  # of both formats
    try:
        unpacked = await asyncio.to_thread(unpacking.decompress, body, _LARGEST_REQUEST + 1)
    except zlib.error as error:
        raise Refused(400, f"the body cannot be unpacked: {error}") from None
    if len(unpacked) > _LARGEST_REQUEST:
        raise _too_large()
    if not unpacking.eof:
        raise Refused(400, "the body cannot be unpacked: its end is missing")
    return unpacked


def _too_large() -> Refused:
    return Refused(413, f"the body has more than {_LARGEST_REQUEST} bytes")


def models(names: list[str]) -> JSON:
    """The models, as OpenAI lists them."""
    listed = [{"id": name, "object": "model", "created": 0, "owned_by": "lachesis"} for name in names]
    return {"object": "list", "data": listed}


def _response(status: int, body: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=dump(body), content_type=_JSON, headers=headers)


async def _stream(request: web.BaseRequest) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    return stream
