"""Rollouts as traces of verifiers: each path of nodes has the ids that the model was given and sampled. And as chains
of NeMo Gym, whose prompts begin with all tokens before them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lachesis_doors.serving.nemogym import verified
from lachesis_doors.serving.trace import nodes_of
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, Node
from lachesis_messages.tokens import TokenPrefix
from tests.support.token_trees import END, UNTIMED, Tree, completion, trees


def path_to(nodes: list[dict[str, Any]], at: int | None) -> list[int]:
    found: list[int] = []
    while at is not None:
        found.insert(0, at)
        at = nodes[at]["parent"]
    return found


def recorded(tree: Tree, data: st.DataObject) -> tuple[MessageHistory, list[Node]]:
    """The history of a tree of completions, and their nodes.

    Where a prompt was built anew, the messages before it are those of an earlier path.
    """
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
    return MessageHistory.of_nodes(sampled, data.draw(st.sampled_from(sampled))), sampled


@UNTIMED
@given(tree=trees(), data=st.data())
def test_every_completion_comes_once_after_exactly_its_prompt(tree: Tree, data: st.DataObject) -> None:
    history, sampled = recorded(tree, data)
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


def trained_by_nemo(history: MessageHistory, choice: Any) -> tuple[list[list[int]], bool]:
    """The completions with tokens that NeMo Gym gets, and whether they are the trained chain."""
    rollout: Any = SimpleNamespace(
        result=SimpleNamespace(history=history), reward=0.5, metrics={}, unscored_kind="", unscored_because=""
    )
    found = verified({}, SimpleNamespace(rollouts=[rollout], tools=[]), choice)  # type: ignore[arg-type]
    seen: list[int] = []
    given = []
    for item in found["response"]["output"]:
        if item.get("generation_token_ids"):
            assert item["prompt_token_ids"][: len(seen)] == seen, "NeMo RL stops the training"
            given.append(item["generation_token_ids"])
            seen = item["prompt_token_ids"] + given[-1]
    if not found["mask_sample"]:
        everything = sum(len(each.tokens) for each in history.completions() if each.tokens is not None)
        assert sum(map(len, given)) + found.get("tokens_left_out", 0) == everything
    return given, not found["mask_sample"]


@UNTIMED
@pytest.mark.parametrize("choice", ["error", "last", "longest"])
@given(tree=trees(), data=st.data())
def test_nemo_gym_gets_a_chain_of_one_conversation_in_its_order(choice: Any, tree: Tree, data: st.DataObject) -> None:
    assume(all(each.tokens is not None and each.tokens.prompt.ids for each in tree.recorded))
    trained_by_nemo(recorded(tree, data)[0], choice)


@pytest.mark.parametrize("choice", ["last", "longest"])
def test_of_completions_with_the_same_tokens_nemo_gym_gets_that_which_went_on(choice: Any) -> None:
    prompt = TokenPrefix([1, 2])
    first, twin = completion(prompt, [3, END]), completion(prompt, [3, END])
    assert first.tokens is not None
    last = completion(first.tokens.after.extend([4]), [5, 6, END])
    asked = Node.after(None, Message("user", "go"))
    went_on, other = Node.after(asked, first.message, first), Node.after(asked, twin.message, twin)
    end = Node.after(Node.after(went_on, Message("user", "go on")), last.message, last)
    history = MessageHistory.of_nodes([went_on, other, end], end)
    assert trained_by_nemo(history, choice) == ([[3, END], [5, 6, END]], True)


def test_versions_for_nemo_gym_stand_beside_their_completions() -> None:
    prompt = TokenPrefix([1, 2])
    first = completion(prompt, [3, END])
    assert first.tokens is not None
    last = completion(first.tokens.after.extend([4]), [5, END], versions=(("v2", 0, 2),))
    begun = Node.after(Node.after(None, Message("user", "go")), first.message, first)
    end = Node.after(Node.after(begun, Message("user", "go on")), last.message, last)
    rollout: Any = SimpleNamespace(
        result=SimpleNamespace(history=MessageHistory.of_nodes([begun, end], end)), reward=0.5, metrics={}
    )
    rollout.unscored_kind = rollout.unscored_because = ""
    found = verified({}, SimpleNamespace(rollouts=[rollout], tools=[]))  # type: ignore[arg-type]
    assert found["policy_versions"] == [(), (("v2", 0, 2),)]
