"""Where a conversation ended, and which of its attempts were discarded on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lachesis_messages.nodes import Discarded, Node
from lachesis_messages.responses import ChatResponse


def ended_on(nodes: Sequence[Node], path: Sequence[Node]) -> list[ChatResponse]:
    """The completions up to the one with which the conversation ended, first to last.

    That is the last one of the path, or, if the path was shortened at the end (a turn that was never finished, faulty
    turns that were taken back), the last one that was sampled after its head. Without either, it is the last of all.

    Args:
        nodes: of all branches, parents first.
        path: the conversation as it is now.
    """
    below: set[Node | None] = {path[-1] if path else None}
    last = path[-1] if path else None
    for node in nodes:
        if node.parent in below:
            below.add(node)
            if node.sampled:
                last = node
    found = _completions_to(last)
    if not found:
        found = _completions_to(next((node for node in reversed(nodes) if node.sampled), None))
    return found


def replaced_attempts(nodes: Sequence[Node], branches: Sequence[Discarded]) -> Iterator[ChatResponse]:
    """The completions of attempts from whose beginning the conversation went on, or was sampled, once more."""
    attempts = [branch for branch in branches if branch.attempt]
    last = {node.parent: node for node in nodes} if attempts else {}
    for branch in attempts:
        if last[branch.nodes[0].parent] is not branch.nodes[0]:
            yield from (node.origin for node in branch.nodes if isinstance(node.origin, ChatResponse))


def _completions_to(node: Node | None) -> list[ChatResponse]:
    found: list[ChatResponse] = []
    while node is not None:
        if isinstance(node.origin, ChatResponse):
            found.append(node.origin)
        node = node.parent
    return found[::-1]
