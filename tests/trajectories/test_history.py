from __future__ import annotations

import copy
import json
import pickle

import pytest
from conversation_strategies import conversations, hostile_text
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trajectories import (
    ChatResponse,
    FinishReason,
    MalformedMessage,
    Message,
    MessageHistory,
    ToolResponse,
    UnknownRole,
)

USER = {"role": "user", "content": "hello"}


def said(text: str) -> ChatResponse:
    return ChatResponse(Message("assistant", text), FinishReason.STOP)


class HistoryIsAListThatForgetsNothing(RuleBasedStateMachine):
    """The history beside a plain list, and beside all nodes that were ever appended."""

    def __init__(self) -> None:
        super().__init__()
        self.history = MessageHistory()
        self.model: list[dict] = []
        self.appended: list = []

    def _remember(self) -> None:
        known = {id(node) for node in self.appended}
        self.appended += [node for node in self.history.nodes() if id(node) not in known]

    @rule(text=hostile_text, form=st.sampled_from(["dict", "message", "response", "tool"]))
    def append(self, text: str, form: str) -> None:
        if form == "dict":
            self.history.append({"role": "user", "content": text})
            self.model.append({"role": "user", "content": text})
        elif form == "message":
            self.history.append(Message("system", text))
            self.model.append({"role": "system", "content": text})
        elif form == "response":
            response = ChatResponse(Message("assistant", text, reasoning="hm"), FinishReason.LENGTH)
            self.history.append(response)
            assert self.history.head.origin is response
            self.model.append({"role": "assistant", "content": text, "reasoning": "hm"})
        else:
            self.history.append(ToolResponse(Message("tool", text, tool_call_id="c"), "terminal"))
            self.model.append({"role": "tool", "tool_call_id": "c", "content": text})
        self._remember()

    @rule(messages=conversations())
    def extend(self, messages: list[dict]) -> None:
        self.history.extend(messages)
        self.model.extend(messages)
        self._remember()

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.model)))
        self.history.rewind(length, "try again")
        del self.model[length:]

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        bounds = st.none() | st.integers(-12, 12)
        cut = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1, 2, -1, -3])))
        assert self.history[cut] == self.model[cut]
        index = data.draw(st.integers(-12, 12))
        try:
            expected = self.model[index]
        except IndexError:
            with pytest.raises(IndexError):
                self.history[index]
        else:
            assert self.history[index] == expected
            assert expected in self.history
            assert self.history.index(expected) == self.model.index(expected)

    @rule()
    def copies(self) -> None:
        for other in (copy.copy(self.history), copy.deepcopy(self.history), pickle.loads(pickle.dumps(self.history))):
            assert other == self.history
            assert [dropped.nodes[-1].digest for dropped in other.discarded] == [
                dropped.nodes[-1].digest for dropped in self.history.discarded
            ]
            other.append(USER)
        assert len(self.history) == len(self.model)

    @invariant()
    def reads_like_the_list(self) -> None:
        assert len(self.history) == len(self.model)
        assert self.history == self.model
        assert list(self.history) == self.model
        assert list(reversed(self.history)) == self.model[::-1]
        assert json.loads(json.dumps(list(self.history))) == self.model
        assert self.history.to_openai("reasoning") == self.model
        assert self.history != [*self.model, USER]

    @invariant()
    def every_node_stays_reachable_in_its_context(self) -> None:
        reachable = {id(node) for node in self.history.nodes()}
        reachable |= {id(node) for dropped in self.history.discarded for node in dropped.nodes}
        assert {id(node) for node in self.appended} == reachable
        for dropped in self.history.discarded:
            assert _depth(dropped.nodes[0]) == dropped.at + 1
        parent = None
        for node in self.history.nodes():
            assert node.parent is parent
            parent = node


def _depth(node) -> int:
    depth = 0
    while node is not None:
        node, depth = node.parent, depth + 1
    return depth


TestHistory = HistoryIsAListThatForgetsNothing.TestCase
TestHistory.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize(
    "edit",
    [
        lambda h: h[0].__setitem__("content", "mine"),
        lambda h: h[0].update(content="mine"),
        lambda h: h[0].pop("content"),
        lambda h: h[0].setdefault("x", 1),
        lambda h: h[0].clear(),
        lambda h: h[0].popitem(),
        lambda h: h[0].__delitem__("content"),
        lambda h: h[0].__ior__({"content": "mine"}),
        lambda h: h[1]["tool_calls"].append({}),
        lambda h: h[1]["tool_calls"][0]["function"].__setitem__("name", "rm"),
        lambda h: h[1]["tool_calls"].sort(),
        lambda h: h[1]["tool_calls"].__iadd__([1]),
        lambda h: h.__setitem__(0, USER),
        lambda h: h.__setitem__(slice(0, 1), [USER]),
        lambda h: h.__delitem__(-1),
    ],
)
def test_an_edit_is_refused_and_never_silently_lost(edit):
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history = MessageHistory(messages)
    with pytest.raises(TypeError, match="cannot be edited"):
        edit(history)
    assert history == messages


