"""A client of the Model Context Protocol over streamable HTTP.

Source: the specification of 2025-11-25 (https://modelcontextprotocol.io/specification).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp

from lachesis_tools.mcp.client import (
    LONGEST,
    VERSION,
    McpClient,
    McpLost,
    McpRefused,
    is_of_server,
    messages_of,
    reply_to,
)

_OF_CONTENT = (400, 413, 422)
"""Statuses of requests whose content may be at fault. All others are about the session, the key, the load or the
server."""
_OF_PROTOCOL = range(-32768, -31999)
"""Codes that JSON-RPC reserves. What a server numbers itself is outside."""
_OF_ARGUMENTS = (-32602, -32700, -32002)
"""Of those, what arguments cause: they do not fit, are no JSON for this parser, or name a resource that is not there.
SDKs answer a missing session with others."""


class McpHttpClient(McpClient):
    """A server somewhere else, over streamable HTTP."""

    def __init__(self, name: str, url: str, *, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(name, timeout)
        self.url = url
        self.where = f"{name} at {url}"
        self._headers = {"Accept": "application/json, text/event-stream", **(headers or {})}
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._http = aiohttp.ClientSession()
        await super().open()

    async def ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        number = self._number()
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)}
        try:
            async with asyncio.timeout(self.timeout), aclosing(self._posted(request)) as messages:
                async for message in messages:
                    if "method" in message and "id" in message:
                        await self._post(reply_to(message))
                    elif message.get("id") == number:
                        result = self._result(method, message)
                        if method == "initialize":
                            self._headers["MCP-Protocol-Version"] = str(result.get("protocolVersion", VERSION))
                        return result
                    elif astray := self._astray(message):
                        raise astray
        except TimeoutError:
            raise self._late(method) from None
        raise McpLost(f"the MCP server {self.where} did not answer {method}")

    async def tell(self, method: str) -> None:
        await self._post({"jsonrpc": "2.0", "method": method})

    async def _post(self, message: Mapping[str, Any]) -> None:
        """Send what has no answer."""
        try:
            async with asyncio.timeout(self.timeout), aclosing(self._posted(message)) as messages:
                async for _ in messages:
                    pass
        except TimeoutError:
            raise self._late(str(message.get("method", "a reply"))) from None

    async def _posted(self, message: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        assert self._http is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        try:
            async with self._http.post(self.url, json=message, headers=self._headers, timeout=timeout) as response:
                if session := response.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                if response.content_type == "text/event-stream" and response.status < 400:
                    async for _, data in named_events(response.content, longest=LONGEST):
                        for each in messages_of(data) if data else ():  # an event without data is only a number
                            yield each
                    return
                body = await self._body(response)
                answers = messages_of(body) if body and response.content_type == "application/json" else []
                if response.status >= 400:
                    raise self._refused(str(message.get("method", "a reply")), response.status, answers)
                for each in answers:
                    yield each
        except EventTooLong:
            raise self._too_large() from None
        except (aiohttp.ClientError, ValueError) as error:
            raise McpLost(f"the MCP server {self.where}: {type(error).__name__}: {error}") from error

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > LONGEST:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> McpRefused:
        return McpRefused(f"{self.name}: the answer was too large")

    def _refused(self, method: str, status: int, answers: Sequence[Mapping[str, Any]]) -> McpLost | McpRefused:
        """Of an answer with an error of HTTP. It is to this one request, whatever id its error has."""
        error = next((each["error"] for each in answers if isinstance(each.get("error"), Mapping)), None)
        code = error.get("code") if error else None
        own = isinstance(code, int) and (code in _OF_ARGUMENTS or code not in _OF_PROTOCOL)
        if status in _OF_CONTENT and error and own and not is_of_server(error):
            return McpRefused(f"{self.name}: {error.get('message')}")
        if status == 413:
            return McpRefused(f"{self.name}: the arguments are too large")
        return self._failed(method, f"HTTP {status}", error)

    async def close(self) -> None:
        if self._http is not None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if "Mcp-Session-Id" in self._headers:
                    async with asyncio.timeout(5), self._http.delete(self.url, headers=self._headers):
                        pass
            await self._http.close()


class EventTooLong(Exception):
    """An event of a stream has more bytes than there is room for."""


async def named_events(stream: aiohttp.StreamReader, *, longest: int | None = None) -> AsyncIterator[tuple[str, str]]:
    """The names and the data of server-sent events. Raises `EventTooLong` for one of more than `longest` bytes."""
    kind, data, rest, size = "message", list[str](), list[bytes](), 0
    after_cr, mark = False, "\ufeff"  # which may stand before the first line
    async for part in stream.iter_any():  # no lines: an image is a longer one than the stream's
        read = part.removeprefix(b"\n") if after_cr else part
        after_cr = part.endswith(b"\r")
        part = read.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *lines = part.split(b"\n")
        rest.append(first)
        size += len(first)
        for following in lines:
            text, mark = b"".join(rest).decode().removeprefix(mark), ""
            rest = [following]
            if text.startswith("event:"):
                kind = text[6:].strip()
            elif text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text:
                size = 0
                if data or kind != "message":
                    yield kind, "\n".join(data)
                    kind, data = "message", []
            size += len(following)
        if longest is not None and size > longest:
            raise EventTooLong
