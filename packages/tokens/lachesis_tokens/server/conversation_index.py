"""Finds the sampled messages in a list of plain dicts, for callers that keep no history.

One invariant: a conversation continues a sampled message only if it and every message before it are as they were, as
far as clients send messages back. Nothing is compared by similarity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from lachesis_messages.frozen import thaw
from lachesis_messages.messages import Message
from lachesis_messages.nodes import Node
from lachesis_messages.responses import ChatResponse, as_message
from lachesis_tokens.server.message_copies import Uncopied, copy_of

_RECENT: Final = 4
"""Conversations of a rollout that take turns, such as those of sub-agents, and may grow."""


class Found(NamedTuple):
    """A conversation: a node for each message, and its key."""

    nodes: tuple[Node, ...]
    key: bytes


class _Known:
    """A conversation as it came last: for each message a copy, what was read, and the key up to it."""

    __slots__ = ("calls", "copies", "digests", "keys", "messages", "nodes", "places")

    def __init__(self) -> None:
        self.copies: list[Any] = []
        self.messages: list[Message] = []
        self.digests: list[bytes] = []
        self.keys: list[bytes] = [b""]
        self.places: dict[int, tuple[int, int]] = {}
        """For each tool result, the message and the position of the call that it answers."""
        self.calls = _Calls()
        self.nodes: list[Node] | None = []
        """None if they must be searched again."""

    def holds(self, index: int, given: Any) -> bool:
        """Whether this message is as it was."""
        try:
            return index < len(self.copies) and bool(given == self.copies[index])
        except Exception:  # of a class of the client
            return False

    def shared(self, given: Sequence[Any]) -> int:
        """How many messages at the beginning are as they were."""
        copies = self.copies
        try:
            if given[: len(copies)] == copies:
                return len(copies)
        except Exception:  # of a class of the client
            return 0
        return next((at for at, one in enumerate(given) if not self.holds(at, one)), len(given))

    def begun(self, length: int) -> _Known:
        """Its first messages as a conversation of their own."""
        other = _Known()
        other.copies, other.messages = self.copies[:length], self.messages[:length]
        other.digests, other.keys = self.digests[:length], self.keys[: length + 1]
        for index, message in enumerate(other.messages):
            if (place := other.calls.answered(index, message)) is not None:
                other.places[index] = place
        other.nodes = None if length else []
        return other

    def add(self, message: Message, digest: bytes) -> None:
        index = len(self.messages)
        if (place := self.calls.answered(index, message)) is not None:
            self.places[index] = place
        self.messages.append(message)
        self.digests.append(digest)
        self.keys.append(_key(self.keys[-1], digest, place or message.tool_call_id))


class ConversationIndex:
    """Earlier conversations as a tree of nodes, under keys of all their messages.

    A message counts as the sampled one if it is equal and follows equal messages. These differences are none:

    * Its reasoning is missing: OpenAI's clients do not send it back. Reasoning that is present must be equal: it
      distinguishes completions with the same answer.
    * An empty content is null, or the content is a list of text parts.
    * The arguments of a call are other JSON text for the same value.
    * The calls of a conversation have other ids. A result belongs to the call at the position that its id names, and
      the node keeps the ids that were sampled.
    * An assistant message has further fields.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, list[Node]] = {}
        self._recent: list[_Known] = []
        """The last conversations: a client sends the whole conversation each turn, mostly with more at its end."""

    def find(self, messages: Sequence[Message | Mapping[str, Any]]) -> Found:
        """The nodes of `messages`. New messages are added.

        Messages that are as they were in the call before, also if they are other objects, cost a comparison.
        """
        given = list(messages)
        known = self._begun(given)
        begun = len(known.messages)
        for index in range(begun, len(given)):
            same = next((other for other in self._recent if other.holds(index, given[index])), None)
            if same is not None:
                known.add(same.messages[index], same.digests[index])
            else:
                message = as_message(_plain(given[index]), index)
                known.add(message, _digest(message))
        path = self._continued(known, begun) if known.nodes is not None else None
        if path is None:
            path = self._sampled(known.messages, known.keys)
        for index in range(len(path), len(given)):
            message = known.messages[index]
            if (place := known.places.get(index)) is not None:
                call_id = path[place[0]].message.tool_calls[place[1]].id
                message = message if call_id == message.tool_call_id else replace(message, tool_call_id=call_id)
            path.append(self._after(path[-1] if path else None, message, known.keys[index + 1]))
        found = Found(tuple(path), known.keys[-1])
        known.nodes = path
        self._keep(known, given)
        return found

    def add(self, found: Found, responses: Sequence[ChatResponse]) -> list[Node]:
        """Add completions of a conversation. Of several equal ones, the first is continued."""
        parent = found.nodes[-1] if found.nodes else None
        nodes = [Node.after(parent, response.message, response) for response in responses]
        place = len(found.nodes) + 1
        for node in nodes:
            key = _key(found.key, _digest(node.message), None)
            self._nodes.setdefault(key, []).append(node)
            for known in self._recent:
                if known.keys[place : place + 1] == [key]:  # it has a message that was sampled only now
                    known.nodes = None
        return nodes

    def _begun(self, given: list[Any]) -> _Known:
        """The recent conversation that has most of these messages at its beginning, without its other messages."""
        best, most = None, 0
        for known in self._recent:
            if (shared := known.shared(given)) > most:
                best, most = known, shared
        if best is None:
            return _Known()
        if most < len(best.copies):
            return best.begun(most)
        self._recent.remove(best)
        return best

    def _keep(self, known: _Known, given: list[Any]) -> None:
        try:
            for message in given[len(known.copies) :]:
                known.copies.append(copy_of(message))
        except (Uncopied, RecursionError):  # it and those after it are read again each time
            known = known.begun(len(known.copies))
        self._recent = [*self._recent[1 - _RECENT :], known]

    def _continued(self, known: _Known, begun: int) -> list[Node] | None:
        """The path to the last message that was sampled in its place, if it extends the path of the first `begun`
        messages in one way only."""
        assert known.nodes is not None
        last = known.nodes[-1] if known.nodes else None
        for length in range(len(known.messages), begun, -1):
            found = []
            for node in self._nodes.get(known.keys[length], ()):
                if node.origin is None:
                    continue
                line: list[Node] = []
                above: Node | None = node
                while above is not None and len(line) < length - begun:
                    line.append(above)
                    above = above.parent
                if above is not last:
                    return None
                if _agree(line[::-1], known.messages[begun:length]):
                    found.append(line[::-1])
            if len(found) > 1:
                return None
            if found:
                return known.nodes + found[0]
        return known.nodes

    def _sampled(self, given: Sequence[Message], keys: Sequence[bytes]) -> list[Node]:
        """The path to the last message that was sampled in its place."""
        for length in range(len(given), 0, -1):
            known = self._nodes.get(keys[length], ())
            paths = [path for node in known if node.origin is not None and _agree(path := _path(node), given)]
            if paths:
                return paths[0] if len(paths) == 1 else max(paths, key=lambda path: _likeness(path, given))
        return []

    def _after(self, parent: Node | None, message: Message, key: bytes) -> Node:
        """The node of a message that a client wrote."""
        known = self._nodes.setdefault(key, [])
        for node in known:
            if node.origin is None and node.parent is parent and node.message.reasoning == message.reasoning:
                return node
        known.append(Node.after(parent, message))
        return known[-1]


