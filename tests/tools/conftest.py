"""Real sandboxes for the tests of tools."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from backends import create_backend
from lachesis_tools import ToolResult, ToolSession, ToolSessions, call_tool

numbers = itertools.count()

Call = Callable[..., Awaitable[ToolResult]]


@pytest.fixture
async def sessions() -> AsyncIterator[ToolSessions]:
    backend = create_backend("local")
    availability = await backend.check()
    if not availability.ok and os.environ.get("CI") != "true":
        pytest.skip(f"{availability.detail}; {availability.fix}")
    async with ToolSessions(backend, run_id="tests", terminal_timeout=20) as opened:
        yield opened


@pytest.fixture
async def session(sessions: ToolSessions) -> ToolSession:
    return sessions.open(f"task-{next(numbers)}")


@pytest.fixture
def call(session: ToolSession) -> Call:
    """`await call("tool", argument=...)` as the loop would."""

    async def run(name: str, **arguments: object) -> ToolResult:
        return await call_tool(name, arguments, session)

    return run