def test_an_item_can_be_copied_to_a_dict_that_can_be_edited():
    history = MessageHistory([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    item = copy.deepcopy(history[0])
    item["content"][0]["text"] = "mine"
    assert type(item) is dict
    assert history[0]["content"][0]["text"] == "x"
    assert pickle.loads(pickle.dumps(history[0])) == history[0]
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(history[0]))["content"].append(1)


def test_what_the_caller_does_to_its_dict_later_does_not_reach_the_history():
    message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    history = MessageHistory([message])
    message["content"][0]["text"] = "changed"
    assert history[0]["content"][0]["text"] == "x"


def test_equality_compares_what_messages_say_not_how_they_spell_it():
    history = MessageHistory([{"role": "assistant", "content": "x", "reasoning": "r"}])
    assert history == [{"role": "assistant", "content": "x", "reasoning_content": "r", "refusal": None}]
    assert history != [{"role": "assistant", "content": "x"}]
    assert history != [{"role": "nobody"}]
    assert history != "x"


def test_extend_adds_all_or_nothing_and_names_the_index():
    history = MessageHistory([USER])
    with pytest.raises(UnknownRole) as caught:
        history.extend([USER, {"role": "robot", "content": ""}])
    assert caught.value.index == 2
    assert history == [USER]
    with pytest.raises(MalformedMessage) as malformed:
        history.append({"role": "tool", "content": ""})
    assert malformed.value.index == 1
    history.extend(history)
    assert history == [USER, USER]


def test_ephemeral_messages_are_added_to_a_request_and_not_to_the_history():
    history = MessageHistory([USER])
    system = {"role": "system", "content": "guide"}
    assert [system] + history + [USER] == [system, USER, USER]  # noqa: RUF005
    assert len(history) == 1
    history += [USER]
    assert isinstance(history, MessageHistory)
    assert len(history) == 2


def test_responses_are_those_of_the_current_path_and_the_dropped_ones_stay():
    first, second, third = said("a"), said("b"), said("a")
    history = MessageHistory([USER, first, USER, second])
    history.rewind(1, "unknown tool")
    history.append(third)
    assert [response is third for response in history.responses()] == [True]
    (dropped,) = history.discarded
    assert (dropped.reason, dropped.at) == ("unknown tool", 1)
    assert [node.origin for node in dropped.nodes] == [first, None, second]
    assert dropped.nodes[0].digest == history.head.digest, "they say the same in the same context"
    assert dropped.nodes[0] is not history.head, "and are two samples all the same"


def test_rewinding_nowhere_records_nothing_and_too_far_is_an_error():
    history = MessageHistory([USER])
    history.rewind(1, "nothing")
    assert history.discarded == ()
    for length in (-1, 2):
        with pytest.raises(ValueError, match="cannot rewind"):
            history.rewind(length, "too far")


@given(conversations(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_digest_names_the_whole_conversation_up_to_its_node(messages, data):
    digests = [node.digest for node in MessageHistory(messages).nodes()]
    assert digests == [node.digest for node in MessageHistory(messages).nodes()]
    place = data.draw(st.integers(0, len(messages) - 1))
    changed = [dict(message) for message in messages]
    changed[place]["name"] = "somebody"
    other = [node.digest for node in MessageHistory(changed).nodes()]
    assert other[:place] == digests[:place]
    assert not set(other[place:]) & set(digests[place:])


def test_a_history_of_20000_messages_needs_no_recursion():
    history = MessageHistory(USER for _ in range(20_000))
    assert len(pickle.loads(pickle.dumps(history))) == 20_000
    assert "20000 messages" in repr(history)
    assert len(repr(history.head)) < 1000
    history.rewind(10, "too long")
    assert len(history.discarded[0].nodes) == 19_990
    del history


def test_text_that_utf8_cannot_hold_can_be_recorded():
    history = MessageHistory([{"role": "user", "content": "half \ud83d"}])
    assert history[0]["content"] == "half \ud83d"
    assert history.head.digest
