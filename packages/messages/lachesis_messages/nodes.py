"""The nodes of a message history: immutable, content-addressed, each with a pointer to its parent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lachesis_messages.frozen import FrozenDict, freeze, freeze_dict
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse

if TYPE_CHECKING:
    from lachesis_messages.tokens import TokenPrefix

Origin: TypeAlias = ChatResponse | ToolResponse | None

_canonical = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode
"""Keys sorted, no spaces: the same bytes on every machine."""


class Item(FrozenDict):
    """A node's message as a read-only OpenAI dict. It carries the origin of the message, so that a history recognises
    its own items by identity, not by content."""

    __slots__ = ("origin",)
    origin: Origin


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One message in its context. Nodes are compared by identity: two completions with the same text are two nodes.

    `item` and `digest` are computed at first use, which for most nodes is late or never.
    """

    parent: Node | None = field(repr=False)
    message: Message
    """Deeply immutable."""
    origin: Origin
    """The completion or tool result of the message; None for messages that were written into the conversation, edits
    included."""
    sampled: bool = False
    """The origin is a completion, and the ancestors of this node are the context in which it was sampled. False for a
    completion that became context: after an edit, or appended somewhere else."""
    source: Node | None = field(default=None, repr=False)
    """The node that this node copies, edits or replaces."""
    _item: Item | None = field(default=None, repr=False)
    _digest: str | None = field(default=None, init=False, repr=False)

    @classmethod
    def after(
        cls,
        parent: Node | None,
        message: Message,
        origin: Origin = None,
        *,
        sampled: bool = True,
        source: Node | None = None,
    ) -> Node:
        """A node for `message` after `parent`. `sampled` is ignored unless `origin` is a completion.

        TypeError for a message with values that JSON cannot hold.
        """
        return cls(parent, _settled(message), origin, sampled and isinstance(origin, ChatResponse), source)

    @classmethod
    def copied(cls, parent: Node | None, source: Node) -> Node:
        """A copy of `source` as context after `parent`."""
        return cls(parent, source.message, source.origin, False, source, source._item)

    @property
    def item(self) -> Item:
        """The message as a read-only OpenAI dict, reasoning (if any) under `reasoning`."""
        item = self._item
        if item is None:
            plain = self.message.to_openai(reasoning_field="reasoning")
            item = Item([(key, value if type(value) is str else freeze(value)) for key, value in plain.items()])
            item.origin = self.origin
            object.__setattr__(self, "_item", item)
        return item

    @property
    def digest(self) -> str:
        """The address of the content: a hash over the parent's digest and the message. Equal digests mean equal
        conversations. Each node is hashed once."""
        line: list[Node] = []
        node: Node | None = self
        while node is not None and node._digest is None:
            line.append(node)
            node = node.parent
        before = node._digest if node is not None else None
        for node in reversed(line):
            before = message_digest(before or "", node.message.to_openai(reasoning_field="reasoning"))
            object.__setattr__(node, "_digest", before)
        assert before is not None
        return before

    def says(self, message: Message) -> bool:
        """Whether the message equals `message` exactly."""
        # == alone treats 1, 1.0 and True as equal.
        return message == self.message and _digest_of(message) == _digest_of(self.message)


@dataclass(frozen=True, slots=True)
class Discarded:
    """A branch that the conversation left or never followed: the nodes from position `at` on, first to last."""

    reason: str
    at: int
    nodes: tuple[Node, ...]
    attempt: bool = False
    """It could not be used, and the conversation is continued without it: see `MessageHistory.replaced_attempts`."""
    edit: bool = False
    """The conversation was rewritten from there on, as by a compaction, and not just shortened."""


def nearest_sampled(node: Node | None, context: str | None = None) -> tuple[TokenPrefix | None, int]:
    """The ids up to and including the nearest sampled completion, from `node` upwards, and the number of messages after
    it. With `context`, only completions with that `SampledTokens.context` count."""
    later = 0
    while node is not None:
        tokens = node.origin.tokens if node.sampled and isinstance(node.origin, ChatResponse) else None
        if tokens is not None and context in (None, tokens.context):
            return tokens.after, later
        node, later = node.parent, later + 1
    return None, later


def _settled(message: Message) -> Message:
    """The message, deeply immutable: itself, unless it contains a plain dict or list."""
    content = message.content
    texts: set[type] = {type(message.tool_call_id), type(message.name), type(message.reasoning)}
    extras: set[type] = {type(message.extra)}
    if type(content) is tuple:
        extras.update(map(type, content))
    else:
        texts.add(type(content))
    for call in message.tool_calls:
        texts |= {type(call.id), type(call.name), type(call.arguments)}
        extras.add(type(call.extra))
    if texts <= _TEXT_OR_NONE and extras <= _FROZEN:
        return message
    return Message(
        message.role,
        tuple(map(freeze, content)) if isinstance(content, tuple) else freeze(content),
        tuple(
            replace(
                call,
                id=freeze(call.id),
                name=freeze(call.name),
                arguments=freeze(call.arguments),
                extra=freeze_dict(call.extra),
            )
            for call in message.tool_calls
        ),
        freeze(message.tool_call_id),
        freeze(message.name),
        freeze(message.reasoning),
        freeze_dict(message.extra),
    )


_TEXT_OR_NONE: Final = frozenset({str, type(None)})
_FROZEN: Final = frozenset({FrozenDict})


def message_digest(before: str, message: Mapping[str, Any]) -> str:
    """`Node.digest` after messages with the digest `before`, of a message as an OpenAI dict with `reasoning`."""
    return blake2b(before.encode() + _digest_of_plain(message), digest_size=16).hexdigest()


def _digest_of(message: Message) -> bytes:
    return _digest_of_plain(message.to_openai(reasoning_field="reasoning"))


def _digest_of_plain(plain: Mapping[str, Any]) -> bytes:
    # A model can write half of a surrogate pair.
    return blake2b(_canonical(plain).encode("utf-8", "surrogatepass"), digest_size=16).digest()
