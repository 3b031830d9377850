"""Finds the sampled messages in a list of plain dicts, for callers that keep no history."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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

    A message counts as the sampled one if it is equal and follows equal messages. Its reasoning may be missing
    (OpenAI's clients do not send it back), an empty content may be null, and arguments may be other JSON for the same
    value. Reasoning that is present must be equal: it distinguishes completions with the same answer.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, Found] = {}

    def find(self, messages: Sequence[Message | Mapping[str, Any]]) -> Found:
        """The nodes of `messages`. New messages are added."""
        path: list[Node] = []
        key = b""
        for index, given in enumerate(messages):
            message = as_message(_plain(given), index)
            own = _key(key, message)
            found = self._nodes.get(own)
            if found is None and message.reasoning is None:
                found = self._nodes.get(_key(key, message, with_reasoning=False))
            if found is None:
                node = Node.after(path[-1] if path else None, message)
                found = self._nodes[own] = Found((node,), own)
            path += found.nodes
            key = found.key
        return Found(tuple(path), key)

    def add(self, found: Found, responses: Sequence[ChatResponse]) -> None:
        """Add completions of a conversation. Of several equal ones, the first is continued."""
        parent = found.nodes[-1] if found.nodes else None
        for response in responses:
            own = _key(found.key, response.message)
            known = self._nodes.get(own)
            if known is None or known.nodes[0].origin is None:
                known = self._nodes[own] = Found((Node.after(parent, response.message, response),), own)
            self._nodes.setdefault(_key(found.key, response.message, with_reasoning=False), known)


def _key(before: bytes, message: Message, *, with_reasoning: bool = True) -> bytes:
    """The digest of a message and the messages before it."""
    assistant = message.role == "assistant"
    fields = {
        "role": message.role,
        "name": message.name,
        "content": message.text if assistant else message.to_openai()["content"],
        "calls": [(call.id, call.name, _parsed(call.arguments)) for call in message.tool_calls],
        "answers": message.tool_call_id,
        "reasoning": message.reasoning if with_reasoning else 0,
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


def _parsed(arguments: str) -> Any:
    """The value of the arguments, which clients parse and write again; the text if it is no JSON."""
    try:
        return [json.loads(arguments)]
    except (ValueError, RecursionError):
        return arguments
