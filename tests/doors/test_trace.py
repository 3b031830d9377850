"""Rollouts as traces of verifiers: each path of nodes has the ids that the model was given and sampled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lachesis_doors.serving.trace import nodes_of
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, Node
from tests.support.token_trees import UNTIMED, Tree, trees


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

    nodes, calls = nodes_of(history)
    placed = [number for number, node in enumerate(nodes) if node.get("sampled")]
    assert [call["node"] for call in calls] == placed
    for number, node in zip(placed, sampled, strict=True):
        assert isinstance(node.origin, ChatResponse) and node.origin.tokens is not None
        ids: list[int] = []
        texts = 0
        at: int | None = number
        while at is not None:
            ids = [*nodes[at].get("token_ids", []), *ids]
            texts, at = texts + 1, nodes[at]["parent"]
        assert ids == node.origin.tokens.after.ids
        assert nodes[number]["mask"].count(True) == len(nodes[number]["logprobs"]) == len(node.origin.tokens)
        above, length = node.parent, 1
        while above is not None:
            above, length = above.parent, length + 1
        assert texts == length
