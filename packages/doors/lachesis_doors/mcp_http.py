"""A client of the Model Context Protocol over streamable HTTP.

Source: the specification of 2025-11-25 (https://modelcontextprotocol.io/specification).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import aiohttp

from lachesis_tools.mcp.client import VERSION, McpClient, McpLost, messages_of, reply_to


class McpHttpClient(McpClient):
    """A server somewhere else, over streamable HTTP."""

    def __init__(self, name: str, url: str, *, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(name, timeout)
        self.url = url
        self._headers = {"Accept": "application/json, text/event-stream", **(headers or {})}
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._http = aiohttp.ClientSession()
        await super().open()

    async def ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        number = next(self._numbers)
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
        except TimeoutError:
            raise self._late(method) from None
        raise McpLost(f"the MCP server {self.name} at {self.url} did not answer {method}")

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
                    async for _, data in named_events(response.content):
                        for each in messages_of(data) if data else ():  # an event without data is only a number
                            yield each
                    return
                body = await response.read()
                answers = messages_of(body) if body and response.content_type == "application/json" else []
                if response.status >= 400 and not any("error" in each and "id" in each for each in answers):
                    raise McpLost(f"the MCP server {self.name} at {self.url}: HTTP {response.status}")
                for each in answers:
                    yield each
        except (aiohttp.ClientError, ValueError) as error:
            raise McpLost(f"the MCP server {self.name} at {self.url}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._http is not None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if "Mcp-Session-Id" in self._headers:
                    async with asyncio.timeout(5), self._http.delete(self.url, headers=self._headers):
                        pass
            await self._http.close()


async def named_events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, str]]:
    """The names and the data of server-sent events."""
    kind, data, rest = "message", list[str](), list[bytes]()
    async for part in stream.iter_any():  # no lines: an image is a longer one than the stream's
        first, *lines = part.split(b"\n")
        rest.append(first)
        for following in lines:
            text = b"".join(rest).decode().rstrip("\r")
            rest = [following]
            if text.startswith("event:"):
                kind = text[6:].strip()
            elif text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and (data or kind != "message"):
                yield kind, "\n".join(data)
                kind, data = "message", []
