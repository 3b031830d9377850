"""What a history recorded stays what it was, also where a message's maker goes on changing what it was made of."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message, ToolCall


def made(extra: dict[str, Any], of_call: dict[str, Any], part: dict[str, Any]) -> list[Message]:
    return [
        Message("user", (part,), extra=extra),
        Message("assistant", None, (ToolCall("call_1", "search", "{}", of_call),)),
    ]


def test_a_message_that_was_made_of_dicts_is_recorded_as_it_was() -> None:
    given: tuple[dict[str, Any], ...] = ({"cache": {"ttl": 1}}, {"signature": ["a"]}, {"type": "text", "text": "Hi"})
    changed = copy.deepcopy(given)
    before, history = MessageHistory(made(*given)), MessageHistory(made(*changed))
    recorded = history.to_openai()
    changed[0]["cache"]["ttl"] = 2
    changed[0]["new"] = True
    changed[1]["signature"].append("b")
    changed[2]["text"] = "Bye"
    assert history.to_openai() == recorded == before.to_openai()
    assert list(history) == list(before)
    assert history == before
    assert [node.digest for node in history.nodes()] == [node.digest for node in before.nodes()]


def test_an_empty_dict_of_further_fields_is_recorded_empty() -> None:
    extra: dict[str, Any] = {}
    history = MessageHistory([Message("user", "Hi", extra=extra)])
    extra["name_of_it"] = "later"
    assert history[0] == {"role": "user", "content": "Hi"}


def test_messages_that_cannot_change_are_kept_themselves() -> None:
    call = ToolCall("call_1", "search", '{"query": "x"}')
    messages = [
        Message("user", "Hi"),
        Message("assistant", "Well.", (call,), reasoning="Hm."),
        Message("tool", "Found.", tool_call_id="call_1", name="search"),
        Message.from_openai({"role": "user", "content": [{"type": "text", "text": "x"}], "more": {"y": [1]}}),
    ]
    history = MessageHistory(messages)
    assert all(node.message is message for node, message in zip(history.nodes(), messages, strict=True))


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "Hi", extra={"x": {1}}),
        Message("user", ({"type": "text", "text": b"Hi"},)),
        Message("user", object()),  # type: ignore[arg-type]
        Message("user", "Hi", name=b"me"),  # type: ignore[arg-type]
        Message("assistant", None, (ToolCall("call_1", "f", "{}", {"x": {1}}),)),
        Message("assistant", None, (ToolCall("call_1", "f", {"x": {1}}),)),  # type: ignore[arg-type]
    ],
)
def test_values_that_json_cannot_hold_are_rejected_when_recorded(message: Message) -> None:
    history = MessageHistory([{"role": "user", "content": "Hello"}])
    with pytest.raises(TypeError, match="is not a JSON value"):
        history.append(message)
    assert len(history) == len(history.all_nodes()) == 1


def test_arguments_that_were_made_of_a_dict_are_recorded_as_they_were() -> None:
    arguments: dict[str, Any] = {"query": "x"}
    history = MessageHistory([Message("assistant", None, (ToolCall("call_1", "f", arguments),))])  # type: ignore[arg-type]
    arguments["query"] = "y"
    assert history[0]["tool_calls"][0]["function"]["arguments"] == {"query": "x"}
