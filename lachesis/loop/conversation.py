"""The conversation of a rollout: as it is kept, and as the model sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from lachesis.loop.context_edits import CountedMessages
from lachesis_messages.history import MessageHistory
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse


class AgentConversation:
    """`history` is kept. `request` is what the model sees: `history`, or a copy with the ephemeral parts added."""

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], ephemeral: str | None, prefill: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raises `MessageError` if `messages` is not a valid conversation."""
        self.history = MessageHistory(messages)
        validate_messages(node.message for node in self.history.nodes())
        self.request = self.history
        if ephemeral or prefill:
            self.request = MessageHistory(_request_messages(self.history.to_openai("reasoning"), ephemeral, prefill))
        self.offset = len(self.request) - len(self.history)
        self.answered_length = len(self.history)
        """Messages up to here are a conversation without open tool calls."""
        self.good_length = len(self.history)
        """Messages up to here end with a turn that had no flaw."""
        self.turn_began = len(self.history)
        """The last turn that was answered begins here."""
        self.size: CountedMessages | None = None
        self.cut_off: list[ToolResponse] = []
        """Results without an end, of sub-agents that were still at work."""

    def fork(self, *, own: bool) -> AgentConversation:
        """A copy that goes on independently, and that nobody counts yet. `own`: see `MessageHistory.fork`."""
        other = copy(self)
        other.history = self.history.fork(own=own)
        other.request = other.history if self.request is self.history else self.request.fork()
        other.size, other.cut_off = None, []
        return other

    def count_with(self, size: CountedMessages) -> None:
        """Tell `size` of the messages, and of each change from now on."""
        self.size = size
        for node in self.history.nodes():
            size.add(node.message)

    def begin_turn(self) -> None:
        """The user has spoken."""
        self.turn_began = self.answered_length = self.good_length = len(self.history)

    def end_turn(self, *, good: bool) -> None:
        """All calls of the turn are answered. `good`: it had no flaw."""
        self.turn_began, self.answered_length = self.answered_length, len(self.history)
        if good:
            self.good_length = self.answered_length

    def drop_unfinished(self, reason: str) -> None:
        """Cut off the turn that is not answered to its end, with what sub-agents said for it."""
        for result in self.cut_off:
            self.append(result)
        self.cut_off = []
        if len(self.history) > self.answered_length:
            self.rewind(self.answered_length, f"unfinished turn: {reason}")

    def append(self, entry: ChatResponse | ToolResponse | Message) -> None:
        self.history.append(entry)
        if self.request is not self.history:
            self.request.append(entry)
        if self.size is not None:
            self.size.add(entry)

    def rewind(self, length: int, reason: str, *, attempt: bool = False) -> None:
        self.history.rewind(length, reason, attempt=attempt)
        if self.request is not self.history:
            self.request.rewind(self.offset + length, reason, attempt=attempt)
        if self.size is not None:
            self.size.cut(length)

    def replace(self, start: int, stop: int, *messages: Message) -> None:
        """Put `messages` in the place of those from `start` to before `stop`, which ends a turn."""
        self.history[start:stop] = messages
        if self.request is not self.history:
            self.request[self.offset + start : self.offset + stop] = messages
        if self.size is not None:
            self.size.replace(start, stop, *messages)
        end, shift = start + len(messages), len(messages) - (stop - start)

        def moved(length: int) -> int:
            return length if length <= start else max(end, length + shift)

        self.answered_length, self.good_length = moved(self.answered_length), moved(self.good_length)
        self.turn_began = moved(self.turn_began)


def _request_messages(
    messages: Sequence[Mapping[str, Any]], ephemeral: str | None, prefill: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The first request: `messages`, the ephemeral prompt appended to the system message, then the prefill."""
    request = [dict(message) for message in messages]
    has_system = bool(request) and request[0]["role"] == "system"
    if ephemeral:
        if has_system:
            said = request[0]["content"]
            if isinstance(said, str):
                request[0]["content"] = f"{said}\n\n{ephemeral}"
            else:
                request[0]["content"] = [*said, {"type": "text", "text": f"\n\n{ephemeral}"}]
        else:
            request.insert(0, {"role": "system", "content": ephemeral})
            has_system = True
    at = 1 if has_system else 0
    request[at:at] = [dict(message) for message in prefill]
    return request
