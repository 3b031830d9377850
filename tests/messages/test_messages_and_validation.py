from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given, settings

from lachesis_messages.errors import MalformedMessage, MessageError, UnansweredToolCall, UnknownRole
from lachesis_messages.history import MessageHistory
from lachesis_messages.message_rules import validate_messages
from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.responses import ChatResponse
from tests.run import some
from tests.support.conversation_strategies import conversations, faulty_conversations

CALL = {"id": "call_1", "type": "function", "function": {"name": "terminal", "arguments": '{"command":  "ls"}'}}


@given(conversations())
@settings(max_examples=some(40), deadline=None)
def test_a_message_survives_a_round_trip(messages):
    for message in messages:
        before = copy.deepcopy(message)
        read = Message.from_openai(message)
        assert read.to_openai(reasoning_field="reasoning") == message == before
        assert Message.from_openai(read.to_openai("reasoning_content")) == read


def test_arguments_stay_the_text_that_the_model_wrote():
    for text in ('{"command":  "ls"}', "{not json", "", '{"a":1,"a":2}'):
        call = {**CALL, "function": {"name": "terminal", "arguments": text}}
        read = Message.from_openai({"role": "assistant", "content": None, "tool_calls": [call]})
        assert read.tool_calls == (ToolCall("call_1", "terminal", text),)
        assert read.to_openai()["tool_calls"] == [call]


def test_arguments_that_a_server_sends_as_an_object_become_compact_json():
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": "é", "b": [1, None]}}}
    assert ToolCall.from_openai(call).arguments == '{"a":"é","b":[1,null]}'
    assert ToolCall.from_openai({"id": "c", "function": {"name": "f", "arguments": None}}).arguments == "{}"
    assert ToolCall.from_openai({"id": "c", "function": {"name": "f"}}).arguments == "{}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "a", "reasoning": "b", "reasoning_details": [{"text": "c"}]}, "a"),
        ({"reasoning_content": "", "reasoning": "b", "reasoning_details": [{"text": "c"}]}, "b"),
        ({"reasoning": None, "reasoning_details": [{"text": "c"}, {"type": "encrypted"}, {"text": "d"}]}, "cd"),
        ({"reasoning": "", "reasoning_details": []}, None),
        ({}, None),
    ],
)
def test_reasoning_comes_from_the_first_field_that_holds_any(fields, expected):
    read = Message.from_openai({"role": "assistant", "content": "x", **fields})
    assert read.reasoning == expected
    assert read.to_openai() == {"role": "assistant", "content": "x"}, "reasoning is sent only on request"


def test_the_result_of_to_openai_can_be_edited():
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "look"}]
    source = {"role": "user", "content": parts, "provider_field": {"deep": [1]}}
    message = Message.from_openai(source)
    parts[1]["text"] = "changed by the caller"
    plain = message.to_openai()
    plain["content"][0]["image_url"]["url"] = "mine"
    plain["provider_field"]["deep"].append(2)
    assert message.text == "look"
    assert message.to_openai()["content"][0]["image_url"] == {"url": "data:"}
    assert message.to_openai()["provider_field"] == {"deep": [1]}


