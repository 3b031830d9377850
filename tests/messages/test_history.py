from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lachesis_messages.errors import MalformedMessage, UnknownRole
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse, ToolResponse
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from tests.run import some
from tests.support.conversation_strategies import conversations, hostile_text

USER = {"role": "user", "content": "hello"}


def said(text: str) -> ChatResponse:
    return ChatResponse(Message("assistant", text), FinishReason.STOP)


CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}],
}
messages = st.sampled_from([USER, CALLING, {"role": "tool", "tool_call_id": "c", "content": "x"}]) | st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]), hostile_text
)
bounds = st.none() | st.integers(-12, 12)
steps = st.sampled_from([None, None, None, 1, 2, -1, -3])


class HistoryIsAListThatForgetsNothing(RuleBasedStateMachine):
    """The history beside a plain list, and beside all that was ever sampled, with the context of each completion."""

    def __init__(self) -> None:
        super().__init__()
        self.history = MessageHistory()
        self.model: list[dict] = []
        self.contexts: dict[int, list[dict]] = {}
        self.sampled: list[tuple[ChatResponse, list[int]]] = []
        self.pending: list[ChatResponse] = []

    def sample(self, text: str, *, announce: bool) -> ChatResponse:
        """Continue the last sampled completion as a server does, else start anew."""
        fresh = [7, len(self.sampled)]
        anchors = [node.origin.tokens.after for node in self.history.nodes() if node.sampled]
        prompt = anchors[-1].extend(fresh) if anchors else TokenPrefix(fresh)
        if announce:
            self.history.record_prompt(prompt)
        tokens = SampledTokens.sample(prompt, [1, 2, len(self.sampled)], [-0.5, -1.0, -2.0])
        response = ChatResponse(Message("assistant", text), FinishReason.STOP, tokens=tokens)
        self.contexts[id(response)] = copy.deepcopy(self.model)
        return response

    def record(self, response: ChatResponse) -> None:
        self.sampled.append((response, response.tokens.prompt.ids))

    @rule(message=messages, form=st.sampled_from(["dict", "message", "tool"]))
    def append(self, message: dict, form: str) -> None:
        if form == "dict":
            self.history.append(message)
            self.model.append(message)
        elif form == "message":
            self.history.append(Message("system", "guide"))
            self.model.append({"role": "system", "content": "guide"})
        else:
            self.history.append(ToolResponse(Message("tool", "out", tool_call_id="c"), "terminal"))
            self.model.append({"role": "tool", "tool_call_id": "c", "content": "out"})

    @rule(text=hostile_text, announce=st.booleans())
    def append_a_completion(self, text: str, announce: bool) -> None:
        response = self.sample(text, announce=announce)
        self.history.append(response)
        self.model.append({"role": "assistant", "content": text})
        self.record(response)
        assert self.history.head.origin is response
        assert self.history.head.sampled

    @rule(text=hostile_text)
    def sample_for_later(self, text: str) -> None:
        self.pending.append(self.sample(text, announce=True))

    @precondition(lambda self: self.pending)
    @rule()
    def append_an_earlier_completion(self) -> None:
        response = self.pending.pop()
        self.history.append(response)
        self.model.append({"role": "assistant", "content": response.message.text})
        self.record(response)

    @rule(text=hostile_text, announce=st.booleans())
    def branch(self, text: str, announce: bool) -> None:
        response = self.sample(text, announce=announce)
        node = self.history.branch(response, "one of two")
        assert node.sampled
        assert node.parent is self.history.head
        self.record(response)

    @precondition(lambda self: self.sampled)
    @rule(data=st.data())
    def append_a_completion_again(self, data: st.DataObject) -> None:
        response, _ = data.draw(st.sampled_from(self.sampled))
        self.history.append(response)
        self.model.append({"role": "assistant", "content": response.message.text})

    @rule(conversation=conversations())
    def extend(self, conversation: list[dict]) -> None:
        self.history.extend(conversation)
        self.model.extend(conversation)

    @rule(index=st.integers(-12, 12), text=hostile_text)
    def edit_content(self, index: int, text: str) -> None:
        if -len(self.model) <= index < len(self.model):
            self.history[index]["content"] = text
            self.model[index] = {**self.model[index], "content": text}

    @rule(index=st.integers(-12, 12), text=hostile_text)
    def edit_arguments(self, index: int, text: str) -> None:
        if -len(self.model) <= index < len(self.model) and "tool_calls" in self.model[index]:
            self.history[index]["tool_calls"][0]["function"]["arguments"] = text
            self.model[index] = copy.deepcopy(self.model[index])
            self.model[index]["tool_calls"][0]["function"]["arguments"] = text

    @rule(change=st.data(), message=messages)
    def change_one(self, change: st.DataObject, message: dict) -> None:
        index = change.draw(st.integers(-12, 12))
        name = change.draw(st.sampled_from(["set", "insert", "del", "pop", "remove"]))
        both = [_outcome(target, name, index, message) for target in (self.history, self.model)]
        assert both[0] == both[1]

    @rule(change=st.data(), given=st.lists(messages, max_size=4))
    def change_a_slice(self, change: st.DataObject, given: list[dict]) -> None:
        cut = slice(change.draw(bounds), change.draw(bounds), change.draw(steps))
        name = change.draw(st.sampled_from(["set", "del", "put back"]))
        if name == "put back":
            kept = change.draw(st.integers(0, len(self.model)))
            self.history[cut.start : cut.stop] = self.history[kept:]
            self.model[cut.start : cut.stop] = self.model[kept:]
            return
        both = [_outcome(target, name, cut, given) for target in (self.history, self.model)]
        assert both[0] == both[1]

    @rule(name=st.sampled_from(["clear", "reverse"]))
    def change_all(self, name: str) -> None:
        getattr(self.history, name)()
        getattr(self.model, name)()

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.model)))
        self.history.rewind(length, "try again")
        del self.model[length:]

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        cut = slice(data.draw(bounds), data.draw(bounds), data.draw(steps))
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
        for other in (copy.copy(self.history), copy.deepcopy(self.history)):
            assert other == self.history
            assert _shape(other) == _shape(self.history)
            other.append(USER)
            del other[: len(other) // 2]
        assert len(self.history) == len(self.model)

    @rule()
    def go_on_with_a_copy(self) -> None:
        if not self.pending:
            self.history = self.history.fork()

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
    def every_completion_keeps_its_prompt(self) -> None:
        completions = self.history.completions()
        assert [id(completion) for completion in completions] == [id(response) for response, _ in self.sampled]
        assert [completion.tokens.prompt.ids for completion in completions] == [ids for _, ids in self.sampled]

    @invariant()
    def sampled_nodes_are_in_their_own_context(self) -> None:
        for node in self.history.all_nodes():
            if node.sampled:
                assert [step.item for step in _ancestors(node)] == self.contexts[id(node.origin)]

    @invariant()
    def every_node_is_on_the_path_or_in_one_branch(self) -> None:
        placed = [node for dropped in self.history.discarded for node in dropped.nodes]
        placed += self.history.nodes()
        assert len({id(node) for node in placed}) == len(placed)
        assert {id(node) for node in placed} == {id(node) for node in self.history.all_nodes()}
        for dropped in self.history.discarded:
            assert len(_ancestors(dropped.nodes[0])) == dropped.at
            assert dropped.reason
        seen = set()
        for node in self.history.all_nodes():
            assert {id(before) for before in (node.parent, node.source) if before is not None} <= seen
            seen.add(id(node))
        parent = None
        for node in self.history.nodes():
            assert node.parent is parent
            parent = node


def _outcome(target, name, index, given):
    """What a list operation gives or raises."""
    try:
        if name == "set":
            target[index] = given
        elif name == "insert":
            target.insert(index, given)
        elif name == "del":
            del target[index]
        elif name == "pop":
            return target.pop(index)
        else:
            target.remove(given)
    except (IndexError, ValueError) as error:
        return type(error)
    return None


def _shape(history):
    """The graph by numbers and digests, with the very records of what was sampled."""
    number = {id(node): place for place, node in enumerate(history.all_nodes())}
    nodes = [
        (number.get(id(node.parent)), number.get(id(node.source)), node.sampled, node.digest, id(node.origin))
        for node in history.all_nodes()
    ]
    dropped = [(left.reason, left.at, [number[id(node)] for node in left.nodes]) for left in history.discarded]
    return nodes, [number[id(node)] for node in history.nodes()], dropped


def _ancestors(node):
    line = []
    while node.parent is not None:
        node = node.parent
        line.append(node)
    return line[::-1]


TestHistory = HistoryIsAListThatForgetsNothing.TestCase
TestHistory.settings = settings(max_examples=some(25), stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    "edit",
    [
        lambda items: items[0].__setitem__("content", "mine"),
        lambda items: items[0].update(content="mine"),
        lambda items: items[0].pop("content"),
        lambda items: items[0].setdefault("x", 1),
        lambda items: items[0].clear(),
        lambda items: items[0].popitem(),
        lambda items: items[0].__delitem__("content"),
        lambda items: items[0].__ior__({"content": "mine"}),
        lambda items: items[1]["tool_calls"].append({}),
        lambda items: items[1]["tool_calls"][0]["function"].__setitem__("name", "rm"),
        lambda items: items[1]["tool_calls"].sort(),
        lambda items: items[1]["tool_calls"].__iadd__([1]),
    ],
)
@pytest.mark.parametrize("read", [list, lambda history: history[:]])
def test_an_edit_of_an_iterated_message_is_rejected_and_never_silently_lost(read, edit):
    conversation = [USER, CALLING]
    history = MessageHistory(conversation)
    with pytest.raises(TypeError, match=r"history\[index\]"):
        edit(read(history))
    assert history == conversation


def test_an_item_can_be_copied_to_a_dict_that_can_be_edited():
    history = MessageHistory([{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    item = copy.deepcopy(history[0])
    item["content"][0]["text"] = "mine"
    assert type(item) is dict
    assert history[0]["content"][0]["text"] == "x"
    assert pickle.loads(pickle.dumps(history[0])) == history[0]
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(history[:][0]))["content"].append(1)


def test_later_changes_of_the_callers_dict_do_not_reach_the_history():
    message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    history = MessageHistory([message])
    message["content"][0]["text"] = "changed"
    assert history[0]["content"][0]["text"] == "x"


def test_equality_compares_content_not_spelling():
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
@settings(max_examples=some(40), deadline=None)
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
    assert len(history.fork()) == 20_000
    assert "20000 messages" in repr(history)
    assert len(repr(history.head)) < 1000
    history.rewind(10, "too long")
    assert len(history.discarded[0].nodes) == 19_990
    del history


def test_text_that_utf8_cannot_hold_can_be_recorded():
    history = MessageHistory([{"role": "user", "content": "half \ud83d"}])
    assert history[0]["content"] == "half \ud83d"
    assert history.head.digest
