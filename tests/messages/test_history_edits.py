"""Editing messages in place: `history[i]` is a dict that writes through."""

from __future__ import annotations

import copy
import json
import pickle

import jinja2
import orjson
import pytest

from lachesis_messages.editing import StaleMessage
from lachesis_messages.errors import MalformedMessage, UnknownRole
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse, ToolResponse

USER = {"role": "user", "content": "hello"}


def conversation() -> list[dict]:
    calls = [
        {"id": name, "type": "function", "function": {"name": "ls", "arguments": f'{{"path": "{name}"}}'}}
        for name in ("a", "b")
    ]
    return [
        {"role": "system", "content": "guide"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "done"},
    ]


EDITS = {
    "content": (lambda h: h[1].__setitem__("content", "mine"), 1),
    "a part": (lambda h: h[1]["content"][0].__setitem__("text", "mine"), 1),
    "parts appended": (lambda h: h[1]["content"].append({"type": "text", "text": "x"}), 1),
    "parts dropped": (lambda h: h[1]["content"].pop(0), 1),
    "parts swapped": (lambda h: h[1]["content"].reverse(), 1),
    "parts sorted": (lambda h: h[1]["content"].sort(key=lambda part: part["text"]), 1),
    "parts replaced": (lambda h: h[1]["content"].__setitem__(slice(0, 2), [{"type": "text", "text": "x"}]), 1),
    "arguments": (lambda h: h[2]["tool_calls"][0]["function"].__setitem__("arguments", '{"path": "c"}'), 2),
    "a call dropped": (lambda h: h[2]["tool_calls"].__delitem__(1), 2),
    "a call inserted": (lambda h: h[2]["tool_calls"].insert(0, {**h[2]["tool_calls"][0], "id": "z"}), 2),
    "calls extended": (lambda h: h[2]["tool_calls"].extend([{**h[2]["tool_calls"][0], "id": "z"}]), 2),
    "the calls": (lambda h: h[2].pop("tool_calls"), 2),
    "reasoning": (lambda h: h[2].__setitem__("reasoning", "other"), 2),
    "reasoning dropped": (lambda h: h[2].__delitem__("reasoning"), 2),
    "several fields": (lambda h: h[-1].update({"content": "x"}, name="me"), 5),
    "several at once": (lambda h: h[-1].__ior__({"content": "x", "name": "me"}), 5),
    "a default": (lambda h: h[-1].setdefault("name", "me"), 5),
}


@pytest.mark.parametrize(("edit", "place"), EDITS.values(), ids=EDITS)
def test_an_edit_has_the_effect_that_it_has_on_plain_dicts(edit, place):
    history, plain = MessageHistory(conversation()), conversation()
    before = history.nodes()
    assert edit(history) == edit(plain)
    assert history == plain
    assert history.nodes()[:place] == before[:place]
    (dropped,) = history.discarded
    assert dropped.nodes == before[place:]
    assert dropped.reason.startswith(f"edit of message {place}: ")
    assert [node.source for node in history.nodes()[place:]] == list(before[place:])
    edited = history.nodes()[place]
    assert edited.origin is None
    assert [node.item for node in history.nodes()[place + 1 :]] == plain[place + 1 :]


def test_the_reason_names_the_fields_that_an_edit_changed():
    history = MessageHistory(conversation())
    history[2].update(content="x", reasoning="y", tool_calls=history[2]["tool_calls"])
    history[2]["tool_calls"][1]["id"] = "z"
    assert [dropped.reason for dropped in history.discarded] == [
        "edit of message 2: content, reasoning",
        "edit of message 2: tool_calls",
    ]


