"""Validation of a list of messages as a conversation with an OpenAI-shaped server.

The rules, in the order of checking: every message is well-formed; only the first message may be a system message; the
ids of tool calls are unique in the conversation; an assistant message with tool calls is followed by the results of
exactly these calls, in any order. Two user or two assistant messages in a row are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

from lachesis_messages.errors import (
    DuplicateCallId,
    MalformedMessage,
    RoleOrder,
    UnansweredToolCall,
    UnexpectedToolResult,
)
from lachesis_messages.responses import MessageLike, as_message


def validate_messages(messages: Iterable[MessageLike], *, complete: bool = True, late_system: bool = False) -> None:
    """Raises the MessageError of the first broken rule; its `index` names the message.

    `complete=False` allows a conversation in progress: results of its last tool calls may be missing. `late_system`
    allows system messages that are not the first one.
    """
    asked: dict[str, int] = {}  # every call id so far -> index of its assistant message
    answered: dict[str, int] = {}  # call ids with a result -> index of the tool message
    pending: dict[str, None] = {}  # ids of the latest calls without a result, in the order of the calls
    count = 0
    for index, item in enumerate(messages):
        count += 1
        message = as_message(item, index)
        if message.role == "system" and index and not late_system:
            raise RoleOrder("a system message can only be the first message", index=index)
        if message.role == "tool":
            call_id = message.tool_call_id
            if call_id is None:
                raise MalformedMessage("a tool message needs the tool_call_id that it answers", index=index)
            if call_id not in pending:
                raise UnexpectedToolResult(_unexpected(call_id, asked, answered), index=index)
            del pending[call_id]
            answered[call_id] = index
            continue
        if pending:
            raise _unanswered(pending, asked, f"before message {index} ({message.role})")
        for call in message.tool_calls:
            if call.id in asked:
                where = "twice in this message" if asked[call.id] == index else f"already in message {asked[call.id]}"
                raise DuplicateCallId(f"tool call id {call.id!r} is used {where}", index=index)
            asked[call.id] = index
            pending[call.id] = None
    if not count:
        raise MalformedMessage("a conversation needs at least one message")
    if pending and complete:
        raise _unanswered(pending, asked, "at the end of the conversation")


def _unanswered(pending: dict[str, None], asked: dict[str, int], where: str) -> UnansweredToolCall:
    ids = tuple(pending)
    return UnansweredToolCall(f"no result for {', '.join(map(repr, ids))} {where}", ids=ids, index=asked[ids[0]])


def _unexpected(call_id: str, asked: dict[str, int], answered: dict[str, int]) -> str:
    if call_id in answered:
        return f"a second result for {call_id!r}, which message {answered[call_id]} answered"
    return f"a result for {call_id!r}, which no message before it called"
