"""Drawings of a message history: a tree of boxes and a list of edges, written for Mermaid or Graphviz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from lachesis.trajectories.messages import ChatResponse, Message, ToolResponse
from lachesis.trajectories.nodes import Node

if TYPE_CHECKING:
    from lachesis.trajectories.history import MessageHistory


class Kind(Enum):
    """The kind of a box; the value is its Mermaid class."""

    MESSAGE = "messageNode"
    """A message that was written into the conversation."""
    RESPONSE = "responseNode"
    """A completion or a tool result, with inner boxes."""
    METADATA = "metadataNode"
    """A part of a completion or tool result."""
    BRANCH = "branchNode"
    """A discarded branch with its nodes."""


@dataclass(frozen=True, slots=True)
class Box:
    """One box: text, or a titled frame around other boxes."""

    id: str
    lines: tuple[str, ...]
    kind: Kind
    parts: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """A line between two boxes, by id."""

    tail: str
    head: str
    label: str = ""
    dashed: bool = False


def to_mermaid(history: MessageHistory, *, width: int = 60) -> str:
    """A Mermaid flowchart; see `MessageHistory.to_mermaid`."""
    boxes, edges = _picture(history, width)
    lines = ["graph TD"]
    for depth, box, closes in _walk(boxes):
        margin = "    " * (depth + 1)
        if closes:
            lines.append(f"{margin}end")
        elif box.parts:
            lines.append(f'{margin}subgraph {box.id}["{_mermaid_text(box.lines)}"]')
        else:
            lines.append(f'{margin}{box.id}["{_mermaid_text(box.lines)}"]')
    for edge in edges:
        label = f'|"{_mermaid_text((edge.label,))}"|' if edge.label else ""
        lines.append(f"    {edge.tail} {'-.->' if edge.dashed else '-->'}{label} {edge.head}")
    for kind, style in _STYLES.items():
        ids = [box.id for _, box, closes in _walk(boxes) if box.kind is kind and not closes]
        if ids:
            lines += [f"    classDef {kind.value} {style}", f"    class {','.join(ids)} {kind.value}"]
    return "\n".join(lines) + "\n"


def to_dot(history: MessageHistory, *, width: int = 60) -> str:
    """A Graphviz digraph; see `MessageHistory.to_mermaid`."""
    boxes, edges = _picture(history, width)
    lines = ["digraph history {", "    compound=true;", '    node [shape=box, fontname="Helvetica"];']
    lines.append('    graph [fontname="Helvetica"];')
    frames: dict[str, Box] = {}
    for depth, box, closes in _walk(boxes):
        margin = "    " * (depth + 1)
        if closes:
            lines.append(f"{margin}}}")
        elif box.parts:
            frames[box.id] = box
            style = " style=dashed;" if box.kind is Kind.BRANCH else ""
            lines.append(f'{margin}subgraph cluster_{box.id} {{ label="{_dot_text(box.lines)}";{style}')
        else:
            lines.append(f'{margin}{box.id} [label="{_dot_text(box.lines)}"];')
    for edge in edges:
        # Graphviz draws edges between boxes only; ltail and lhead cut them off at the frames.
        tail, head = _last(frames.get(edge.tail)), _first(frames.get(edge.head))
        marks = [f'label="{_dot_text((edge.label,))}"'] if edge.label else []
        marks += ["style=dashed", "constraint=false"] if edge.dashed else []
        marks += [f"ltail=cluster_{edge.tail}"] if tail else []
        marks += [f"lhead=cluster_{edge.head}"] if head else []
        attributes = f" [{', '.join(marks)}]" if marks else ""
        lines.append(f"    {tail or edge.tail} -> {head or edge.head}{attributes};")
    return "\n".join([*lines, "}"]) + "\n"


_STYLES = {
    Kind.MESSAGE: "fill:#eef3fb,stroke:#4a6fa5",
    Kind.RESPONSE: "fill:#eef7ee,stroke:#4c8c4a",
    Kind.METADATA: "fill:#fafafa,stroke:#999999",
    Kind.BRANCH: "fill:#fff8ec,stroke:#b8860b,stroke-dasharray:4 3",
}
_TITLES = {
    "system": "📋 System Message",
    "user": "👤 User Message",
    "assistant": "🤖 Assistant Message",
    "tool": "🔧 Tool Message",
}


def _picture(history: MessageHistory, width: int) -> tuple[list[Box], list[Edge]]:
    edges: list[Edge] = []
    return _boxes(history, "", width, edges, {id(history)}), edges


def _boxes(history: MessageHistory, prefix: str, width: int, edges: list[Edge], drawn: set[int]) -> list[Box]:
    """The boxes of one history. Sub-agents are drawn inside, so this recurses over sub-agents, not over turns."""
    ids = {id(node): f"{prefix}m{number}" for number, node in enumerate(history.all_nodes())}

    def box(node: Node) -> Box:
        return _node(node, ids[id(node)], width, edges, drawn)

    boxes = [box(node) for node in history.nodes()]
    for number, dropped in enumerate(history.discarded):
        title = f"Discarded: {_shortened(dropped.reason, width)}"
        boxes.append(Box(f"{prefix}d{number}", (title,), Kind.BRANCH, tuple(box(node) for node in dropped.nodes)))
    for node in history.all_nodes():
        if node.parent is not None:
            edges.append(Edge(ids[id(node.parent)], ids[id(node)]))
        if node.source is not None:
            edges.append(Edge(ids[id(node)], ids[id(node.source)], _relation(node, node.source), dashed=True))
    return boxes


def _relation(node: Node, source: Node) -> str:
    if node.message is source.message or (node.origin is not None and node.origin is source.origin):
        return "copies"
    return "edits" if node.message.role == source.message.role else "replaces"


def _node(node: Node, name: str, width: int, edges: list[Edge], drawn: set[int]) -> Box:
    if isinstance(node.origin, ChatResponse):
        title = "💬 Chat Response" if node.sampled else "💬 Chat Response (as context)"
        metadata = Box(f"{name}_meta", ("📊 Metadata", *_metadata(node.origin, width)), Kind.METADATA)
        text = Box(f"{name}_text", ("📝 Response", *_said(node.message, width)), Kind.METADATA)
        return Box(name, (title,), Kind.RESPONSE, (metadata, text))
    content = _said(node.message, width)
    if isinstance(node.origin, ToolResponse):
        result = node.origin
        facts = [f"Length: {result.length}", f"Duration: {result.duration:.3g} s"]
        if result.error is not None:
            facts.append(f"Error: {_shortened(result.error, width)}")
        metadata = Box(f"{name}_meta", ("📊 Tool Metadata", *facts), Kind.METADATA)
        if result.chat is not None and id(result.chat) not in drawn:
            drawn.add(id(result.chat))
            inner = _boxes(result.chat, f"{name}_", width, edges, drawn)
            if inner:
                chat = Box(f"{name}_chat", ("💭 Subagent Chat",), Kind.METADATA, tuple(inner))
                known = Box(f"{name}_facts", tuple(facts), Kind.METADATA)
                metadata = Box(f"{name}_meta", ("📊 Tool Metadata",), Kind.METADATA, (known, chat))
        text = Box(f"{name}_text", content, Kind.METADATA)
        return Box(name, (f"🔧 Tool Response: {_shortened(result.tool, width)}",), Kind.RESPONSE, (metadata, text))
    role = node.message.role
    return Box(name, (_TITLES[role], f"Role: {role.capitalize()}", *content), Kind.MESSAGE)


def _said(message: Message, width: int) -> tuple[str, ...]:
    lines = []
    if message.reasoning:
        lines.append(f"Reasoning: {_shortened(message.reasoning, width)}")
    if message.text or not message.tool_calls:
        lines.append(f"Content: {_shortened(message.text, width)}")
    lines += [f"Call: {_shortened(f'{call.name} {call.arguments}', width)}" for call in message.tool_calls]
    return tuple(lines)


def _metadata(response: ChatResponse, width: int) -> Iterator[str]:
    if response.model is not None:
        yield f"Model: {_shortened(response.model, width)}"
    if response.model_version is not None:
        yield f"Version: {_shortened(response.model_version, width)}"
    for name, value in sorted(response.sampling.items()):
        yield _shortened(f"{name}: {value}", width)
    yield f"Finish: {response.finish_reason.value}"
    if response.tokens is not None:
        yield f"Tokens: {len(response.tokens)} sampled after {len(response.tokens.prompt)}"
    elif response.usage.completion_tokens is not None:
        yield f"Tokens: {response.usage.completion_tokens}"
    yield f"Latency: {response.latency:.3g} s"


def _shortened(text: str, width: int) -> str:
    line = " ".join(text[: 4 * width].split())
    return line if len(line) <= width and len(text) <= 4 * width else line[: width - 1].rstrip() + "…"


def _walk(boxes: Iterable[Box]) -> Iterator[tuple[int, Box, bool]]:
    """(depth, box, whether its frame closes here) in the order of writing."""
    left = [(0, box, False) for box in reversed([*boxes])]
    while left:
        depth, box, closes = left.pop()
        yield depth, box, closes
        if box.parts and not closes:
            left.append((depth, box, True))
            left += [(depth + 1, part, False) for part in reversed(box.parts)]


def _first(box: Box | None) -> str | None:
    while box is not None and box.parts:
        box = box.parts[0]
    return box.id if box is not None else None


def _last(box: Box | None) -> str | None:
    while box is not None and box.parts:
        box = box.parts[-1]
    return box.id if box is not None else None


def _mermaid_text(lines: Iterable[str]) -> str:
    """Characters that Mermaid or HTML could interpret are written as character codes."""
    return "<br/>".join("".join(_mermaid_character(c) for c in line) for line in lines)


def _mermaid_character(character: str) -> str:
    if character.isalnum() or character in " .,:-/()_…" or ord(character) > 0x2000:
        return character if _can_be_drawn(character) else "�"
    return f"#{ord(character)};" if _can_be_drawn(character) else "�"


def _dot_text(lines: Iterable[str]) -> str:
    kept = ("".join(c if _can_be_drawn(c) else "�" for c in line) for line in lines)
    return "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in kept)


def _can_be_drawn(character: str) -> bool:
    return character == " " or (character.isprintable() and not "\ud800" <= character <= "\udfff")
