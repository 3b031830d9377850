"""One aiohttp session per client, opened by its first request."""

from __future__ import annotations

import asyncio
from abc import abstractmethod

import aiohttp

from lachesis_client.lifecycle import AsyncCloseable


class HttpSessionOwner(AsyncCloseable):
    """Opens its session with the first request, and again after `close` or in another event loop."""

    _session: aiohttp.ClientSession | None = None
    _session_loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def _new_session(self) -> aiohttp.ClientSession: ...

    def _open_session(self) -> aiohttp.ClientSession:
        """The session of the running loop. The garbage collector takes the session of a finished loop."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._session_loop is not loop:
            self._session, self._session_loop = self._new_session(), loop
        return self._session

    async def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
