"""The toolset `mcp`: the tools of servers that run in the sandbox of each rollout."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from backends.errors import BackendError, SettingsError
from lachesis_tools.dispatch import ToolResult
from lachesis_tools.function_names import function_name
from lachesis_tools.mcp.client import McpLost, McpRefused, McpStdioClient
from lachesis_tools.text import to_json
from lachesis_tools.tool_registry import Tool
from lachesis_tools.tool_session import ToolSession, ToolSessions

CALL_SECONDS: Final = 60.0
"""For one answer of a server."""
NEXT_STEP: Final = (
    "Next step: correct its command. It runs in the sandbox, where programs of this machine are visible by "
    "terminal_options.mounts"
)
_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9-]|_(?=[A-Za-z0-9-]))*")


class McpServers:
    """The servers of one session, each started at the first call of one of its tools."""

    def __init__(self) -> None:
        self._clients: dict[str, McpStdioClient] = {}
        self._starting = asyncio.Lock()

    async def client(self, session: ToolSession, name: str, command: str) -> McpStdioClient:
        """Raises McpLost and McpRefused, as `McpClient.open`."""
        async with self._starting:
            if name not in self._clients:
                client = McpStdioClient(name, await session.sandbox(), command, timeout=CALL_SECONDS)
                session.before_close.append(partial(_close, client))
                try:
                    await client.open()
                finally:
                    session.internal_processes |= client.processes
                self._clients[name] = client
            return self._clients[name]


async def _close(client: McpStdioClient) -> None:
    with suppress(BackendError):  # the sandbox is removed next
        await client.close()


async def mcp_tools(servers: Mapping[str, str], sessions: ToolSessions) -> list[Tool]:
    """The tools of servers, called `SERVER__TOOL`. What a server announces later is not offered.

    Args:
        servers: their commands, by name.
        sessions: a sandbox of its own, in which each is started once and asked for its tools.

    Raises:
        SettingsError: a name cannot be used.
        McpLost, McpRefused: a server does not start, or does not list its tools.
    """
    for name in servers:
        if not _NAME.fullmatch(name):  # SERVER__TOOL has to be read as it was meant
            raise SettingsError(f"mcp: rename the server {name!r}: letters, digits, '-' and single '_' between them")
    session = sessions.open("tools-of-mcp-servers")
    started, taken, found = McpServers(), set[str](), list[Tool]()
    try:
        for name, command in servers.items():
            for listed in await (await started.client(session, name, command)).tools():
                tool = _tool(name, command, listed, function_name(listed["name"], taken))
                taken.add(tool.name)
                found.append(tool)
    except (McpLost, McpRefused) as error:
        raise type(error)(f"{error}. {NEXT_STEP}") from error
    finally:
        await sessions.close(session.task_id)
    return found


def _tool(server: str, command: str, listed: Mapping[str, Any], name: str) -> Tool:
    async def call(arguments: dict[str, Any], session: ToolSession) -> ToolResult:
        client = await session.state(McpServers).client(session, server, command)
        answer = await client.call(listed["name"].partition("__")[2], arguments)
        error = answer.get("error")
        text = to_json({"error": error}) if error else answer["text"]
        return ToolResult(text, error, images=tuple(answer.get("images") or ()))

    return Tool.from_schema(
        name, listed["description"], listed["parameters"], call, toolset="mcp", time_limit=None, in_session=True
    )