MALFORMED = [
    (lambda h: h[1].__setitem__("content", None), MalformedMessage, 1),
    (lambda h: h[1].__setitem__("content", {"no": "list"}), MalformedMessage, 1),
    (lambda h: h[1].__delitem__("content"), MalformedMessage, 1),
    (lambda h: h[1].__setitem__("role", "robot"), UnknownRole, 1),
    (lambda h: h[1].clear(), UnknownRole, 1),
    (lambda h: h[1].popitem(), MalformedMessage, 1),
    (lambda h: h[1]["content"].append("text"), MalformedMessage, 1),
    (lambda h: h[1]["content"][1].clear(), MalformedMessage, 1),
    (lambda h: h[1]["content"][1].__setitem__("text", object()), MalformedMessage, 1),
    (lambda h: h[2]["tool_calls"][1].pop("id"), MalformedMessage, 2),
    (lambda h: h[2]["tool_calls"][0]["function"].__setitem__("name", 7), MalformedMessage, 2),
    (lambda h: h[3].__setitem__("tool_call_id", ""), MalformedMessage, 3),
    (lambda h: h.__setitem__(3, {"role": "tool", "content": ""}), MalformedMessage, 3),
    (lambda h: h.__setitem__(slice(1, 2), [USER, {"role": "user"}]), MalformedMessage, 2),
    (lambda h: h.__setitem__(slice(5, None, -2), [USER, USER, "x"]), MalformedMessage, 1),
    (lambda h: h.insert(-1, {"role": "robot"}), UnknownRole, 5),
    (lambda h: h[1].__setitem__("content", [h[1]]), MalformedMessage, 1),
]


@pytest.mark.parametrize(("edit", "error", "index"), MALFORMED)
def test_an_edit_that_makes_a_message_malformed_changes_nothing_and_names_it(edit, error, index):
    history = MessageHistory(conversation())
    before, view = history.nodes(), history[1]
    with pytest.raises(error) as caught:
        edit(history)
    assert caught.value.index == index
    assert history == conversation()
    assert history.nodes() == before
    assert view == conversation()[1]
    assert history.discarded == ()


def test_any_error_of_the_plain_operation_comes_through_and_changes_nothing():
    history = MessageHistory(conversation())
    for edit, error in [
        (lambda: history[0].pop("nothing"), KeyError),
        (lambda: history[1]["content"].remove("nothing"), ValueError),
        (lambda: history[1]["content"].sort(), TypeError),
        (lambda: history[1]["content"].__setitem__(9, 1), IndexError),
        (lambda: history[9].update(content=""), IndexError),
    ]:
        with pytest.raises(error):
            edit()
    assert history == conversation()
    assert history.discarded == ()


def test_an_equal_message_is_not_an_edit():
    response = ChatResponse(Message("assistant", "answer"), FinishReason.STOP)
    history = MessageHistory([USER, response, USER])
    before = history.nodes()
    history[1]["content"] = history[1]["content"].strip()
    history[1] = {"role": "assistant", "content": "answer", "reasoning": None}
    history[0:2] = [dict(message) for message in history[0:2]]
    history[:] = list(history)
    history[0] |= {"content": "hello"}
    assert history.nodes() == before
    assert history.discarded == ()
    assert history.head is before[-1]
    history[1:] = [*history[1:2], {"role": "user", "content": "summary"}]
    assert history.nodes()[:2] == before[:2]
    (dropped,) = history.discarded
    assert (dropped.at, dropped.nodes) == (2, before[2:])


def test_numbers_that_python_takes_for_equal_are_an_edit():
    history = MessageHistory([{"role": "user", "content": "x", "extra": 1}])
    history[0]["extra"] = True
    assert history[0]["extra"] is True
    history[0]["extra"] = 1.0
    assert json.dumps(history[0]["extra"]) == "1.0"


def test_a_view_follows_its_message_through_edits_elsewhere():
    history = MessageHistory(conversation())
    last, call = history[-1], history[2]["tool_calls"][0]
    history[0]["content"] = "other guide"
    history.insert(1, USER)
    del history[0]
    last["content"] = "well done"
    call["function"]["arguments"] = "{}"
    call["id"] = "c"
    expected = [USER, *conversation()[1:]]
    expected[2]["tool_calls"][0] = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    expected[-1]["content"] = "well done"
    assert history == expected
    assert history[-1] is last


