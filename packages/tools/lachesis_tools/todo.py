"""The tool `todo`: the model's list of open tasks, kept for one session."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from lachesis_tools.text import to_json
from lachesis_tools.tool_registry import ToolFailure, tool
from lachesis_tools.tool_session import ToolSession

Status = Literal["pending", "in_progress", "completed", "cancelled"]

MAX_TODOS = 256


class TodoItem(BaseModel):
    """One thing to do. With merge, a known id may come with only what changes."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, defer_build=True)

    id: str = Field(min_length=1, description="Short name, unique in the list.")
    content: str | None = Field(None, description="What is to be done. Required for a new item.")
    status: Status | None = Field(None, description="pending when left out.")


class TodoList:
    """The list of one session, in the order in which items were added."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, str]] = {}

    def copied(self) -> TodoList:
        """The same list, for another session."""
        other = TodoList()
        other.items = {key: dict(item) for key, item in self.items.items()}
        return other

    def update(self, changes: list[TodoItem], *, merge: bool) -> None:
        """Replace the list, or change and add items. All or nothing. Raises `ToolFailure`."""
        items = {key: dict(item) for key, item in self.items.items()} if merge else {}
        seen: set[str] = set()
        for change in changes:
            if change.id in seen:
                raise ToolFailure(f"two items have the id {change.id!r}; nothing was changed")
            seen.add(change.id)
            item = items.get(change.id, {"id": change.id, "status": "pending"})
            if change.content is not None:
                item["content"] = change.content
            if change.status is not None:
                item["status"] = change.status
            if "content" not in item:
                raise ToolFailure(f"item {change.id!r} is new and needs a content; nothing was changed")
            items[change.id] = {key: item[key] for key in ("id", "content", "status")}
        if len(items) > MAX_TODOS:
            raise ToolFailure(f"a list has at most {MAX_TODOS} items, not {len(items)}; nothing was changed")
        self.items = items


@tool(toolset="todo", time_limit=10.0)
async def todo(session: ToolSession, todos: list[TodoItem] | None = None, merge: bool = False) -> str:
    """Keep a list of the steps of a longer task. Returns the whole list as JSON; call it without arguments to read it.

    Args:
        todos: The items. Without merge they replace the list.
        merge: Change the items with these ids, add new ones, and keep all others.
    """
    kept = session.state(TodoList)
    if todos is not None:
        kept.update(todos, merge=merge)
    items = list(kept.items.values())
    return to_json({"todos": items, "summary": dict(Counter(item["status"] for item in items))})
