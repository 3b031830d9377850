"""Finds the sampled messages in a list of plain dicts, for callers that keep no history.

One invariant: two conversations share a node only where every message up to it is the same, as far as clients send
messages back. Nothing is compared by similarity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from lachesis.trajectories import ChatResponse, Message, Node
from lachesis.trajectories.frozen import thaw
from lachesis.trajectories.messages import as_message


class Found(NamedTuple):
    """A known conversation, or its last node."""

    nodes: tuple[Node, ...]
    key: bytes


class ConversationIndex:
    """Earlier conversations as a tree of nodes. Each message is looked up under the key of the messages before it.

    A message counts as the sampled one if it is equal and follows equal messages. These differences are none:

    * Its reasoning is missing: OpenAI's clients do not send it back. Reasoning that is present must be equal, because
      it distinguishes completions with the same answer.
    * An empty content is null, or the content is a list of text parts.
    * The arguments of a call are other JSON text for the same value.
    * Its calls have other ids. The results that follow are matched by the position of the call, and keep the sampled
      ids. Of several equal completions, ids and reasoning decide which one is continued.
    * An assistant message has further fields.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Found] = {}

    def find(self, messages: Sequence[Message | Mapping[str, Any]]) -> Found:
        """The nodes of `messages`. New messages are added."""
        path: list[Node] = []
        key = b""
        names = _CallIds()
        for index, given in enumerate(messages):
            message = names.of_result(as_message(_plain(given), index))
            found = self._lookup(key, message)
            if found is None:
                found = self._learn(key, Node.after(path[-1] if path else None, message))
            path += found.nodes
            key = found.key
            names.follow(message, found.nodes[-1].message)
        return Found(tuple(path), key)

    def add(self, found: Found, responses: Sequence[ChatResponse]) -> list[Node]:
        """Add completions of a conversation. Of several equal ones, the first is continued."""
        parent = found.nodes[-1] if found.nodes else None
        nodes = [Node.after(parent, response.message, response) for response in responses]
        for node in nodes:
            self._learn(found.key, node)
        return nodes

    def _lookup(self, before: bytes, message: Message) -> Found | None:
        for ids, reasoning in _WAYS if message.tool_calls else _WAYS[:2]:
            if reasoning or message.reasoning is None:
                found = self._known.get(_key(before, message, ids=ids, reasoning=reasoning))
                if found is not None:
                    return found
        return None

    def _learn(self, before: bytes, node: Node) -> Found:
        """Register a node. A sampled one has precedence over a message that a client wrote."""
        message, sampled = node.message, node.origin is not None
        own = _key(before, message)
        learned = Found((node,), own)
        for ids, reasoning in _WAYS if message.tool_calls else _WAYS[:2]:
            if not reasoning and not sampled:
                continue  # without its reasoning, a message that nobody sampled is another prompt
            key = _key(before, message, ids=ids, reasoning=reasoning)
            known = self._known.get(key)
            if known is None or (sampled and known.nodes[0].origin is None):
                self._known[key] = learned
        return learned


_WAYS = ((True, True), (True, False), (False, True), (False, False))
"""Which of a message's call ids and reasoning must be equal, the strictest way first."""


class _CallIds:
    """The ids of a conversation's calls: those of a client, and those of the nodes."""

    def __init__(self) -> None:
        self._own: dict[str, list[str]] = {}

    def follow(self, given: Message, own: Message) -> None:
        """Note the ids of an assistant message. Later calls have precedence over earlier ones with the same id."""
        noted: dict[str, list[str]] = {}
        for theirs, ours in zip(given.tool_calls, own.tool_calls, strict=True):
            noted.setdefault(theirs.id, []).append(ours.id)
        self._own |= noted

    def of_result(self, message: Message) -> Message:
        """A tool result with the id of the node's call. Several calls with one id are answered in their order."""
        ours = self._own.get(message.tool_call_id or "")
        if not ours:
            return message
        own = ours.pop(0) if len(ours) > 1 else ours[0]
        return message if own == message.tool_call_id else replace(message, tool_call_id=own)


def _key(before: bytes, message: Message, *, ids: bool = True, reasoning: bool = True) -> bytes:
    """The digest of a message and the messages before it."""
    assistant = message.role == "assistant"
    fields = {
        "role": message.role,
        "name": message.name,
        "content": message.text if assistant else message.to_openai()["content"],
        "calls": [(call.id if ids else 0, call.name, _value(call.arguments)) for call in message.tool_calls],
        "answers": message.tool_call_id,
        "reasoning": message.reasoning if reasoning else 0,
        "more": {} if assistant else thaw(message.extra),  # OpenAI's clients add fields to assistant messages
    }
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True)
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


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
