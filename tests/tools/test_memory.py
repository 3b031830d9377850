"""Notes of one rollout."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import pytest

from lachesis_tools import ToolResult, ToolSession, ToolSessions, call_tool
from lachesis_tools.memory import MAX_CHARS
from lachesis_tools.on_request import ON_REQUEST

Call = Callable[..., Awaitable[ToolResult]]


@pytest.fixture
def note(session: ToolSession) -> Call:
    async def call(action: str, **arguments: object) -> ToolResult:
        return await call_tool("memory", {"action": action, **arguments}, session, registry=ON_REQUEST)

    return call


def notes(result: ToolResult) -> list[str]:
    assert result.error is None, result.error
    return list(json.loads(result.content)["notes"])


async def test_notes_are_added_replaced_removed_and_read(note: Call) -> None:
    assert notes(await note("read")) == []
    await note("add", content="the port is 80")
    assert notes(await note("add", content="the key is in a.txt")) == ["the port is 80", "the key is in a.txt"]
    replaced = await note("replace", old_text="port", content="the port is 81")
    assert notes(replaced) == ["the port is 81", "the key is in a.txt"]
    assert notes(await note("remove", old_text="key is")) == ["the port is 81"] == notes(await note("read"))


@pytest.mark.parametrize(
    ("action", "arguments", "said"),
    [
        ("add", {}, "needs a content"),
        ("replace", {"old_text": "one"}, "needs a content"),
        ("remove", {"old_text": "n"}, "several notes contain"),
        ("remove", {}, "no note contains"),
        ("replace", {"old_text": "three", "content": "3"}, "no note contains"),
        ("add", {"content": "x" * MAX_CHARS}, f"may have {MAX_CHARS}"),
    ],
)
async def test_what_cannot_be_done_changes_nothing(note: Call, action: str, arguments: dict, said: str) -> None:
    await note("add", content="one")
    await note("add", content="not two")
    assert said in str((await note(action, **arguments)).error)
    assert notes(await note("read")) == ["one", "not two"]


async def test_no_rollout_has_the_notes_of_another(note: Call, sessions: ToolSessions) -> None:
    await note("add", content="mine")
    other = sessions.open("another")
    assert notes(await call_tool("memory", {"action": "read"}, other, registry=ON_REQUEST)) == []
