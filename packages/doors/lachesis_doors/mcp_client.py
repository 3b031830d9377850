"""A client of the Model Context Protocol: tools of a server over lines of JSON in a sandbox, or over HTTP.

Source: the specification of 2025-11-25 (https://modelcontextprotocol.io/specification), with the messages that tools
need: `initialize`, `notifications/initialized`, `tools/list`, `tools/call`, `ping`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

from backends.base import Process, Sandbox
from backends.errors import SandboxLost
from lachesis_doors.guest_process import GuestError, GuestLost

VERSION: Final = "2025-11-25"
"""Of the protocol, as it is asked for; a server may answer with an older one."""
_LONGEST = 1 << 24
"""Bytes of one message."""


class McpClient(ABC):
    """One server. `open` before anything else; `close` in any case."""

    def __init__(self, name: str, timeout: float) -> None:
        """
        Args:
            name: of the server, for messages and the names of its tools.
            timeout: seconds for one answer.
        """
        self.name = name
        self.timeout = timeout
        self._numbers = itertools.count(1)

    @abstractmethod
    async def ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The result of a request.

        Raises:
            GuestError: the server answers with an error.
            GuestLost: it is gone.
            TimeoutError: it does not answer in time.
        """

    @abstractmethod
    async def tell(self, method: str) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def open(self) -> None:
        """Greet the server. Raises as `ask` does, with a late answer as `GuestLost`."""
        about = {"name": "lachesis", "version": "0.2.0"}
        try:
            await self.ask("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about})
            await self.tell("notifications/initialized")
        except TimeoutError:
            raise GuestLost(f"the MCP server {self.name} did not answer in {self.timeout:g} s") from None

    async def tools(self) -> list[Mapping[str, Any]]:
        """All tools, each `{name, description, parameters}`."""
        found: list[Mapping[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self.ask("tools/list", {} if cursor is None else {"cursor": cursor})
            for tool in page.get("tools") or ():
                schema = tool.get("inputSchema") or {"type": "object", "properties": {}}
                found.append(
                    {
                        "name": f"{self.name}__{tool['name']}",
                        "description": tool.get("description") or tool.get("title") or "",
                        "parameters": schema,
                    }
                )
            cursor = page.get("nextCursor")
            if cursor is None:
                return found

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """`text`, `images` (data URLs), and `error` if the call failed."""
        try:
            result = await self.ask("tools/call", {"name": tool, "arguments": dict(arguments)})
        except GuestError as refused:  # such as unknown arguments: what the agent did
            return {"text": str(refused.args[0]), "error": str(refused.args[0])}
        except TimeoutError:
            late = f"{tool} took longer than {self.timeout:g} s"
            return {"text": late, "error": late}
        texts, images = [], []
        for part in result.get("content") or ():
            if part.get("type") == "text":
                texts.append(part["text"])
            elif part.get("type") == "image":
                images.append(f"data:{part['mimeType']};base64,{part['data']}")
            else:
                texts.append(json.dumps(part))
        if not texts and not images and "structuredContent" in result:
            texts.append(json.dumps(result["structuredContent"]))
        text = "\n".join(texts)
        return {"text": text, "images": images, **({"error": text or "failed"} if result.get("isError") else {})}

    def _refused(self, answer: Mapping[str, Any]) -> GuestError:
        error = answer["error"]
        return GuestError(f"{self.name}: {error.get('message')}")

    def _reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request of the server: it may ask whether somebody is there, and nothing else."""
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
        if request["method"] == "ping":
            return {**reply, "result": {}}
        return {**reply, "error": {"code": -32601, "message": f"{request['method']} is not supported"}}


class McpStdioClient(McpClient):
    """A server that runs in a sandbox and speaks over its standard input and output."""

    def __init__(self, name: str, sandbox: Sandbox, command: str, *, timeout: float) -> None:
        super().__init__(name, timeout)
        self._sandbox = sandbox
        self._log = f"/tmp/mcp-{name}.log"
        self._command = f"exec {command} 2>{shlex.quote(self._log)}"
        self._process: Process | None = None
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._ended = ""

    async def open(self) -> None:
        self._process = await self._sandbox.start(self._command)
        self._reading = asyncio.create_task(self._read(self._process))
        await super().open()

    async def ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)})
            found = await asyncio.wait_for(answer, self.timeout)
        finally:
            self._waiting.pop(number, None)
        if "error" in found:
            raise self._refused(found)
        result: Mapping[str, Any] = found["result"]
        return result

    async def tell(self, method: str) -> None:
        await self._send({"jsonrpc": "2.0", "method": method})

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self._ended or self._process is None:
            raise GuestLost(self._ended or f"the MCP server {self.name} is not started")
        try:
            await self._process.write(json.dumps(message).encode() + b"\n")
        except ProcessLookupError:
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                if self._reading is not None:
                    await asyncio.wait_for(asyncio.shield(self._reading), 5)
            raise GuestLost(self._ended or f"the MCP server {self.name} has ended") from None

    async def _read(self, process: Process) -> None:
        offset, rest = 0, b""
        try:
            while True:
                chunk = await process.read(offset, wait=30.0)
                offset = chunk.offset + len(chunk.data)
                *whole, rest = (rest + chunk.data).split(b"\n")
                for line in whole:
                    await self._take(line)
                if len(rest) > _LONGEST:
                    raise GuestLost(f"the MCP server {self.name} wrote a message of more than {_LONGEST} bytes")
                if chunk.exit_code is not None:
                    said = await self._said()
                    raise GuestLost(f"the MCP server {self.name} ended with {chunk.exit_code}{said}")
        except (GuestLost, SandboxLost, ProcessLookupError) as error:
            self._ended = str(error) or f"the MCP server {self.name} is gone"
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(GuestLost(self._ended))

    async def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # a server that prints: not of the protocol
        if not isinstance(message, dict):
            return
        if "method" in message:
            if "id" in message:
                await self._send(self._reply(message))
        elif (waiting := self._waiting.get(message.get("id", -1))) is not None and not waiting.done():
            waiting.set_result(message)

    async def _said(self) -> str:
        with contextlib.suppress(OSError):
            log = (await self._sandbox.read_bytes(self._log)).decode(errors="replace").strip()
            return f": {log[-1000:]}" if log else ""
        return ""

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._process is not None:
            with contextlib.suppress(SandboxLost):
                await self._process.kill()


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
        async with asyncio.timeout(self.timeout):
            async for message in self._posted(
                {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)}
            ):
                if "method" in message and "id" in message:
                    async for _ in self._posted(self._reply(message)):
                        pass
                elif message.get("id") == number:
                    if "error" in message:
                        raise self._refused(message)
                    if method == "initialize":
                        self._headers["MCP-Protocol-Version"] = message["result"]["protocolVersion"]
                    result: Mapping[str, Any] = message["result"]
                    return result
        raise GuestLost(f"the MCP server {self.name} at {self.url} did not answer {method}")

    async def tell(self, method: str) -> None:
        async for _ in self._posted({"jsonrpc": "2.0", "method": method}):
            pass

    async def _posted(self, message: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        assert self._http is not None
        try:
            async with self._http.post(self.url, json=message, headers=self._headers) as response:
                if session := response.headers.get("Mcp-Session-Id"):
                    self._headers["Mcp-Session-Id"] = session
                if response.status >= 400:
                    raise GuestLost(f"the MCP server {self.name} at {self.url}: HTTP {response.status}")
                if response.content_type == "text/event-stream":
                    async for _, data in named_events(response.content):
                        yield json.loads(data)
                elif response.content_type == "application/json" and (body := await response.read()):
                    yield json.loads(body)
        except (aiohttp.ClientError, ValueError) as error:
            raise GuestLost(f"the MCP server {self.name} at {self.url}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._http is not None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if "Mcp-Session-Id" in self._headers:
                    async with asyncio.timeout(5), self._http.delete(self.url, headers=self._headers):
                        pass
            await self._http.close()


async def named_events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, str]]:
    """The names and the data of server-sent events."""
    kind, data = "message", list[str]()
    async for line in stream:
        text = line.decode().rstrip("\r\n")
        if text.startswith("event:"):
            kind = text[6:].strip()
        elif text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and (data or kind != "message"):
            yield kind, "\n".join(data)
            kind, data = "message", []
