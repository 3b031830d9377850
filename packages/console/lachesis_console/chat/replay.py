"""A recorded rollout, played again in a chat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from backends.text import counted
from lachesis.loop.conversation import AgentConversation
from lachesis_console.chat.journal import alike
from lachesis_console.chat.recordings import RecordedRollout, differs
from lachesis_console.chat.screen import Screen
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_tools import ToolResult

PlayLost: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], Awaitable[Mapping[str, str]]]
"""Runs turns that do not stay in the conversation: the results now, by the ids of the calls."""


class Replay:
    """The turns of a recording, and how its results differ from those of now.

    What ran and is not in the conversation any more is run in its turn: what follows may need what it left in the
    sandbox.

    Args:
        turns: how many are played; None means all.
    """

    def __init__(self, screen: Screen, recorded: RecordedRollout | None, turns: int | None) -> None:
        self._screen = screen
        self._recorded = recorded
        self._messages = [*recorded.turns] if recorded is not None else []
        self._lost = dict(recorded.lost) if recorded is not None else {}
        self._left = turns if turns is not None else sum(each["role"] == "assistant" for each in self._messages)
        self._whole = turns is None
        self._place = 0
        """Of the next message."""
        self._began = False
        self.over = not self._messages and not self._lost
        self._turns = self._lost_turns = self._results = self._differing = 0
        self._volatile = 0
        """Results that differ in times, addresses or numbers only."""

    async def turn(self, conversation: AgentConversation, play_lost: PlayLost) -> Message | None:
        """The next turn or None. Compares results with those in `conversation`, and adds unanswered messages to it."""
        if not self._began:
            self._began = True
            self._begin(conversation)
        now = results_of(conversation.history)
        while True:
            if self._goes_on:
                await self._play_lost(play_lost, self._place)
            if self._place >= len(self._messages):
                break
            recorded = self._messages[self._place]
            if recorded["role"] == "tool":
                self._compare(recorded, now)
            elif recorded["role"] == "assistant" or not self._goes_on:
                break
            else:
                conversation.append(said := Message.from_openai(recorded))
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
            if self._goes_on and not said.tool_calls:  # what was taken back behind the last answer
                await self._play_lost(play_lost, self._place)
            self._summarise()
        return said

    @property
    def _goes_on(self) -> bool:
        return self._left > 0 or self._whole

    def _begin(self, conversation: AgentConversation) -> None:
        """Put the prompt of the recording in the place of the item's, where a summary had replaced a part of it."""
        if self._recorded is None or (prompt := self._recorded.new_prompt) is None:
            return
        new, old = [Message.from_openai(each) for each in prompt], [n.message for n in conversation.history.nodes()]
        same = alike(new, old)
        conversation.replace(same, len(old), *new[same:])

    async def _play_lost(self, play_lost: PlayLost, place: int) -> None:
        for at in sorted(at for at in self._lost if at <= place):
            messages = self._lost.pop(at)
            turns = sum(each["role"] == "assistant" for each in messages)
            self._screen.note(
                f"{counted(turns, 'turn')} that the conversation no longer has, because a summary replaced "
                f"{'it' if turns == 1 else 'them'} or {'it was' if turns == 1 else 'they were'} taken back:"
            )
            self._lost_turns += turns
            now = await play_lost(messages)
            for each in messages:
                if each["role"] == "tool":
                    self._compare(each, now)

    def user(self) -> ToolResult | None:
        """What the user says next; None if the recording has no more, or is not played further."""
        if self._place >= len(self._messages) or not self._goes_on:
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
            lost = f", and {self._lost_turns} that the conversation no longer has" if self._lost_turns else ""
            self._screen.note(
                f"replayed {counted(self._turns, 'turn')}{lost}: {self._differing} of {self._results} results differ"
                f"{more}"
            )


def results_of(history: MessageHistory) -> dict[str, str]:
    """By the ids of the calls."""
    return {node.message.tool_call_id: node.message.text for node in history.nodes() if node.message.tool_call_id}
