"""The door of MCP: tasks from a file, run with the tools of MCP servers.

mcp:TASKS.jsonl?command=mcp-server-git      a server in the sandbox of each rollout
mcp:TASKS.jsonl?url=https://...             a server somewhere else
mcp:TASKS.jsonl?servers=servers.json        several, `{"mcpServers": {NAME: {"command", "args", "env"} or {"url"}}}`
"""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from backends.errors import SettingsError
from lachesis_doors.door_env import DoorEnv, DoorSession
from lachesis_doors.mcp_http import McpHttpClient
from lachesis_tools import ToolSession
from lachesis_tools.mcp.client import McpClient, McpLost, McpStdioClient

_CHECK_SECONDS = 120.0


class McpEnv(DoorEnv):
    """Tasks that are solved with the tools of MCP servers.

    A row of the file has `prompt`, and one of these: `check`, a command whose exit code 0 is a reward of 1 in the
    sandbox of the rollout; `answer`, which the agent's last message has to contain as a line of its own, or be. With
    `files` (path -> text) and `setup` (a command), the sandbox is prepared before the servers start. `solution` is what
    the reference policy does.
    """

    needs_sandboxes = True

    async def setup(self) -> None:
        await super().setup()
        self._rows = _rows(Path(self.target))
        self._servers = _servers(self.arguments)
        self._listed: Sequence[Mapping[str, Any]] | None = None

    async def item_at(self, number: int) -> tuple[Any, Sequence[Mapping[str, Any]]] | None:
        if number >= len(self._rows):
            return None
        if self._listed is None:  # fixed at the start: what a server announces later is not offered
            session = self.player.sessions.open(f"{self.name}-tools")
            try:
                await self._prepare(self._rows[number], session)
                async with self._opened(session) as clients:
                    self._listed = [tool for client in clients.values() for tool in await client.tools()]
            except McpLost as error:
                next_step = (
                    "Next step: start the server, or correct its command or address. A command runs in the sandbox, "
                    "where programs of this machine are visible by terminal_options.mounts"
                )
                raise McpLost(f"{error}. {next_step}") from error
            finally:
                await self.player.sessions.close(session.task_id)
        return self._rows[number], self._listed

    @asynccontextmanager
    async def opened(self, item: Any, tools: ToolSession) -> AsyncIterator[DoorSession]:
        await self._prepare(item, tools)
        async with self._opened(tools) as clients:
            yield _McpSession(item, clients, tools)

    async def _prepare(self, item: Mapping[str, Any], tools: ToolSession) -> None:
        if not (item.get("files") or item.get("setup")):
            return
        sandbox = await tools.sandbox()
        for path, text in (item.get("files") or {}).items():
            await sandbox.write_bytes(path, text.encode())
        if command := item.get("setup"):
            done = await sandbox.exec(command, timeout=_CHECK_SECONDS)
            if done.exit_code:
                raise RuntimeError(f"setup ended with {done.exit_code}: {(done.stderr or done.stdout)[-500:]!r}")

    @asynccontextmanager
    async def _opened(self, tools: ToolSession) -> AsyncIterator[dict[str, McpClient]]:
        timeout = float(self.arguments.get("timeout", 60))
        async with AsyncExitStack() as stack:
            clients: dict[str, McpClient] = {}
            for name, server in self._servers.items():
                client: McpClient
                if "url" in server:
                    client = McpHttpClient(name, server["url"], timeout=timeout, headers=server.get("headers"))
                else:
                    words = [*shlex.split(server["command"]), *server.get("args", ())]
                    given = [f"{key}={value}" for key, value in (server.get("env") or {}).items()]
                    command = shlex.join(["env", *given, *words] if given else words)
                    client = McpStdioClient(name, await tools.sandbox(), command, timeout=timeout)
                stack.push_async_callback(client.close)
                await client.open()
                clients[name] = client
            yield clients


class _McpSession:
    def __init__(self, item: Mapping[str, Any], clients: Mapping[str, McpClient], tools: ToolSession) -> None:
        self.prompt: str = item["prompt"]
        self.solution = item.get("solution")
        self._item, self._clients, self._tools = item, clients, tools

    async def act(self, text: str) -> None:
        return None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        server, _, tool = name.partition("__")
        return await self._clients[server].call(tool, arguments)

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        if "check" in self._item:
            sandbox = await self._tools.sandbox()
            done = await sandbox.exec(self._item["check"], timeout=_CHECK_SECONDS, fresh=True)
            return {"reward": float(done.exit_code == 0)}
        said = messages[-1].get("content") or "" if messages and messages[-1]["role"] == "assistant" else ""
        wanted = str(self._item["answer"]).strip()
        return {"reward": float(wanted in (line.strip() for line in (said, *said.splitlines())))}


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; name a file of tasks, mcp:TASKS.jsonl?command=...") from error
    except ValueError as error:
        raise SettingsError(f"{path}: {error}; each line is a task as JSON") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or "prompt" not in row or not ("check" in row or "answer" in row):
            raise SettingsError(f"{path}, line {number}: a task has `prompt`, and `check` or `answer`")
    return rows


def _servers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if "servers" in arguments:
        path = Path(arguments["servers"])
        try:
            found: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8"))["mcpServers"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(f'{path}: {error}; write {{"mcpServers": {{NAME: {{"command": ...}}}}}}') from error
        for name, server in found.items():
            if not isinstance(server, dict) or not ("command" in server or "url" in server):
                raise SettingsError(f"{path}: the server {name!r} has neither a `command` nor a `url`")
            if "__" in name or name.endswith("_"):  # SERVER__TOOL has to be read as it was meant
                raise SettingsError(f"{path}: rename the server {name!r}: no name has two underscores or ends with one")
        return found
    if "url" in arguments:
        return {str(arguments.get("name", "server")): {"url": arguments["url"]}}
    if "command" in arguments:
        first = Path(shlex.split(arguments["command"])[0]).name
        name = str(arguments.get("name") or first.removeprefix("mcp-server-").replace(".", "_"))
        return {name: {"command": arguments["command"]}}
    raise SettingsError("mcp: name a server, as mcp:TASKS.jsonl?command=..., ?url=... or ?servers=FILE.json")


door = McpEnv.at
