"""A conversation is found by what it says, whatever was found before: nothing that changed is missed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.responses import ChatResponse, Node
from lachesis_tokens.server.conversation_index import ConversationIndex, Found
from tests.support.token_trees import UNTIMED

TEXTS = st.sampled_from(["", "a", "b"])
IDS = st.sampled_from(["1", "2"])
NUMBERS = st.sampled_from([0, 1, True, False, 1.0, 0.0, -0.0])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["user", "sampled", "as text", "twice", "forgets", "result", "changes", "marks", "drops", "copies", "other"]
        ),
        st.integers(0, 5),
        TEXTS,
        IDS,
        NUMBERS,
    ),
    max_size=25,
)


def sampled(text: str, call_id: str, number: int) -> ChatResponse:
    calls = (ToolCall(call_id, "tool", '{"x": 1}'),) if number % 2 else ()
    reasoning = ["why", "so", None][number % 3]
    return ChatResponse(Message("assistant", text, calls, reasoning=reasoning), FinishReason.STOP)


class Both:
    """An index that keeps what it found last, and one that reads every conversation anew."""

    def __init__(self) -> None:
        self.kept, self.anew = ConversationIndex(), ConversationIndex()
        self.pairs: dict[Node, Node] = {}

    def find(self, messages: list[Any]) -> tuple[Found, Found]:
        self.anew._recent.clear()
        one, other = self.kept.find(messages), self.anew.find(messages)
        assert one.key == other.key
        assert len(one.nodes) == len(other.nodes) == len(messages)
        for node, same in zip(one.nodes, other.nodes, strict=True):
            assert self.pairs.setdefault(node, same) is same
            assert node.origin is same.origin and node.message == same.message
        assert len(set(self.pairs.values())) == len(self.pairs)
        return one, other

    def add(self, found: tuple[Found, Found], responses: list[ChatResponse]) -> None:
        nodes = (index.add(each, responses) for index, each in zip((self.kept, self.anew), found, strict=True))
        for node, same in zip(*nodes, strict=True):
            self.pairs[node] = same


@UNTIMED
@given(STEPS)
def test_what_was_found_before_changes_nothing(steps: list[tuple[str, int, str, str, Any]]) -> None:
    both = Both()
    conversations: list[list[Any]] = [[{"role": "system", "content": "s"}], [{"role": "user", "content": "a"}]]
    messages = conversations[0]
    for what, number, text, call_id, mark in steps:
        place = number % len(messages)
        if what == "user":
            messages.append({"role": "user", "content": text})
        elif what in ("sampled", "as text", "twice", "forgets"):
            responses = [sampled(text, call_id, number)]
            if what == "twice":
                responses.append(sampled(text, call_id, number + 3 * (mark == 1)))
            both.add(both.find(messages), responses)
            said = responses[-1].message
            if what == "as text":
                messages.append(said.to_openai("reasoning"))
            elif what != "forgets":
                messages.append(said.to_openai())
        elif what == "result":
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif what == "changes":
            messages[place]["content"] = text  # in place
        elif what == "marks":
            messages[place]["mark"] = mark
        elif what == "drops":
            del messages[max(1, place) :]
        elif what == "copies":
            messages = copy.deepcopy(messages)
            conversations.append(messages)
        else:
            messages = conversations[number % len(conversations)]
        both.find(messages)


ASK, RESULT = {"role": "user", "content": "?"}, {"role": "tool", "tool_call_id": "1", "content": "r"}
ONE, OTHER = sampled("a", "1", 3), sampled("a", "2", 1)
"""The same call, with other ids and other reasoning."""
LATER = sampled("later", "3", 2)
PLAIN = {**ONE.message.to_openai(), "tool_calls": [{**ONE.message.tool_calls[0].to_openai(), "id": "9"}]}
NAMED = {**PLAIN, "reasoning": OTHER.message.reasoning}


def test_a_message_that_is_sampled_later_is_the_sampled_one_then() -> None:
    both = Both()
    both.find([ASK, PLAIN])
    both.add(both.find([ASK]), [ONE])
    found, _ = both.find([ASK, PLAIN, RESULT])
    assert found.nodes[1].origin is ONE


def test_of_equal_completions_the_one_that_the_rest_follows_is_found() -> None:
    both = Both()
    both.add(both.find([ASK]), [ONE, OTHER])
    assert both.find([ASK, OTHER.message.to_openai()])[0].nodes[1].origin is OTHER  # by the id of its call
    assert both.find([ASK, PLAIN, RESULT])[0].nodes[1].origin is ONE
    both.add(both.find([ASK, NAMED, RESULT]), [LATER])
    found, _ = both.find([ASK, PLAIN, RESULT, LATER.message.to_openai()])
    assert [found.nodes[1].origin, found.nodes[3].origin] == [OTHER, LATER]
    assert both.find([ASK, PLAIN, RESULT])[0].nodes[1].origin is ONE


@pytest.mark.parametrize("one, other", [(1, True), (0, False), (1, 1.0), (0.0, -0.0), ([1], [True]), ("1", 1)])
def test_numbers_that_are_equal_and_other_json_are_told_apart(one: Any, other: Any) -> None:
    index = ConversationIndex()
    messages: list[Any] = [{"role": "user", "content": "?", "more": {"x": one}}]
    first = index.find(messages)
    messages[0]["more"]["x"] = other
    assert index.find(messages).key != first.key
    messages[0]["more"]["x"] = one
    assert index.find(messages).key == first.key


def test_a_message_of_another_class_that_changes_is_noticed() -> None:
    openai = pytest.importorskip("openai.types.chat")
    message = openai.ChatCompletionMessage(role="assistant", content="a")
    odd = SimpleNamespace(model_dump=lambda **_: {"role": "user", "content": "odd"})
    index = ConversationIndex()
    conversation: list[Any] = [{"role": "user", "content": "?"}, message, odd]
    first = index.find(conversation)
    assert index.find(conversation) == first
    message.content = "b"
    second = index.find(conversation)
    assert second.nodes[0] is first.nodes[0] and second.nodes[1].message.content == "b"


class Counted(dict[str, Any]):
    """A message that counts how often it is read."""

    reads = 0

    def get(self, *args: Any) -> Any:
        Counted.reads += 1
        return super().get(*args)


@pytest.mark.parametrize("change", ["nothing", "copies", "the first message", "the last message"])
def test_a_turn_reads_its_new_messages(change: str) -> None:
    index = ConversationIndex()
    messages: list[Any] = [Counted(role="user", content=f"question {turn}") for turn in range(200)]
    index.find(messages)
    Counted.reads = 0
    index.find([Counted(role="user", content="?")])
    of_one = Counted.reads
    if change == "copies":
        messages = [Counted(message) for message in messages]
    elif change != "nothing":
        messages[0 if change == "the first message" else -1]["content"] = "another"
    Counted.reads = 0
    index.find([*messages, Counted(role="user", content="?")])
    assert 0 < Counted.reads <= 2 * of_one
