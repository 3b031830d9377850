"""What a message history records: completions and results of tools with what is known of them, and the nodes of its
graph, which are immutable, content-addressed, and point to their parents.

They are one module because they contain each other: a node has the result of a tool as its origin, and the result of a
sub-agent has the graph of its conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from lachesis_messages.frozen import FrozenDict, freeze, freeze_dict
from lachesis_messages.markup import split_scratchpad
from lachesis_messages.messages import FinishReason, Message, OpenAIMessage, Purpose, joined_reasoning

if TYPE_CHECKING:
    from lachesis_messages.tokens import SampledTokens, TokenPrefix


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the server; None where it sent none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server had in its prefix cache."""
    sampled: bool = True
    """False of a policy that samples nothing, so that there is nothing to count."""


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """One completion by the model, with its metadata."""

    message: Message
    finish_reason: FinishReason
    raw_finish_reason: str | None = None
    model: str | None = None
    """The model's name in the server's answer."""
    usage: Usage = Usage()
    latency: float = 0.0
    """Seconds from the request to the complete answer, without failed attempts before it."""
    attempts: int = 1
    """Number of requests, failed ones included."""
    server: str = ""
    """Base URL of the server that answered."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters of the request."""
    malformed_calls: tuple[str, ...] = ()
    """The raw text of tool calls that cannot be parsed."""
    refusal: bool = False
    """The server marks the text as the model's refusal."""
    tokens: SampledTokens | None = field(default=None, repr=False)
    """The sampled tokens; None where the server does not report them (Phase 1)."""
    model_version: str | None = None
    """The server's name for the weights; None where it gives none."""
    purpose: Purpose = "turn"

    def with_scratchpad_read(self) -> ChatResponse:
        """The response with the reasoning that a model without a format for it wrote as its prompt told it to."""
        said = self.message
        if not isinstance(said.content, str):
            return self
        thought, content = split_scratchpad(said.content)
        if content == said.content:
            return self
        reasoning = joined_reasoning(said.reasoning, thought)
        return replace(self, message=replace(said, content=content, reasoning=reasoning))

    def with_new_call_ids(self, taken: set[str]) -> ChatResponse:
        """The response with call ids that are not `taken`, to which they are added: some servers count from zero every
        turn. New ids keep the length, which some chat templates check."""
        calls = []
        own = {call.id for call in self.message.tool_calls}
        for call in self.message.tool_calls:
            new, number = call.id, 0
            while new in taken or (number and new in own):
                number += 1
                new = call.id[: -len(str(number))] + str(number)
            taken.add(new)
            calls.append(call if new == call.id else replace(call, id=new))
        if calls == list(self.message.tool_calls):
            return self
        return replace(self, message=replace(self.message, tool_calls=tuple(calls)))


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """The result of one tool call, as the model sees it."""

    message: Message
    tool: str
    duration: float = 0.0
    """Seconds."""
    error: str | None = None
    """Why the call failed; None where it did not."""
    chat: MessageGraph | None = field(default=None, repr=False, compare=False)
    """The conversation of the sub-agent, if the tool was one, frozen: later changes to the original are not part of it.
    Its samples belong to the same rollout."""

    def __post_init__(self) -> None:
        if self.chat is not None:
            object.__setattr__(self, "chat", self.chat.frozen())

    @property
    def length(self) -> int:
        """Characters of the result."""
        return len(self.message.text)


def as_message(item: MessageLike, index: int | None = None) -> Message:
    """The message of a Message, of a response, or of a plain OpenAI dict."""
    if isinstance(item, Message):
        return item
    if isinstance(item, (ChatResponse, ToolResponse)):
        return item.message
    return Message.from_openai(item, index)


MessageLike: TypeAlias = Message | ChatResponse | ToolResponse | Mapping[str, Any]

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


class MessageGraph(Protocol):
    """What can be read of a `MessageHistory`."""

    def __len__(self) -> int: ...

    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the current path, first to last."""

    def all_nodes(self) -> tuple[Node, ...]:
        """Every node of every branch in creation order: parents and sources come first."""

    @property
    def discarded(self) -> tuple[Discarded, ...]:
        """The branches that are not part of the conversation, in the order in which they came to be."""

    def to_openai(self, reasoning_field: str | None = None) -> list[OpenAIMessage]:
        """New plain dicts for a request; see `Message.to_openai` for `reasoning_field`."""

    def frozen(self) -> MessageGraph:
        """The graph as it is now: it does not change any more."""


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
