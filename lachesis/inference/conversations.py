"""Which messages of a list were sampled here: for callers that pass plain dicts and keep no history."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from lachesis.trajectories import ChatResponse, Message, Node
from lachesis.trajectories.frozen import thaw
from lachesis.trajectories.messages import as_message


class Found(NamedTuple):
    """A conversation that was looked up, or the end of one."""

    nodes: tuple[Node, ...]
    key: bytes


class Conversations:
    """The conversations that were had, as a tree of nodes that is looked up message by message.

    A message counts as the sampled one where it says the same behind the same messages. Its reasoning may be missing
    (OpenAI's clients do not send it back), an empty content may be null, and arguments may be other JSON for the same.
    Reasoning that is there has to be the same: of several completions with one answer it tells which is meant.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, Found] = {}

    def find(self, messages: Sequence[Message | Mapping[str, Any]]) -> Found:
        """The path of nodes of `messages`; those that are new are remembered."""
        path: list[Node] = []
        key = b""
        for index, given in enumerate(messages):
            message = as_message(_plain(given), index)
            own = _key(key, message)
            found = self._nodes.get(own)
            if found is None and message.reasoning is None:
                found = self._nodes.get(_key(key, message, told=False))
            if found is None:
                node = Node.after(path[-1] if path else None, message)
                found = self._nodes[own] = Found((node,), own)
            path += found.nodes
            key = found.key
        return Found(tuple(path), key)

    def add(self, found: Found, responses: Sequence[ChatResponse]) -> None:
        """Remember what was sampled behind a path. Of several that say the same, the first is gone on with."""
        parent = found.nodes[-1] if found.nodes else None
        for response in responses:
            own = _key(found.key, response.message)
            known = self._nodes.get(own)
            if known is None or known.nodes[0].origin is None:
                known = self._nodes[own] = Found((Node.after(parent, response.message, response),), own)
            self._nodes.setdefault(_key(found.key, response.message, told=False), known)


def _key(before: bytes, message: Message, *, told: bool = True) -> bytes:
    """What a message says; without its reasoning where that is not `told`."""
    assistant = message.role == "assistant"
    said = {
        "role": message.role,
        "name": message.name,
        "content": message.text if assistant else message.to_openai()["content"],
        "calls": [(call.id, call.name, _parsed(call.arguments)) for call in message.tool_calls],
        "answers": message.tool_call_id,
        "reasoning": message.reasoning if told else 0,
        "more": {} if assistant else thaw(message.extra),  # clients of OpenAI's add to what the assistant said
    }
    text = json.dumps(said, ensure_ascii=False, sort_keys=True)
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _plain(given: Any) -> Any:
    """Messages and calls may be the openai package's own objects, as its users send them back."""
    if hasattr(given, "model_dump"):
        return given.model_dump(exclude_none=True)
    calls = given.get("tool_calls") if isinstance(given, Mapping) else None
    if isinstance(calls, (list, tuple)) and any(hasattr(call, "model_dump") for call in calls):
        return {**given, "tool_calls": [_plain(call) for call in calls]}
    return given


def _parsed(arguments: str) -> Any:
    """Clients read arguments and write them again; what is no JSON is a text."""
    try:
        return [json.loads(arguments)]
    except (ValueError, RecursionError):
        return arguments