def test_fields_that_the_classes_do_not_name_are_kept():
    signed = {**CALL, "extra_content": {"google": {"thought_signature": "x"}}}
    message = {"role": "assistant", "content": None, "tool_calls": [signed], "annotations": [{"url": "u"}]}
    assert Message.from_openai({**message, "refusal": None, "function_call": None}).to_openai() == message


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        ({"role": "robot", "content": "x"}, UnknownRole, "robot"),
        ({"role": "developer", "content": "x"}, UnknownRole, "use 'system'"),
        ({"content": "x"}, UnknownRole, "None"),
        ({"role": "tool", "content": "x"}, MalformedMessage, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, MalformedMessage, "tool_call_id in a user"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, MalformedMessage, "tool_calls in a user"),
        ({"role": "user", "content": "x", "reasoning": "hm"}, MalformedMessage, "reasoning in a user"),
        ({"role": "user", "content": None}, MalformedMessage, "needs content"),
        ({"role": "user", "content": {"type": "text"}}, MalformedMessage, "content is dict"),
        ({"role": "user", "content": ["x"]}, MalformedMessage, "content[0]"),
        ({"role": "user", "content": [{"type": "x", "y": {1}}]}, MalformedMessage, "set is not a JSON value"),
        ({"role": "user", "content": "x", "more": object()}, MalformedMessage, "'more'"),
        ({"role": "user", "content": "x", "name": 3}, MalformedMessage, "name is int"),
        ({"role": "assistant", "tool_calls": {"id": "c"}}, MalformedMessage, "tool_calls is dict"),
        ({"role": "assistant", "tool_calls": ["c"]}, MalformedMessage, "tool_calls[0] is str"),
        ({"role": "assistant", "tool_calls": [CALL, {**CALL, "id": ""}]}, MalformedMessage, "tool_calls[1] has no id"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, MalformedMessage, "'custom'"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, MalformedMessage, "function is missing"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}, MalformedMessage, "no name"),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": [1]}}]},
            MalformedMessage,
            "arguments is list",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": {1}}}}]},
            MalformedMessage,
            "cannot become JSON",
        ),
        ({"role": "assistant", "content": "x", "reasoning": ["a"]}, MalformedMessage, "reasoning is list"),
        ({"role": "assistant", "content": "x", "reasoning_details": "a"}, MalformedMessage, "not a list"),
        ({"role": "assistant", "function_call": {"name": "f"}}, MalformedMessage, "retired"),
        ("hello", MalformedMessage, "is str"),
    ],
)
def test_a_malformed_message_is_named_with_its_index(message, error, says):
    with pytest.raises(error) as caught:
        Message.from_openai(message, index=4)
    assert type(caught.value) is error
    assert caught.value.index == 4
    assert str(caught.value).startswith("message 4: ")
    assert says in str(caught.value)


@given(conversations())
@settings(max_examples=some(40), deadline=None)
def test_every_whole_conversation_is_valid(messages):
    validate_messages(messages)
    validate_messages([Message.from_openai(message) for message in messages])


@given(conversations())
@settings(max_examples=some(40), deadline=None)
def test_every_beginning_of_a_conversation_is_valid_as_one_in_progress(messages):
    for length in range(1, len(messages) + 1):
        validate_messages(messages[:length], complete=False)


@given(faulty_conversations())
@settings(max_examples=some(100), deadline=None)
def test_every_single_fault_is_rejected_with_its_index(case):
    messages, error, index = case
    with pytest.raises(MessageError) as caught:
        validate_messages(messages)
    assert (type(caught.value), caught.value.index) == (error, index)


def test_an_empty_conversation_is_malformed():
    with pytest.raises(MalformedMessage):
        validate_messages([])


def test_results_may_come_in_any_order():
    calls = [{**CALL, "id": name} for name in ("a", "b")]
    answers = [{"role": "tool", "tool_call_id": name, "content": ""} for name in ("b", "a")]
    validate_messages([{"role": "assistant", "tool_calls": calls}, *answers])


def test_errors_cross_process_pools():
    error = UnansweredToolCall("no result for 'a'", ids=["a"], index=2)
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), copied.index, copied.ids) == (UnansweredToolCall, str(error), 2, ("a",))


def test_the_documented_api_list_is_valid():
    validate_messages(
        [
            {"role": "system", "content": "You are a helpful assistant with tools..."},
            {"role": "user", "content": "Search for Python tutorials"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"results": []})},
            {"role": "assistant", "content": "Here's what I found...", "reasoning": "Let me think"},
        ]
    )


def test_what_the_parser_says_of_a_call_stays_with_the_answer_and_is_no_part_of_the_message() -> None:
    signed = {"signature": ["x"]}
    plain = ToolCall("c1", "add", '{"a": 1}', signed)
    repaired = ToolCall("c1", "add", '{"a": 1}', signed, status="repaired", error="no </tool_call>")
    assert repaired == plain and repaired.to_openai() == plain.to_openai()
    assert (plain.ok, repaired.ok) == (True, False)
    answer = ChatResponse(Message("assistant", tool_calls=(repaired,)), FinishReason.TOOL_CALLS)
    for told in (answer, answer.with_new_call_ids({"c1"})):
        history = MessageHistory([{"role": "user", "content": "add"}, told])
        (kept,) = history.nodes()[-1].message.tool_calls
        assert (kept.status, kept.error) == ("repaired", "no </tool_call>")
        assert "repaired" not in json.dumps(history.to_openai("reasoning"))
