"""A recorded rollout, played again in a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.text import counted
from lachesis_console.chat.recordings import RecordedRollout, differs
from lachesis_console.chat.screen import Screen
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_tools import ToolResult


class Replay:
    """The turns of a recording, and how its results differ from those of now.

    Args:
        turns: how many are played; None means all.
    """

    def __init__(self, screen: Screen, recorded: RecordedRollout | None, turns: int | None) -> None:
        self._screen = screen
        self._messages = [*recorded.turns] if recorded is not None else []
        self._left = turns if turns is not None else sum(each["role"] == "assistant" for each in self._messages)
        self._whole = turns is None
        self._place = 0
        """Of the next message."""
        self.over = not self._messages
        self._turns = self._results = self._differing = 0
        self._volatile = 0
        """Results that differ in times, addresses or numbers only."""

    def turn(self, history: MessageHistory) -> Message | None:
        """The next turn or None. Compares results with those in `history`, and adds unanswered messages to it."""
        now = {node.message.tool_call_id: node.message.text for node in history.nodes() if node.message.tool_call_id}
        for recorded in self._messages[self._place :]:
            if recorded["role"] == "tool":
                self._compare(recorded, now)
            elif recorded["role"] == "assistant" or not (self._left > 0 or self._whole):
                break
            else:
                history.append(said := Message.from_openai(recorded))
                self._screen.said(said.role, said.text)
            self._place += 1
        if self._left <= 0 or self._place >= len(self._messages):
            self._summarise()
            return None
        said = Message.from_openai(self._messages[self._place])
        self._place += 1
        self._left -= 1
        self._turns += 1
        if self._place == len(self._messages):
            self._summarise()
        return said

    def user(self) -> ToolResult | None:
        """What the user says next; None if the recording has no more, or is not played further."""
        if self._place >= len(self._messages) or not (self._left > 0 or self._whole):
            self._summarise()
            return None
        following = self._messages[self._place]
        if following["role"] != "user":
            return None
        self._place += 1
        parts = following["content"] if isinstance(following["content"], list) else ()
        images = tuple(part["image_url"]["url"] for part in parts if part["type"] == "image_url")
        return ToolResult(Message.from_openai(following).text, images=images)

    def _compare(self, recorded: Mapping[str, Any], now: Mapping[str, str]) -> None:
        said = str(recorded.get("content") or "")
        how = differs(said, now.get(recorded["tool_call_id"], ""))
        self._results += 1
        self._volatile += how == "volatile"
        if how == "other":
            self._differing += 1
            self._screen.error(f"{recorded.get('name') or 'a tool'} answered something else in the recording:")
            self._screen.note(said[:500])

    def _summarise(self) -> None:
        """Once, when the replay is over."""
        if not self.over:
            self.over = True
            more = f", {self._volatile} in times or numbers only" if self._volatile else ""
            self._screen.note(
                f"replayed {counted(self._turns, 'turn')}: {self._differing} of {self._results} results differ{more}"
            )