@pytest.mark.parametrize(
    "take_away",
    [
        lambda h: h.pop(),
        lambda h: h.rewind(3, "again"),
        lambda h: h.clear(),
        lambda h: h.__setitem__(-1, USER),
        lambda h: h.__setitem__(slice(3, None), []),
    ],
)
def test_a_view_of_a_message_that_is_gone_reads_and_rejects_writes(take_away):
    history = MessageHistory(conversation())
    view = history[-1]
    take_away(history)
    kept = list(history)
    with pytest.raises(StaleMessage, match="was message 5"):
        view["content"] = "lost"
    assert view == conversation()[-1]
    assert history == kept


def test_a_part_that_was_removed_from_its_message_rejects_writes():
    history = MessageHistory(conversation())
    calls = history[2]["tool_calls"]
    gone = calls[1]
    taken = calls.pop()
    taken["id"] = "mine to change"
    with pytest.raises(StaleMessage, match="removed"):
        gone["id"] = "lost"
    history[2]["tool_calls"] = []
    with pytest.raises(StaleMessage, match="removed"):
        calls.append(taken)
    assert "tool_calls" not in history[2]


def test_one_value_in_two_places_is_two_values():
    history = MessageHistory([{"role": "user", "content": "x"}])
    part = {"type": "text", "text": "x"}
    history[0]["content"] = [part, part]
    history[0]["content"].append(history[0]["content"][0])
    part["text"] = "not recorded"
    history[0]["content"][0]["text"] = "first"
    assert [part["text"] for part in history[0]["content"]] == ["first", "x", "x"]


def test_a_message_keeps_its_canonical_form():
    history = MessageHistory(conversation())
    history[-1]["reasoning_content"] = "hm"
    assert history[-1]["reasoning"] == "hm"
    history[-1]["refusal"] = None
    del history[-1]["content"]
    assert history[-1] == {"role": "assistant", "content": None, "reasoning": "hm"}


def test_serialisers_and_templates_take_a_view_for_a_plain_dict():
    history = MessageHistory(conversation())
    views, plain = [history[place] for place in range(len(history))], conversation()
    assert json.dumps(views) == json.dumps(list(history))
    assert json.loads(json.dumps(views)) == plain
    assert orjson.dumps(views) == orjson.dumps([{**message} for message in history])
    template = "{% for m in messages %}{{ m.role }}{{ m.content | tojson }}{{ m.tool_calls }}{% endfor %}"
    render = jinja2.Environment().from_string(template).render
    assert render(messages=views) == render(messages=[history[place] for place in range(len(history))])
    for view, message in zip(views, plain, strict=True):
        assert view == message
        for copied in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
            assert type(copied) is dict
            assert copied == message
            copied["content"] = "mine"
        assert type(copy.copy(view)) is dict
    assert history == plain


def test_messages_that_are_put_back_are_still_known():
    tool = ToolResponse(Message("tool", "1", tool_call_id="a"), "ls")
    answer = ChatResponse(Message("assistant", "done"), FinishReason.STOP)
    history = MessageHistory([*conversation()[:3], tool, answer])
    first = history.nodes()
    history[1:] = [USER, *history[3:]]
    assert [node.origin for node in history.nodes()] == [None, None, tool, answer]
    assert [node.sampled for node in history.nodes()] == [False] * 4
    assert history.nodes()[3].source is first[4]
    kept = history[2:]
    del history[1:]
    history.extend(kept)
    assert [node.origin for node in history.nodes()] == [None, tool, answer]
    history[1], history[2] = history[2], history[1]
    assert [node.origin for node in history.nodes()] == [None, answer, tool]
    history.insert(0, dict(history[1]))
    assert [node.origin for node in history.nodes()] == [None, None, answer, tool]
    other = MessageHistory(history)
    assert [node.origin for node in other.nodes()] == [None] * 4, "another history knows nothing of them"
    assert history.completions() == (answer,)
