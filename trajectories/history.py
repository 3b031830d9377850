"""What a model was shown and what it said, as a list that only grows.

Outside it is a list of plain OpenAI dicts. Inside it is a tree of immutable nodes: every node knows its parent, and the
head is one leaf. Nothing that was appended is ever changed or lost: `rewind` only moves the head, so every response
stays reachable together with the exact context in which it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NoReturn, SupportsIndex, TypeAlias, overload

from trajectories.frozen import FrozenDict, freeze_dict
from trajectories.messages import ChatResponse, Message, MessageLike, OpenAIMessage, ToolResponse, as_message

Origin: TypeAlias = ChatResponse | ToolResponse | None


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One message in its context. Nodes are compared by identity: two samples may say the same and still be two."""

    parent: Node | None = field(repr=False)
    message: Message
    origin: Origin
    """The completion or tool result that the message came with; None for what was written into the conversation."""
    digest: str
    """Address of the content: a hash over the parent's digest and the message. Equal digests, equal conversations."""
    item: FrozenDict = field(repr=False)
    """The message as a read-only OpenAI dict, reasoning (if any) under `reasoning`."""

    @classmethod
    def after(cls, parent: Node | None, message: Message, origin: Origin = None) -> Node:
        """The node that says `message` after `parent`."""
        plain = message.to_openai(reasoning_field="reasoning")
        # Keys sorted, no spaces: the same bytes on every machine. A model can write half a surrogate pair: let it pass.
        text = json.dumps(plain, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        canonical = text.encode("utf-8", "surrogatepass")
        before = parent.digest.encode() if parent is not None else b""
        digest = blake2b(before + canonical, digest_size=16).hexdigest()
        return cls(parent, message, origin, digest, freeze_dict(plain))


@dataclass(frozen=True, slots=True)
class Discarded:
    """A branch that `rewind` left behind: the nodes from position `at` on, first to last."""

    reason: str
    at: int
    nodes: tuple[Node, ...]


class MessageHistory(Sequence[OpenAIMessage]):
    """A conversation with the face of a list of OpenAI dicts.

    `len`, indices, slices, iteration, `in`, `+`, `==` (with any list of messages), `append` and `extend` work as on a
    list. Items are read-only: an edit raises TypeError. Messages are kept in one canonical form, in which `content` is
    always present, nulls are left out and reasoning stands under `reasoning`; `==` compares in that form.

    Ephemeral messages (system prompts, prefill) do not belong here; whoever sends the request adds them there.
    Not thread-safe: one rollout, one history.
    """

    __slots__ = ("_discarded", "_path")

    def __init__(self, messages: Iterable[MessageLike] = ()) -> None:
        self._path: list[Node] = []  # root to head; the tree itself lives in the nodes' parent pointers
        self._discarded: list[Discarded] = []
        self.extend(messages)

    # The list

    def __len__(self) -> int:
        return len(self._path)

    @overload
    def __getitem__(self, index: SupportsIndex) -> OpenAIMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[OpenAIMessage]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> OpenAIMessage | list[OpenAIMessage]:
        if isinstance(index, slice):
            return [node.item for node in self._path[index]]
        return self._path[index].item

    def __iter__(self) -> Iterator[OpenAIMessage]:
        for node in self._path:
            yield node.item

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MessageHistory):
            return len(self) == len(other) and (not self._path or self._path[-1].digest == other._path[-1].digest)
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(_same(node, item) for node, item in zip(self._path, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """A plain list for one request; the history stays as it is."""
        return [*self, *other]

    def __radd__(self, other: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [*other, *self]

    def __iadd__(self, other: Iterable[MessageLike]) -> MessageHistory:
        self.extend(other)
        return self

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise TypeError("a history cannot be edited; append() adds a message, rewind() takes the last ones back")

    def __delitem__(self, index: object) -> NoReturn:
        raise TypeError("a history cannot be edited; rewind() takes the last messages back")

    def __repr__(self) -> str:
        dropped = f", {len(self._discarded)} discarded branches" if self._discarded else ""
        return f"<MessageHistory of {len(self)} messages{dropped}>"

    def append(self, message: MessageLike) -> None:
        """Adds one message at the head. Raises MessageError, naming the index, where it is malformed."""
        self._append(as_message(message, len(self._path)), message)

    def extend(self, messages: Iterable[MessageLike]) -> None:
        """Adds all of the messages, or none where one of them is malformed."""
        start = len(self._path)
        read = [(as_message(message, start + offset), message) for offset, message in enumerate(messages)]
        for message, source in read:
            self._append(message, source)

    def _append(self, message: Message, source: MessageLike) -> None:
        origin = source if isinstance(source, (ChatResponse, ToolResponse)) else None
        self._path.append(Node.after(self.head, message, origin))

    # The tree

    @property
    def head(self) -> Node | None:
        """The leaf at which the conversation stands; None while it is empty."""
        return self._path[-1] if self._path else None

    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the current path, first to last."""
        return tuple(self._path)

    def responses(self) -> Iterator[ChatResponse]:
        """The completions on the current path, first to last."""
        return (node.origin for node in tuple(self._path) if isinstance(node.origin, ChatResponse))

    @property
    def discarded(self) -> tuple[Discarded, ...]:
        """The branches that were left, in the order in which they were left."""
        return tuple(self._discarded)

    def rewind(self, length: int, reason: str) -> None:
        """Takes the conversation back to its first `length` messages. What is dropped goes to `discarded`."""
        if not 0 <= length <= len(self._path):
            raise ValueError(f"cannot rewind to {length} messages: the history has {len(self._path)}")
        if length == len(self._path):
            return
        self._discarded.append(Discarded(reason, length, tuple(self._path[length:])))
        del self._path[length:]

    # Copies

    def to_openai(self, reasoning_field: str | None = None) -> list[OpenAIMessage]:
        """New plain dicts for a request; see `Message.to_openai` for `reasoning_field`."""
        return [node.message.to_openai(reasoning_field) for node in self._path]

    def fork(self) -> MessageHistory:
        """A history that shares these nodes and grows on its own."""
        other = MessageHistory()
        other._path = list(self._path)
        other._discarded = list(self._discarded)
        return other

    def __copy__(self) -> MessageHistory:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> MessageHistory:
        return self.fork()  # the nodes are immutable

    def __reduce__(self) -> tuple[object, ...]:
        # Flat: pickling parent pointers would recurse once per message.
        numbers: dict[int, int] = {}
        flat: list[tuple[int | None, Message, Origin]] = []
        for branch in [*(discarded.nodes for discarded in self._discarded), self._path]:
            for node in branch:
                _flatten(node, numbers, flat)
        path = [numbers[id(node)] for node in self._path]
        dropped = [(item.reason, item.at, [numbers[id(node)] for node in item.nodes]) for item in self._discarded]
        return (_unflatten, (flat, path, dropped))


def _same(node: Node, item: Any) -> bool:
    if node.item == item:
        return True
    try:
        return as_message(item).to_openai(reasoning_field="reasoning") == node.item
    except ValueError:
        return False


def _flatten(node: Node, numbers: dict[int, int], flat: list[tuple[int | None, Message, Origin]]) -> None:
    """Numbers `node` and its ancestors, parents first."""
    line: list[Node] = []
    step: Node | None = node
    while step is not None and id(step) not in numbers:
        line.append(step)
        step = step.parent
    for step in reversed(line):
        numbers[id(step)] = len(flat)
        flat.append((numbers[id(step.parent)] if step.parent else None, step.message, step.origin))


def _unflatten(
    flat: list[tuple[int | None, Message, Origin]], path: list[int], dropped: list[tuple[str, int, list[int]]]
) -> MessageHistory:
    nodes: list[Node] = []
    for parent, message, origin in flat:
        nodes.append(Node.after(nodes[parent] if parent is not None else None, message, origin))
    history = MessageHistory()
    history._path = [nodes[number] for number in path]
    history._discarded = [Discarded(reason, at, tuple(nodes[n] for n in branch)) for reason, at, branch in dropped]
    return history
