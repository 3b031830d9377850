"""Drawings of a message history: a tree of boxes and a list of edges, written for Mermaid or Graphviz."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lachesis_messages.messages import Message
from lachesis_messages.nodes import Node
from lachesis_messages.responses import ChatResponse, ToolResponse

if TYPE_CHECKING:
    from lachesis_messages.history import MessageHistory


_STYLES = {
    "messageNode": "fill:#eef3fb,stroke:#4a6fa5",
    "responseNode": "fill:#eef7ee,stroke:#4c8c4a",
    "metadataNode": "fill:#fafafa,stroke:#999999",
    "branchNode": "fill:#fff8ec,stroke:#b8860b,stroke-dasharray:4 3",
}
"""By kind of box, which is its Mermaid class: a message that was written into the conversation; a completion or a tool
result, with inner boxes; a part of one of these; a discarded branch with its nodes."""
_TITLES = {
    "system": "📋 System Message",
    "user": "👤 User Message",
    "assistant": "🤖 Assistant Message",
    "tool": "🔧 Tool Message",
}


@dataclass(frozen=True, slots=True)
class Box:
    """One box: text, or a titled frame around other boxes."""

    id: str
    lines: tuple[str, ...]
    kind: str
    parts: tuple[Box, ...] = ()

    def walk(self) -> Iterator[Box]:
        """This box and those inside it, in the order of writing."""
        yield self
        for part in self.parts:
            yield from part.walk()


class Edge(NamedTuple):
    """A line between two boxes, by id; dashed with a label."""

    tail: str
    head: str
    label: str = ""


def to_mermaid(history: MessageHistory, *, width: int = 60) -> str:
    """A Mermaid flowchart; see `MessageHistory.to_mermaid`."""
    boxes, edges = _picture(history, width)
    lines = ["graph TD", *(line for box in boxes for line in _mermaid_box(box, "    "))]
    for tail, head, label in edges:
        arrow = f'-.->|"{label}"|' if label else "-->"
        lines.append(f"    {tail} {arrow} {head}")
    for kind, style in _STYLES.items():
        ids = [box.id for outer in boxes for box in outer.walk() if box.kind == kind]
        if ids:
            lines += [f"    classDef {kind} {style}", f"    class {','.join(ids)} {kind}"]
    return "\n".join(lines) + "\n"


def _mermaid_box(box: Box, margin: str) -> Iterator[str]:
    frame = "subgraph " if box.parts else ""
    yield f'{margin}{frame}{box.id}["{_mermaid_text(box.lines)}"]'
    for part in box.parts:
        yield from _mermaid_box(part, margin + "    ")
    if box.parts:
        yield f"{margin}end"


def to_dot(history: MessageHistory, *, width: int = 60) -> str:
    """A Graphviz digraph; see `MessageHistory.to_mermaid`."""
    boxes, edges = _picture(history, width)
    lines = ["digraph history {", "    compound=true;", '    node [shape=box, fontname="Helvetica"];']
    lines.append('    graph [fontname="Helvetica"];')
    lines += (line for box in boxes for line in _dot_box(box, "    "))
    frames = {box.id: box for outer in boxes for box in outer.walk() if box.parts}
    for tail, head, label in edges:
        marks = [f'label="{label}"', "style=dashed", "constraint=false"] if label else []
        # Graphviz draws edges between boxes only; ltail and lhead cut them off at the frames.
        if tail in frames:
            marks.append(f"ltail=cluster_{tail}")
            tail = [box.id for box in frames[tail].walk() if not box.parts][-1]
        if head in frames:
            marks.append(f"lhead=cluster_{head}")
            head = next(box.id for box in frames[head].walk() if not box.parts)
        attributes = f" [{', '.join(marks)}]" if marks else ""
        lines.append(f"    {tail} -> {head}{attributes};")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_box(box: Box, margin: str) -> Iterator[str]:
    label = f'label="{_dot_text(box.lines)}"'
    if not box.parts:
        yield f"{margin}{box.id} [{label}];"
        return
    style = " style=dashed;" if box.kind == "branchNode" else ""
    yield f"{margin}subgraph cluster_{box.id} {{ {label};{style}"
    for part in box.parts:
        yield from _dot_box(part, margin + "    ")
    yield f"{margin}}}"


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
        boxes.append(Box(f"{prefix}d{number}", (title,), "branchNode", tuple(box(node) for node in dropped.nodes)))
    for node in history.all_nodes():
        if node.parent is not None:
            edges.append(Edge(ids[id(node.parent)], ids[id(node)]))
        if node.source is not None:
            edges.append(Edge(ids[id(node)], ids[id(node.source)], _relation(node, node.source)))
    return boxes


def _relation(node: Node, source: Node) -> str:
    if node.message is source.message or (node.origin is not None and node.origin is source.origin):
        return "copies"
    return "edits" if node.message.role == source.message.role else "replaces"


def _node(node: Node, name: str, width: int, edges: list[Edge], drawn: set[int]) -> Box:
    if isinstance(node.origin, ChatResponse):
        title = "💬 Chat Response" if node.sampled else "💬 Chat Response (as context)"
        metadata = Box(f"{name}_meta", ("📊 Metadata", *_metadata(node.origin, width)), "metadataNode")
        text = Box(f"{name}_text", ("📝 Response", *_said(node.message, width)), "metadataNode")
        return Box(name, (title,), "responseNode", (metadata, text))
    content = _said(node.message, width)
    if isinstance(node.origin, ToolResponse):
        result = node.origin
        length = [f"Length: {result.length}"]
        if result.chat is not None:  # in messages, as its chat is beside it
            length = [f"Length: {len(result.chat)}", f"Characters: {result.length}"]
        facts = [*length, f"Duration: {result.duration:.3g} s"]
        if result.error is not None:
            facts.append(f"Error: {_shortened(result.error, width)}")
        metadata = Box(f"{name}_meta", ("📊 Tool Metadata", *facts), "metadataNode")
        if result.chat is not None and id(result.chat) not in drawn:
            drawn.add(id(result.chat))
            inner = _boxes(result.chat, f"{name}_", width, edges, drawn)
            if inner:
                chat = Box(f"{name}_chat", ("💭 Subagent Chat",), "metadataNode", tuple(inner))
                known = Box(f"{name}_facts", tuple(facts), "metadataNode")
                metadata = Box(f"{name}_meta", ("📊 Tool Metadata",), "metadataNode", (known, chat))
        text = Box(f"{name}_text", content, "metadataNode")
        return Box(name, (f"🔧 Tool Response: {_shortened(result.tool, width)}",), "responseNode", (metadata, text))
    role = node.message.role
    return Box(name, (_TITLES[role], f"Role: {role.capitalize()}", *content), "messageNode")


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


def _mermaid_text(lines: Iterable[str]) -> str:
    """Characters that Mermaid or HTML could interpret are written as character codes."""
    return "<br/>".join(_MARKUP.sub(lambda found: f"#{ord(found[0])};", _printable(line)) for line in lines)


_MARKUP = re.compile(r"[^\w .,:\-/()…\u2001-\U0010ffff]")


def _dot_text(lines: Iterable[str]) -> str:
    return "\\n".join(_printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)


def _printable(line: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
