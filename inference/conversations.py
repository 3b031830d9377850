"""Which messages of a list were sampled here: for callers that pass plain dicts and keep no history."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from trajectories import ChatResponse, Message, Node
from trajectories.messages import as_message


class Conversations:
    """The conversations that were had, as a tree of nodes that is looked up message by message.

    A message counts as the sampled one where it says the same behind the same messages. Its reasoning may be missing
    (OpenAI's clients do not send it back), and an empty content may be null.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}

    def nodes(self, messages: Sequence[Message | Mapping[str, Any]]) -> tuple[Node, ...]:
        """The path of nodes of `messages`; those that are new are remembered."""
        path: list[Node] = []
        key = b""
        for index, given in enumerate(messages):
            message = as_message(given, index)
            key = _key(key, message)
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = Node.after(path[-1] if path else None, message)
            path.append(node)
        return tuple(path)

    def add(self, path: Sequence[Node], responses: Sequence[ChatResponse]) -> None:
        """Remember what was sampled behind `path`. Of several that say the same, the first is gone on with."""
        key = b""
        for node in path:
            key = _key(key, node.message)
        for response in responses:
            parent = path[-1] if path else None
            self._nodes.setdefault(_key(key, response.message), Node.after(parent, response.message, response))


def _key(before: bytes, message: Message) -> bytes:
    said = {
        "role": message.role,
        "content": message.text if message.role == "assistant" else message.to_openai()["content"],
        "calls": [(call.id, call.name, call.arguments) for call in message.tool_calls],
        "answers": message.tool_call_id,
    }
    text = json.dumps(said, ensure_ascii=False, sort_keys=True)
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
