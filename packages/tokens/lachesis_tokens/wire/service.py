"""The base of HTTP servers: an aiohttp application on a port, for the length of an `async with` block."""

from __future__ import annotations

import secrets
import socket
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import orjson
from aiohttp import web

from backends.errors import cannot_listen
from lachesis_client.lifecycle import AsyncService
from lachesis_tokens.wire.openai_chat import error
from lachesis_tokens.wire.request import Refused
from lachesis_tokens.wire.visitors import Visitors

_LARGEST_REQUEST: Final = 256 * 2**20


class WebService(AsyncService):
    """Serves `routes`. Port 0 is a free port."""

    title: ClassVar[str] = "the server"
    """Its name in messages."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, has_token: bool = False, others: str = "") -> None:
        self._address = (host, port)
        self._visitors = Visitors(self.title, host, has_token=has_token, others=others)
        self._socket: socket.socket | None = None
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        if self._socket is None:
            raise RuntimeError(f"{self.title} is not running; call start(), or use it as a context manager")
        host, port = self._socket.getsockname()[:2]
        return host, port

    @property
    def root_url(self) -> str:
        """Without `/v1`."""
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible API, for `ServerSettings`."""
        return f"{self.root_url}/v1"

    @abstractmethod
    def routes(self) -> Iterable[web.RouteDef]: ...

    async def start(self) -> None:
        """Bind the port and start to answer. Raises `SettingsError` where the address cannot be bound."""
        guard = self._visitors.middleware(lambda reason: json_response(error(Refused(403, reason)), 403))
        app = web.Application(client_max_size=_LARGEST_REQUEST, middlewares=[guard])
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        try:
            family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(self._address)
            await self._listen(web.SockSite(self._runner, self._socket, backlog=4096))
        except BaseException as failure:
            await self.stop()
            if isinstance(failure, OSError):
                raise cannot_listen(*self._address, failure) from failure
            raise

    async def _listen(self, site: web.BaseSite) -> None:
        await site.start()

    async def stop(self) -> None:
        """Close the port and every connection."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        bound, self._socket = self._socket, None
        if bound is not None:
            bound.close()


def has_bearer(request: web.BaseRequest, token: str) -> bool:
    """Whether a request carries this token, as `Authorization: Bearer`."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    same = secrets.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())
    return same and kind.lower() == "bearer"


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response with this JSON."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=headers)
