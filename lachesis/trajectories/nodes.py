"""The nodes that a message history is made of: immutable, content-addressed, each knowing its parent."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Final, TypeAlias

from lachesis.trajectories.frozen import FrozenDict, freeze, freeze_dict
from lachesis.trajectories.messages import ChatResponse, Message, ToolCall, ToolResponse
from lachesis.trajectories.tokens import TokenPrefix

Origin: TypeAlias = ChatResponse | ToolResponse | None

_canonical = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode
"""Keys sorted, no spaces: the same bytes on every machine."""


class Item(FrozenDict):
    """A node's message as a read-only OpenAI dict. It knows where the message came from, so that one that is put back
    into its history is known by identity, not by what it says."""

    __slots__ = ("origin",)
    origin: Origin


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One message in its context. Nodes are compared by identity: two samples may say the same and still be two.

    What follows from the message (`item`, `digest`, `address`) is made when it is first asked for, which for most nodes
    of most rollouts is late or never.
    """

    parent: Node | None = field(repr=False)
    message: Message
    """Nothing in it can change any more."""
    origin: Origin
    """The completion or tool result that the message came with; None for what was written into the conversation, edits
    included."""
    sampled: bool = False
    """The origin is a completion, and these very ancestors are the context that it was sampled in. False for a
    completion that became context: behind an edit, or appended somewhere else."""
    source: Node | None = field(default=None, repr=False)
    """The node that this one is a copy or an edit of, or that it took the place of."""
    _item: Item | None = field(default=None, repr=False)
    _digest: str | None = field(default=None, init=False, repr=False)
    _address: str | None = field(default=None, init=False, repr=False)

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
        """The node that says `message` after `parent`. `sampled` only counts where `origin` is a completion.

        TypeError for a message that holds what JSON cannot hold.
        """
        return cls(parent, _settled(message), origin, sampled and isinstance(origin, ChatResponse), source)

    @classmethod
    def copied(cls, parent: Node | None, source: Node) -> Node:
        """`source` once more, as context behind `parent`."""
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
        """Address of the content: a hash over the parent's digest and the message. Equal digests, equal conversations.

        Kept from the first time on: each node of a conversation is hashed once.
        """
        line: list[Node] = []
        node: Node | None = self
        while node is not None and node._digest is None:
            line.append(node)
            node = node.parent
        before = node._digest if node is not None else None
        for node in reversed(line):
            known = (before or "").encode() + _digest_of(node.message)
            before = blake2b(known, digest_size=16).hexdigest()
            object.__setattr__(node, "_digest", before)
        assert before is not None
        return before

    @property
    def address(self) -> str:
        """Address of the node with all that is known of it: a hash over the parent's address, the message, the
        origin's metadata, token ids and logprobs. A sub-agent's chat, which can still grow, is left out."""
        line: list[Node] = []
        node: Node | None = self
        while node is not None and node._address is None:
            line.append(node)
            node = node.parent
        before = node._address if node is not None else None
        for node in reversed(line):
            known = f"{before or ''}|{node.digest}|{int(node.sampled)}|{_described(node.origin)}"
            before = blake2b(known.encode(), digest_size=16).hexdigest()
            object.__setattr__(node, "_address", before)
        assert before is not None
        return before

    def says(self, message: Message) -> bool:
        """Whether the message is `message`, to the letter."""
        # == alone takes 1, 1.0 and True for the same.
        return message == self.message and _digest_of(message) == _digest_of(self.message)


@dataclass(frozen=True, slots=True)
class Discarded:
    """A branch that the conversation left, or never followed: the nodes from position `at` on, first to last."""

    reason: str
    at: int
    nodes: tuple[Node, ...]


def nearest_sampled(node: Node | None, context: str | None = None) -> tuple[TokenPrefix | None, int]:
    """The ids up to and with the nearest completion that stands where it was sampled, from `node` upwards; and how
    many messages stand behind it. With `context`, only completions of that `SampledTokens.context` count."""
    behind = 0
    while node is not None:
        tokens = node.origin.tokens if node.sampled and isinstance(node.origin, ChatResponse) else None
        if tokens is not None and context in (None, tokens.context):
            return tokens.after, behind
        node, behind = node.parent, behind + 1
    return None, behind


def _settled(message: Message) -> Message:
    """The message with nothing in it that can change: itself, unless its maker left a dict or a list in it."""
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
            ToolCall(freeze(call.id), freeze(call.name), freeze(call.arguments), freeze_dict(call.extra))
            for call in message.tool_calls
        ),
        freeze(message.tool_call_id),
        freeze(message.name),
        freeze(message.reasoning),
        freeze_dict(message.extra),
    )


_TEXT_OR_NONE: Final = frozenset({str, type(None)})
_FROZEN: Final = frozenset({FrozenDict})


def _digest_of(message: Message) -> bytes:
    plain = message.to_openai(reasoning_field="reasoning")
    # A model can write half a surrogate pair: let it pass.
    return blake2b(_canonical(plain).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _described(origin: Origin) -> str:
    if origin is None:
        return ""
    if isinstance(origin, ToolResponse):
        return json.dumps([origin.tool, origin.duration, origin.error])
    tokens = origin.tokens
    sampled = None
    if tokens is not None:
        logprobs = blake2b(struct.pack(f"<{len(tokens)}d", *tokens.logprobs), digest_size=16).hexdigest()
        sampled = [tokens.prompt.digest, tokens.after.digest, logprobs, tokens.end_of_turn, tokens.context]
    known = {
        "model": origin.model,
        "model_version": origin.model_version,
        "sampling": dict(origin.sampling),
        "finish_reason": [origin.finish_reason, origin.raw_finish_reason],
        "usage": asdict(origin.usage),
        "latency": origin.latency,
        "attempts": origin.attempts,
        "server": origin.server,
        "malformed_calls": origin.malformed_calls,
        "tokens": sampled,
    }
    return json.dumps(known, sort_keys=True, default=str)
