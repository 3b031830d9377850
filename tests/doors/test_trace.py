"""Rollouts as traces of verifiers: each path of nodes has the ids that the model was given and sampled."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lachesis_doors.serving.trace import nodes_of
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, Node
from tests.support.token_trees import UNTIMED, Tree, trees


def path_to(nodes: list[dict[str, Any]], at: int | None) -> list[int]:
    found: list[int] = []
    while at is not None:
        found.insert(0, at)
        at = nodes[at]["parent"]
    return found


@UNTIMED
@given(tree=trees(), data=st.data())
def test_every_completion_comes_once_after_exactly_its_prompt(tree: Tree, data: st.DataObject) -> None:
    """Also where a prompt was built anew: the messages before it are then those of an earlier path."""
    after: dict[object, Node] = {}
    sampled: list[Node] = []
    for said in dict.fromkeys(map(id, tree.recorded)):
        response = next(each for each in tree.recorded if id(each) == said)
        assert response.tokens is not None
        above = next((after[piece] for piece in response.tokens.prompt.lineage() if piece in after), None)
        if above is None and sampled:
            above = data.draw(st.sampled_from([None, *sampled]))
        asked = Node.after(above, Message("user", "go on"))
        node = after[response.tokens.after] = Node.after(asked, response.message, response)
        sampled.append(node)
    history = MessageHistory.of_nodes(sampled, data.draw(st.sampled_from(sampled)))

    nodes, calls, _ = nodes_of(history)
    placed = [number for number, node in enumerate(nodes) if node.get("sampled")]
    assert [call["node"] for call in calls] == placed
    for number, node in zip(placed, sampled, strict=True):
        assert isinstance(node.origin, ChatResponse) and node.origin.tokens is not None
        line = path_to(nodes, number)
        ids = [token for at in line for token in nodes[at].get("token_ids", [])]
        assert ids == node.origin.tokens.after.ids
        assert nodes[number]["mask"].count(True) == len(nodes[number]["logprobs"]) == len(node.origin.tokens)
        leaves = set(range(len(nodes))) - {node["parent"] for node in nodes}
        trains = sum(number in path_to(nodes, leaf) for leaf in leaves)  # a trainer makes a sample of each
        assert trains == 1 or not len(node.origin.tokens)
        above, length = node.parent, 1
        while above is not None:
            above, length = above.parent, length + 1
        assert len(line) == length
