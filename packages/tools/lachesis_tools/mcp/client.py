"""A client of the Model Context Protocol: tools of a server over lines of JSON in a sandbox.

Source: the specification of 2025-11-25 (https://modelcontextprotocol.io/specification), with the messages that tools
need: `initialize`, `notifications/initialized`, `tools/list`, `tools/call`, `ping`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Final

from backends.base import Process, Sandbox
from backends.errors import BackendError, LachesisError, SandboxLost

VERSION: Final = "2025-11-25"
"""Of the protocol, as it is asked for; a server may answer with an older one."""
LONGEST: Final = 1 << 24
"""Bytes of one message."""
_PAGES = 1000
"""Of a list of tools. A server that has more does not come to an end."""
_OF_SERVERS: Final = frozenset({*range(-32099, -31999), 401, 407, 408, 425, 429, *range(500, 600)}) - {-32002}
"""Codes of errors that no arguments cause: JSON-RPC's own for servers, which SDKs use for a lost session or connection
and for their time limits, and those of HTTP, which gateways write. -32002 is MCP's for a resource that is not there.

-32603 is not one of them: SDKs answer so whatever a tool raises, and it may raise it because of its arguments.
"""


class McpLost(BackendError):
    """A server is gone, or says what is not of the protocol: a failure of the infrastructure."""


class McpLate(McpLost):
    """A server has not answered in time."""


class McpRefused(LachesisError):
    """A server answers with an error that the request may have caused, or with more than there is room for."""


class McpClient(ABC):
    """One server. `open` before anything else; `close` in any case."""

    def __init__(self, name: str, timeout: float) -> None:
        """
        Args:
            name: of the server, for messages and the names of its tools.
            timeout: seconds for one answer.
        """
        self.name = self.where = name
        self.timeout = timeout
        self._asked = range(1, 1)
        """The ids of all requests so far."""

    @abstractmethod
    async def ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The result of a request.

        Raises:
            McpRefused: the server answers with an error that the request may have caused.
            McpLost: it is gone, has failed, or says what is not of the protocol; `McpLate` if it does not answer in
                time.
        """

    @abstractmethod
    async def tell(self, method: str) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def open(self) -> None:
        """Greet the server. Raises as `ask` does."""
        about = {"name": "lachesis", "version": importlib.metadata.version("lachesis-tools")}
        await self.ask("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": about})
        await self.tell("notifications/initialized")

    async def tools(self) -> list[Mapping[str, Any]]:
        """All tools, each `{name, description, parameters}`. Raises as `ask` does."""
        found: list[Mapping[str, Any]] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self.ask("tools/list", {} if cursor is None else {"cursor": cursor})
            with self._shape_of("tools/list"):
                found += [
                    {
                        "name": "__".join((self.name, tool["name"])),
                        "description": tool.get("description") or tool.get("title") or "",
                        "parameters": {**(tool.get("inputSchema") or {"type": "object", "properties": {}})},
                    }
                    for tool in page.get("tools") or ()
                ]
            cursor = page.get("nextCursor")
            if cursor is None:
                return found
        raise McpRefused(f"the MCP server {self.name} has not listed its tools after {_PAGES} pages")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """`text`, `images` (data URLs), and `error` if the call failed."""
        try:
            result = await self.ask("tools/call", {"name": tool, "arguments": dict(arguments)})
        except McpRefused as refused:  # such as unknown arguments: what the agent did
            return {"text": str(refused.args[0]), "error": str(refused.args[0])}
        except McpLate:
            late = f"{tool} took longer than {self.timeout:g} s"
            return {"text": late, "error": late}
        texts, images = [], []
        with self._shape_of("tools/call"):
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

    @contextlib.contextmanager
    def _shape_of(self, method: str) -> Iterator[None]:
        try:
            yield
        except (AttributeError, LookupError, TypeError) as error:
            raise McpLost(
                f"the MCP server {self.name} answered {method} in another form than the protocol's "
                f"({type(error).__name__}: {error})"
            ) from error

    def _result(self, method: str, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        error, result = answer.get("error"), answer.get("result")
        if isinstance(error, Mapping):
            if is_of_server(error):
                raise self._failed(method, f"the error {error['code']}", error)
            raise McpRefused(f"{self.name}: {error.get('message')}")
        if not isinstance(result, Mapping):
            raise McpLost(f"the MCP server {self.name} answered {method} with neither a result nor an error")
        return result

    def _failed(self, method: str, answer: str, error: Mapping[str, Any] | None) -> McpLost:
        """Of an answer that is not about the arguments of a call."""
        said = f": {error.get('message')!s:.500}" if error else ""
        return McpLost(
            f"the MCP server {self.where} answered {method} with {answer}{said}. Next step: look why in its log. What "
            "arguments caused, it answers with a result with isError, or the error -32602"
        )

    def _number(self) -> int:
        """The id of a new request."""
        self._asked = range(1, self._asked.stop + 1)
        return self._asked[-1]

    def _astray(self, message: Mapping[str, Any]) -> McpLost | None:
        """Of an answer to what was never asked. Without an id it may be about any request; a late one has an old id."""
        number = message.get("id")
        answers = message.get("jsonrpc") == "2.0" and ("result" in message or "error" in message)
        if not answers or number is None or number in self._asked:
            return None
        return McpLost(f"the MCP server {self.where} answered with the id {number!r}, which no request had")

    def _late(self, method: str) -> McpLate:
        return McpLate(f"the MCP server {self.name} did not answer {method} in {self.timeout:g} s")


def is_of_server(error: Mapping[str, Any]) -> bool:
    """Whether an error says that the server failed, and not the call."""
    code = error.get("code")
    return isinstance(code, int) and code in _OF_SERVERS


def reply_to(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request of the server: it may ask whether somebody is there, and nothing else."""
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "ping":
        return {**reply, "result": {}}
    return {**reply, "error": {"code": -32601, "message": f"{request['method']} is not supported"}}


def messages_of(text: bytes | str) -> list[dict[str, Any]]:
    """The messages of a line, or of a body, which may be a list of them. Raises ValueError if it is no JSON."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"too deep: {error}") from error
    return [each for each in (found if isinstance(found, list) else [found]) if isinstance(each, dict)]


class McpStdioClient(McpClient):
    """A server that runs in a sandbox and speaks over its standard input and output."""

    def __init__(self, name: str, sandbox: Sandbox, command: str, *, timeout: float) -> None:
        super().__init__(name, timeout)
        self._sandbox = sandbox
        self._log = f"/tmp/mcp-{name.replace('/', '_')}.log"
        self._command = f"exec {command} 2>{shlex.quote(self._log)}"
        self._process: Process | None = None
        self._waiting: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._end: BackendError | None = None

    @property
    def processes(self) -> set[str]:
        """The id of its process, once that is started."""
        return {self._process.id} if self._process is not None else set()

    async def open(self) -> None:
        self._process = await self._sandbox.start(self._command)
        self._reading = asyncio.create_task(self._read(self._process))
        await super().open()

    async def ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        number = self._number()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self.timeout):  # of the writing too: a server may not read
                await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params)})
                found = await answer
        except TimeoutError:
            raise self._late(method) from None
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # the server may have ended while this was written: asyncio would warn
        return self._result(method, found)

    async def tell(self, method: str) -> None:
        await self._send({"jsonrpc": "2.0", "method": method})

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self._end is not None:
            raise self._end
        if self._process is None or self._reading is None:
            raise McpLost(f"the MCP server {self.name} is not started")
        try:
            await self._write(self._process, message)
        except ProcessLookupError:
            await asyncio.wait({self._reading}, timeout=5)  # it says how the server ended
            raise self._end or McpLost(f"the MCP server {self.name} has ended") from None

    async def _write(self, process: Process, message: Mapping[str, Any]) -> None:
        await process.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: Process) -> None:
        offset, rest, size = 0, list[bytes](), 0  # `rest` is the beginning of a line
        try:
            while True:
                chunk = await process.read(offset, wait=30.0, limit=1 << 20)
                if chunk.offset > offset or size > LONGEST:
                    self._fail(McpRefused(f"{self.name}: the answer was too large"))
                    rest, size = [b"(a part of a line)"], 0
                offset = chunk.offset + len(chunk.data)
                first, *lines = chunk.data.split(b"\n")
                rest, size = [*rest, first], size + len(first)
                for line in lines:
                    await self._take(process, b"".join(rest))
                    rest, size = [line], len(line)
                if chunk.exit_code is not None and not chunk.data:
                    raise McpLost(f"the MCP server {self.name} ended with {chunk.exit_code}{await self._said()}")
        except BackendError as error:  # of the sandbox too, whose end may be the agent's doing
            self._end = error
        except Exception as error:
            self._end = McpLost(f"the MCP server {self.name} is gone: {type(error).__name__}: {error}")
        assert self._end is not None
        self._fail(self._end)

    def _fail(self, error: Exception) -> None:
        """What is asked at this moment has no answer."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def _take(self, process: Process, line: bytes) -> None:
        try:
            messages = messages_of(line)
        except ValueError:
            return  # a server that prints: not of the protocol
        for message in messages:
            number = message.get("id")
            if "method" in message:
                if number is not None:
                    with contextlib.suppress(ProcessLookupError):
                        await self._write(process, reply_to(message))
            elif astray := self._astray(message):
                self._fail(astray)
            elif number in self._asked:
                waiting = self._waiting.get(message["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)

    async def _said(self) -> str:
        """The end of what it wrote to standard error, which may be long."""
        found = await self._sandbox.exec(f"tail -c 1000 {shlex.quote(self._log)}", timeout=10)
        log = found.stdout.decode(errors="replace").strip()
        return f": {log}" if log else ""

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._process is not None:
            with contextlib.suppress(SandboxLost):
                await self._process.kill()