def _path(node: Node) -> list[Node]:
    path = []
    above: Node | None = node
    while above is not None:
        path.append(above)
        above = above.parent
    return path[::-1]


def _agree(path: Sequence[Node], given: Sequence[Message]) -> bool:
    """Whether the reasoning that came back is that of the nodes."""
    return all(
        message.reasoning is None or message.reasoning == node.message.reasoning
        for node, message in zip(path, given, strict=False)
    )


def _likeness(path: Sequence[Node], given: Sequence[Message]) -> tuple[int, int, int]:
    """How many messages are those of the nodes, how many call ids are, and how many messages have their reasoning."""
    same = ids = thoughts = 0
    for node, message in zip(path, given, strict=False):
        same += message is node.message
        calls = zip(message.tool_calls, node.message.tool_calls, strict=True)
        ids += sum(theirs.id == ours.id for theirs, ours in calls)
        thoughts += message.reasoning == node.message.reasoning
    return same, ids, thoughts


class _Calls:
    """The calls of a conversation, by their ids.

    Later calls have precedence over earlier ones with the same id. Several calls of one message with the same id are
    answered in their order.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[int, int]]] = {}

    def answered(self, index: int, message: Message) -> tuple[int, int] | None:
        """Note the next message. For a tool result, the message and the position of the call that it answers."""
        if message.tool_calls:
            own: dict[str, list[tuple[int, int]]] = {}
            for position, call in enumerate(message.tool_calls):
                own.setdefault(call.id, []).append((index, position))
            self._known |= own
        elif calls := self._known.get(message.tool_call_id or ""):
            return calls.pop(0) if len(calls) > 1 else calls[0]
        return None


def _key(before: bytes, own: bytes, answers: Any) -> bytes:
    """The digest of a message and the messages before it. `answers` is the call that it answers."""
    return blake2b(b"%b%b%r" % (before, own, answers), digest_size=16).digest()


def _digest(message: Message) -> bytes:
    """The digest of a message, without what clients change."""
    assistant = message.role == "assistant"
    fields = {
        "role": message.role,
        "name": message.name,
        "content": message.text if assistant else message.to_openai()["content"],
        "calls": [(call.name, _value(call.arguments)) for call in message.tool_calls],
        "more": {} if assistant else thaw(message.extra),  # OpenAI's clients add fields to assistant messages
    }
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _plain(given: Any) -> Any:
    """A message as a dict. Messages and calls may be objects of the openai package."""
    if hasattr(given, "model_dump"):
        return given.model_dump(exclude_none=True)
    calls = given.get("tool_calls") if isinstance(given, Mapping) else None
    if isinstance(calls, (list, tuple)) and any(hasattr(call, "model_dump") for call in calls):
        return {**given, "tool_calls": [_plain(call) for call in calls]}
    return given


def _value(arguments: str) -> Any:
    """The value of the arguments, which clients parse and write again; the text if it is not valid JSON."""
    try:
        return [json.loads(arguments or "{}", parse_float=_number)]
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> float | int:
    """JavaScript writes 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value
