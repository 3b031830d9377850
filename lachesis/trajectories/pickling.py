"""A history with all that hangs below it as flat, numbered lists, for pickling.

Two things need it. Pickle follows references recursively, once per message and per piece of token ids. And pieces are
compared by identity: two completions that shared a prompt have to share it afterwards, across sub-agents too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from lachesis.trajectories.messages import ChatResponse, Message, ToolResponse
from lachesis.trajectories.nodes import Discarded, Node, Origin
from lachesis.trajectories.tokens import SampledTokens, TokenPrefix

if TYPE_CHECKING:
    from lachesis.trajectories.history import MessageHistory


@dataclass(slots=True)
class FlatHistories:
    """Everything by number; what refers to an earlier or later entry holds its number."""

    pieces: list[tuple[int | None, array[int]]] = field(default_factory=list)
    """Parent, own ids."""
    tokens: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Piece, the other fields."""
    origins: list[tuple[ChatResponse | ToolResponse, int | None]] = field(default_factory=list)
    """A response without its tokens and their number, or a tool response without its chat and that history's number."""
    nodes: list[tuple[int | None, Message, int | None, bool, int | None]] = field(default_factory=list)
    """Parent, message, origin, sampled, source."""
    histories: list[tuple[list[int], list[int], list[tuple[str, int, list[int]]]]] = field(default_factory=list)
    """All nodes, the path, the discarded branches."""


def flatten(history: MessageHistory) -> FlatHistories:
    """The parts of `history` and of its sub-agents' histories, each once."""
    return _Flattening().all_below(history)


def unflatten(flat: FlatHistories) -> list[MessageHistory]:
    """The histories again, the one that was flattened first."""
    from lachesis.trajectories.history import MessageHistory

    pieces: list[TokenPrefix] = []
    for piece_parent, ids in flat.pieces:
        pieces.append(TokenPrefix(ids, _at(pieces, piece_parent)))
    tokens = [SampledTokens(after=pieces[after], **others) for after, others in flat.tokens]
    histories = [MessageHistory() for _ in flat.histories]
    origins: list[ChatResponse | ToolResponse] = []
    for origin, number in flat.origins:
        if isinstance(origin, ChatResponse):
            origins.append(replace(origin, tokens=_at(tokens, number)) if number is not None else origin)
        else:
            origins.append(replace(origin, chat=_at(histories, number)) if number is not None else origin)
    nodes: list[Node] = []
    for parent, message, made_with, sampled, copied in flat.nodes:
        source, came_with, before = _at(nodes, copied), _at(origins, made_with), _at(nodes, parent)
        if source is not None and not sampled and source.message is message and source.origin is came_with:
            nodes.append(Node.copied(before, source))
        else:
            nodes.append(Node.after(before, message, came_with, sampled=sampled, source=source))
    for history, (recorded, path, dropped) in zip(histories, flat.histories, strict=True):
        left = [Discarded(reason, at, tuple(nodes[n] for n in branch)) for reason, at, branch in dropped]
        history._restore([nodes[n] for n in recorded], [nodes[n] for n in path], left)
    return histories


class _Flattening:
    """Numbers by identity. What is numbered is referred to by the history, so ids stay taken."""

    def __init__(self) -> None:
        self.flat = FlatHistories()
        self.pieces: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.origins: dict[int, int] = {}
        self.nodes: dict[int, int] = {}
        self.histories: dict[int, int] = {}
        self.waiting: list[MessageHistory] = []

    def all_below(self, history: MessageHistory) -> FlatHistories:
        self.history(history)
        for found in self.waiting:  # grows meanwhile
            for node in found.all_nodes():
                self.node(node)
            self.flat.histories.append(
                (
                    self.numbers(found.all_nodes()),
                    self.numbers(found.nodes()),
                    [(dropped.reason, dropped.at, self.numbers(dropped.nodes)) for dropped in found.discarded],
                )
            )
        return self.flat

    def numbers(self, nodes: Iterable[Node]) -> list[int]:
        return [self.nodes[id(node)] for node in nodes]

    def history(self, history: MessageHistory) -> int:
        if id(history) not in self.histories:
            self.histories[id(history)] = len(self.waiting)
            self.waiting.append(history)
        return self.histories[id(history)]

    def node(self, node: Node) -> None:
        if id(node) in self.nodes:
            return
        parent = self.nodes[id(node.parent)] if node.parent is not None else None
        source = self.nodes[id(node.source)] if node.source is not None else None
        self.nodes[id(node)] = len(self.flat.nodes)
        self.flat.nodes.append((parent, node.message, self.origin(node.origin), node.sampled, source))

    def origin(self, origin: Origin) -> int | None:
        if origin is None:
            return None
        if id(origin) not in self.origins:
            flat: tuple[ChatResponse | ToolResponse, int | None] = (origin, None)
            if isinstance(origin, ChatResponse) and origin.tokens is not None:
                flat = (replace(origin, tokens=None), self.sampled(origin.tokens))
            elif isinstance(origin, ToolResponse) and origin.chat is not None:
                flat = (replace(origin, chat=None), self.history(origin.chat))
            self.origins[id(origin)] = len(self.flat.origins)
            self.flat.origins.append(flat)
        return self.origins[id(origin)]

    def sampled(self, tokens: SampledTokens) -> int:
        if id(tokens) not in self.tokens:
            others = {part.name: getattr(tokens, part.name) for part in fields(tokens) if part.name != "after"}
            after = self.piece(tokens.after)
            self.tokens[id(tokens)] = len(self.flat.tokens)
            self.flat.tokens.append((after, others))
        return self.tokens[id(tokens)]

    def piece(self, piece: TokenPrefix) -> int:
        line: list[TokenPrefix] = []
        for step in piece.lineage():
            if id(step) in self.pieces:
                break
            line.append(step)
        for step in reversed(line):
            parent = self.pieces[id(step.parent)] if step.parent is not None else None
            self.pieces[id(step)] = len(self.flat.pieces)
            self.flat.pieces.append((parent, array("I", step.own_ids)))
        return self.pieces[id(piece)]


def _at(things: list[Any], number: int | None) -> Any:
    return things[number] if number is not None else None
