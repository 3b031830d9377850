"""What follows from the graph of a conversation: its completions, where it ended, which attempts were discarded."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis_messages.responses import ChatResponse, Discarded, MessageGraph, Node, ToolResponse


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


def replaced_attempts(graph: MessageGraph) -> list[ChatResponse]:
    """The completions of attempts from whose beginning the conversation went on, or was sampled, once more; those of
    sub-agents too."""
    found: dict[int, ChatResponse] = {}
    for each in _with_subagents(graph):
        attempts = [branch for branch in each.discarded if branch.attempt]
        last = {node.parent: node for node in each.all_nodes()} if attempts else {}
        for branch in attempts:
            if last[branch.nodes[0].parent] is not branch.nodes[0]:
                found |= {
                    id(node.origin): node.origin for node in branch.nodes if isinstance(node.origin, ChatResponse)
                }
    return [*found.values()]


def identity(response: ChatResponse) -> int:
    """What tells completions apart: dataclasses.replace may change the message of one, and its tokens stay the same
    object."""
    return id(response if response.tokens is None else response.tokens.after)


def completions(graph: MessageGraph) -> list[ChatResponse]:
    """Every completion, in order and each once; those of sub-agents come at the position of their result."""
    found: dict[int, ChatResponse] = {}
    seen = {id(graph)}
    below = [iter(graph.all_nodes())]
    while below:
        for node in below[-1]:
            origin = node.origin
            if isinstance(origin, ChatResponse):
                found.setdefault(identity(origin), origin)
            elif isinstance(origin, ToolResponse) and origin.chat is not None and id(origin.chat) not in seen:
                seen.add(id(origin.chat))
                below.append(iter(origin.chat.all_nodes()))
                break
        else:
            below.pop()
    return [*found.values()]


def message_digests(graph: MessageGraph) -> dict[int, str]:
    """By `id(tokens.after)` of each completion that was sampled where it is recorded, sub-agents' included: the digest
    of the conversation up to it (`Node.digest`)."""
    found: dict[int, str] = {}
    for each in _with_subagents(graph):
        for node in each.all_nodes():
            if node.sampled and isinstance(node.origin, ChatResponse) and node.origin.tokens is not None:
                found.setdefault(id(node.origin.tokens.after), node.digest)
    return found


def _with_subagents(graph: MessageGraph) -> list[MessageGraph]:
    graphs = [graph]
    seen = {id(graph)}
    for each in graphs:
        below = [node.origin.chat for node in each.all_nodes() if isinstance(node.origin, ToolResponse)]
        new = [chat for chat in below if chat is not None and id(chat) not in seen]
        seen.update(map(id, new))
        graphs += new
    return graphs


def branches(nodes: Sequence[Node], path: Sequence[Node]) -> list[Discarded]:
    """The branches off a path. Each node is in one of them."""
    places = {node: place for place, node in enumerate(path)}
    parents = {node.parent for node in nodes}
    found = []
    for leaf in nodes:
        if leaf in parents or leaf in places:
            continue
        line: list[Node] = []
        above: Node | None = leaf
        while above is not None and above not in places:
            line.append(above)
            places[above] = -1
            above = above.parent
        at = 0
        while above is not None:
            at, above = at + 1, above.parent
        found.append(Discarded("another conversation" if at == 0 else f"another turn {at}", at, tuple(line[::-1])))
    return found


def _completions_to(node: Node | None) -> list[ChatResponse]:
    found: list[ChatResponse] = []
    while node is not None:
        if isinstance(node.origin, ChatResponse):
            found.append(node.origin)
        node = node.parent
    return found[::-1]
