"""The JSON of a conversation's messages for requests. Each message is encoded once, not once a turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import overload

import orjson

from backends.text import without_lone_surrogates
from lachesis_messages.messages import Message, OpenAIMessage
from lachesis_messages.nodes import Node
from lachesis_messages.shared_text import SharedText


class EncodedMessages:
    """A JSON list of messages, as it was when it was made."""

    __slots__ = ("_end", "_text")

    def __init__(self, text: SharedText, end: int) -> None:
        self._text = text
        self._end = end

    def json_pieces(self) -> list[bytes | memoryview]:
        """The list, in pieces. See `SharedText.pieces`."""
        return [b"[", *self._text.pieces(self._end), b"]"]


class EncodedPath:
    """The text of the last path that was encoded. The next one, mostly longer, costs its new messages.

    `reasoning_field` is that of `Message.to_openai`.
    """

    __slots__ = ("_ends", "_field", "_nodes", "_text")

    def __init__(self, reasoning_field: str | None) -> None:
        self._field = reasoning_field
        self._nodes: list[Node] = []
        self._ends: list[int] = []
        self._text = SharedText(b"")

    def encode(self, path: Sequence[Node]) -> EncodedMessages:
        """The messages of `path`. What an earlier call returned stays as it was."""
        kept = self._shared(path)
        end = self._ends[kept - 1] if kept else 0
        if kept < len(self._nodes):
            del self._nodes[kept:], self._ends[kept:]
            self._text = SharedText(self._text.part(0, end))
        if kept < len(path):
            more = bytearray()
            for node in path[kept:]:
                if end or more:
                    more += b","
                more += _encoded(node.message, self._field)
                self._nodes.append(node)
                self._ends.append(end + len(more))
            text, _ = self._text.extended(end, bytes(more))
            # Another text if this one is being sent at the moment.
            self._text = text if text is self._text else SharedText(self._text.part(0, end) + more)
            end += len(more)
        return EncodedMessages(self._text, end)

    def _shared(self, path: Sequence[Node]) -> int:
        known = self._nodes
        if list(path[: len(known)]) == known:  # nodes are compared by identity
            return len(known)
        return next(
            (at for at, (one, other) in enumerate(zip(path, known, strict=False)) if one is not other), len(path)
        )


class NodeMessages(Sequence[OpenAIMessage]):
    """The messages of nodes as read-only OpenAI dicts, and their JSON.

    `kept` has the texts of earlier conversations of the same rollout.
    """

    def __init__(self, nodes: Sequence[Node], kept: dict[str | None, EncodedPath]) -> None:
        self._nodes = nodes
        self._kept = kept

    def encoded(self, reasoning_field: str | None) -> EncodedMessages:
        """See `MessageHistory.encoded`."""
        return encode_path(self._nodes, reasoning_field, self._kept)

    @overload
    def __getitem__(self, index: int) -> OpenAIMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[OpenAIMessage]: ...
    def __getitem__(self, index: int | slice) -> OpenAIMessage | list[OpenAIMessage]:
        found = self._nodes[index]
        return found.item if isinstance(found, Node) else [node.item for node in found]

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[OpenAIMessage]:
        return (node.item for node in self._nodes)


def encode_path(
    path: Sequence[Node], reasoning_field: str | None, kept: dict[str | None, EncodedPath]
) -> EncodedMessages:
    """The messages of `path`, with the texts that are `kept` for each field."""
    known = kept.get(reasoning_field)
    if known is None:
        known = kept[reasoning_field] = EncodedPath(reasoning_field)
    return known.encode(path)


def _encoded(message: Message, reasoning_field: str | None) -> bytes:
    plain = message.to_openai(reasoning_field if message.role == "assistant" else None)
    try:
        return orjson.dumps(plain)
    except (TypeError, orjson.JSONEncodeError):  # lone surrogates and huge integers: models write them
        return without_lone_surrogates(json.dumps(plain, ensure_ascii=False)).encode()
