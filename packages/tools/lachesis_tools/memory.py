"""The tool `memory`: notes of the model, kept for one session. Nothing of them reaches another rollout."""

from __future__ import annotations

from typing import Literal

from lachesis_tools.text import shortened, to_json
from lachesis_tools.tool_registry import ToolFailure, tool
from lachesis_tools.tool_session import ToolSession

MAX_CHARS = 4_000
"""Characters of all notes together."""


class Notes:
    """The notes of one session, in the order in which they were added."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def copied(self) -> Notes:
        """The same notes, for another session."""
        other = Notes()
        other.entries = self.entries
        return other

    def put(self, entries: list[str]) -> None:
        """Keep these. Raises `ToolFailure` if they are too long together."""
        size = sum(map(len, entries))
        if size > MAX_CHARS:
            raise ToolFailure(
                f"the notes would have {size} characters, and may have {MAX_CHARS}: shorten or remove some; nothing "
                "was changed"
            )
        self.entries = entries

    def place(self, old_text: str | None) -> int:
        """The position of the only note that contains the text. Raises `ToolFailure` if there is no such."""
        found = [at for at, entry in enumerate(self.entries) if old_text and old_text in entry]
        if len(found) != 1:
            which = "several notes contain" if found else "no note contains"
            raise ToolFailure(f"{which} the old_text {shortened(old_text or '')!r}; nothing was changed")
        return found[0]


@tool(toolset="memory", time_limit=10.0)
async def memory(
    session: ToolSession,
    action: Literal["add", "replace", "remove", "read"],
    content: str | None = None,
    old_text: str | None = None,
) -> str:
    """Keep short notes of what must not be forgotten during this task, also when earlier messages are no longer shown.
    Returns all notes as JSON.

    Args:
        action: What to do: add a note, replace one, remove one, or only read them.
        content: The text of the note, for add and replace.
        old_text: A part of the note to replace or remove, which no other note has.
    """
    notes = session.state(Notes)
    entries = list(notes.entries)
    if action in ("add", "replace") and not (content and content.strip()):
        raise ToolFailure(f"action {action!r} needs a content; nothing was changed")
    if action == "add":
        entries.append(str(content))
    elif action != "read":
        at = notes.place(old_text)
        entries[at : at + 1] = [str(content)] if action == "replace" else []
    notes.put(entries)
    return to_json({"notes": entries, "characters": sum(map(len, entries)), "of": MAX_CHARS})
