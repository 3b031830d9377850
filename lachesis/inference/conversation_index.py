"""Finds the sampled messages in a list of plain dicts, for callers that keep no history.

One invariant: a conversation continues a sampled message only if it and every message before it are as they were, as
far as clients send messages back. Nothing is compared by similarity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from lachesis.trajectories import ChatResponse, Message, Node
from lachesis.trajectories.frozen import thaw
from lachesis.trajectories.messages import as_message


class Found(NamedTuple):
    """A conversation: a node for each message, and its key."""

    nodes: tuple[Node, ...]
    key: bytes


class _Read(NamedTuple):
    message: Message
    digest: bytes


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
        self._read: dict[bytes, _Read] = {}
        """Messages that came before, by their JSON: a client sends the whole conversation each turn."""

    def find(self, messages: Sequence[Message | Mapping[str, Any]]) -> Found:
        """The nodes of `messages`. New messages are added."""
        read = [self._message(message, index) for index, message in enumerate(messages)]
        given = [message for message, _ in read]
        places = _answered_calls(given)
        keys = [b""]
        for index, (message, own) in enumerate(read):
            keys.append(_key(keys[-1], own, places.get(index, message.tool_call_id)))
        path = self._sampled(given, keys)
        for index in range(len(path), len(given)):
            message = given[index]
            if (place := places.get(index)) is not None:
                call_id = path[place[0]].message.tool_calls[place[1]].id
                message = message if call_id == message.tool_call_id else replace(message, tool_call_id=call_id)
            path.append(self._after(path[-1] if path else None, message, keys[index + 1]))
        return Found(tuple(path), keys[-1])

    def add(self, found: Found, responses: Sequence[ChatResponse]) -> list[Node]:
        """Add completions of a conversation. Of several equal ones, the first is continued."""
        parent = found.nodes[-1] if found.nodes else None
        nodes = [Node.after(parent, response.message, response) for response in responses]
        for node in nodes:
            self._nodes.setdefault(_key(found.key, _digest(node.message), None), []).append(node)
        return nodes

    def _message(self, given: Message | Mapping[str, Any], index: int) -> _Read:
        """A message, and the digest of it alone."""
        known = None
        if type(given) is dict:
            with suppress(TypeError):  # objects of the openai package, lone surrogates
                known = blake2b(orjson.dumps(given), digest_size=16).digest()
        read = self._read.get(known) if known is not None else None
        if read is None:
            message = as_message(_plain(given), index)
            read = _Read(message, _digest(message))
            if known is not None:
                self._read[known] = read
        return read

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


def _answered_calls(messages: Sequence[Message]) -> dict[int, tuple[int, int]]:
    """For each tool result, the message and the position of the call that it answers.

    Later calls have precedence over earlier ones with the same id. Several calls of one message with the same id are
    answered in their order.
    """
    known: dict[str, list[tuple[int, int]]] = {}
    found: dict[int, tuple[int, int]] = {}
    for index, message in enumerate(messages):
        if message.tool_calls:
            own: dict[str, list[tuple[int, int]]] = {}
            for position, call in enumerate(message.tool_calls):
                own.setdefault(call.id, []).append((index, position))
            known |= own
        elif calls := known.get(message.tool_call_id or ""):
            found[index] = calls.pop(0) if len(calls) > 1 else calls[0]
    return found


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
    """The value of the arguments, which clients parse and write again; the text if it is no JSON."""
    try:
        return [json.loads(arguments or "{}", parse_float=_number)]
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> float | int:
    """JavaScript writes 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value
