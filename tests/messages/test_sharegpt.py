from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lachesis_messages.errors import (
    MalformedMessage,
    RoleOrder,
    UnansweredToolCall,
    UnexpectedToolResult,
    UnknownRole,
)
from lachesis_messages.history import MessageHistory
from lachesis_messages.markup import convert_scratchpad_to_think, escape_text, split_opened_think, unescape_text
from lachesis_messages.records.dataset_entries import (
    load_trajectories,
    save_trajectory,
    to_batch_entry,
    to_dataset_entry,
)
from lachesis_messages.records.entries import omitting, to_trajectory_entry
from lachesis_messages.records.loading import from_sharegpt, tools_from_sharegpt
from lachesis_messages.records.sharegpt import WarningKind, system_prompt, to_conversations
from tests.run import some
from tests.support.conversation_strategies import conversations, hostile_text

DATA = Path(__file__).parents[1] / "support" / "entries"
TERMINAL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Execute shell commands",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
NO_THOUGHT = "<think>\n</think>\n"


def call(call_id: str, name: str = "terminal", arguments: str = "{}") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls: dict, content: str | None = None, **fields: str) -> dict:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def result(call_id: str, content: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def user(content: str = "go") -> dict:
    return {"role": "user", "content": content}


def values(messages: list[dict], **options) -> list[str]:
    return [turn["value"] for turn in to_conversations(messages, system="none", **options).conversations]


PYTHON_VERSION = [
    {"role": "system", "content": "This prompt is not saved."},
    user("What Python version is installed?"),
    asks(
        call("call_abc123", arguments='{"command": "python3 --version"}'),
        reasoning="The user wants to know the Python version. I should run python3 --version.",
    ),
    result("call_abc123", "Python 3.11.6"),
    {
        "role": "assistant",
        "content": "Python 3.11.6 is installed on this system.",
        "reasoning": "Got the version. I can now answer the user.",
    },
]


def test_the_documented_trajectory_entry_is_reproduced_byte_for_byte():
    documented = json.loads((DATA / "trajectory_entry.json").read_text())
    entry, warnings = to_trajectory_entry(
        PYTHON_VERSION,
        [TERMINAL],
        model="anthropic/claude-sonnet-4.6",
        completed=True,
        timestamp="2026-03-30T14:22:31.456789",
    )
    assert entry["conversations"][0]["value"] == documented["conversations"][0]["value"]
    assert json.dumps(entry) == json.dumps(documented), "keys in the documented order, too"
    assert warnings == ()
    assert from_sharegpt(documented) == PYTHON_VERSION[1:]
    assert tools_from_sharegpt(documented) == [TERMINAL]


def test_the_documented_dataset_entry_is_reproduced_byte_for_byte():
    documented = json.loads((DATA / "dataset_entry.json").read_text())
    messages = [
        {"role": "system", "content": "You are a helpful assistant..."},
        user("Search for Python tutorials"),
        asks(call("call_abc123", "web_search", '{"query": "Python tutorials"}')),
        result("call_abc123", '{"results": [...]}'),
        {"role": "assistant", "content": "Here's what I found..."},
    ]
    function = {"name": "web_search", "description": "Search"}
    entry, warnings = to_dataset_entry(messages, [{"type": "function", "function": function}])
    assert warnings == ()
    written = entry["tools"]
    assert written.replace(json.dumps(function), "{...}") == documented["tools"]
    assert json.dumps({**entry, "tools": documented["tools"]}) == json.dumps(documented)
    expected = json.loads(json.dumps(messages).replace("call_abc123", "call_0"))
    assert from_sharegpt(entry) == expected
    assert tools_from_sharegpt(entry) == [{"type": "function", "function": function}]


def test_native_reasoning_becomes_a_think_block():
    message = {"role": "assistant", "content": "Here's what I found...", "reasoning": "Let me think."}
    assert values([user(), message])[1] == "<think>\nLet me think.\n</think>\nHere's what I found..."
    dataset = to_dataset_entry([user(), message]).entry["conversations"]
    assert dataset[1]["value"] == "<think>\nLet me think.\n</think>\nHere's what I found..."


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("<REASONING_SCRATCHPAD>a</REASONING_SCRATCHPAD>b", "<think>\na\n</think>\nb"),
        ("<REASONING_SCRATCHPAD>\na\n</REASONING_SCRATCHPAD>\n\nb", "<think>\na\n</think>\nb"),
        ("\n<think>\na\n</think>\n\nb", "<think>\na\n</think>\nb"),
        ("<think></think>b", NO_THOUGHT + "b"),
        ("<think>a</think><think>b</think>c", "<think>\na\nb\n</think>\nc"),
        ("<think>a</think>", "<think>\na\n</think>"),
        ("a\n</think>\n\nb", "<think>\na\n</think>\nb"),  # the prompt had opened the block
        ("a</think>", "<think>\na\n</think>"),
        ("<think>cut", "<think>\ncut\n</think>"),  # by the token limit
        ("<REASONING_SCRATCHPAD>\ncut", "<think>\ncut\n</think>"),
        ("<think>a</think>\n<think>cut", "<think>\na\ncut\n</think>"),
    ],
)
def test_reasoning_in_the_content_becomes_the_one_think_block(content, value):
    assert values([user(), {"role": "assistant", "content": content}])[1] == value


def test_native_reasoning_that_the_content_repeats_is_written_once():
    said = {"role": "assistant", "content": "<think>a</think>b", "reasoning": "a\n"}
    assert values([user(), said])[1] == "<think>\na\n\n</think>\nb"
    said["reasoning"] = "x"
    assert values([user(), said])[1] == "<think>\nx\na\n</think>\nb"


@pytest.mark.parametrize(
    "content",
    [
        "plain",
        "",
        None,
        "  ",
        "use the <think> tag",
        "```\n<think>x</think>\n```",
        "</think> ends it",
    ],
)
def test_a_turn_without_reasoning_gets_an_empty_think_block(content):
    assert values([user(), {"role": "assistant", "content": content}])[1] == (NO_THOUGHT + (content or "")).strip()
    blank = {"role": "assistant", "content": content, "reasoning": " \n"}
    assert values([user(), blank]) == values([user(), {"role": "assistant", "content": content}])


@pytest.mark.parametrize("content", ["<think>I look.", "I look.</think>", "I look.\n</think>\n\n"])
def test_a_thought_before_calls_that_the_server_took_out_is_the_one_think_block(content):
    asked = asks(call("c", arguments="{}")) | {"content": content}
    turn = values([user(), asked, result("c", "")])[1]
    assert turn.startswith("<think>\nI look.\n</think>\n<tool_call>")
    assert turn.count("think>") == 2


def test_an_argument_that_mentions_think_does_not_suppress_the_empty_block():
    turn = values([user(), asks(call("c", arguments='{"text": "<think>x</think>"}')), result("c", "")])[1]
    assert turn.startswith(NO_THOUGHT + "<tool_call>\n")
    assert turn.count("<think>") == 1


def test_several_calls_become_several_blocks_after_the_content():
    turn = values(
        [
            user(),
            asks(call("a", arguments='{"command":"ls -la"}'), call("b", "read_file", '{"n":[1,2]}'), content="Look:"),
            result("a", ""),
            result("b", ""),
        ]
    )[1]
    assert turn == (
        NO_THOUGHT + 'Look:\n<tool_call>\n{"name": "terminal", "arguments": {"command": "ls -la"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read_file", "arguments": {"n": [1, 2]}}\n</tool_call>'
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", '"text"', '{"a": NaN}', '{"a": 1e999}', "3", "[" * 100_000])
def test_arguments_that_are_no_object_are_replaced_reported_and_never_completed(arguments):
    messages = [user(), asks(call("c", arguments=arguments)), result("c", "bad"), {"role": "assistant", "content": ""}]
    conversion = to_conversations(messages)
    assert conversion.conversations[2]["value"].endswith('{"name": "terminal", "arguments": {}}\n</tool_call>')
    (warning,) = conversion.warnings
    assert (warning.kind, warning.index) == (WarningKind.ARGUMENTS_REPLACED, 1)
    assert str(warning).startswith("message 1: arguments of terminal (c) replaced")
    assert conversion.malformed
    assert to_trajectory_entry(messages, model="m", completed=True).entry["completed"] is False


@pytest.mark.parametrize("arguments", ["", " ", "{}", "null"])
def test_no_arguments_are_an_empty_object_and_nothing_to_warn_of(arguments):
    conversion = to_conversations([user(), asks(call("c", arguments=arguments)), result("c", "")])
    assert conversion.warnings == ()
    assert '"arguments": {}' in conversion.conversations[2]["value"]


def test_results_share_one_turn_with_their_names_matched_by_id_in_the_order_of_the_calls():
    turn = values([user(), asks(call("a", "read_file"), call("b")), result("b", "two"), result("a", "one")])
    assert turn[2:] == [
        '<tool_response>\n{"tool_call_id": "a", "name": "read_file", "content": "one"}\n</tool_response>\n'
        '<tool_response>\n{"tool_call_id": "b", "name": "terminal", "content": "two"}\n</tool_response>'
    ]


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ('{"a":1,"b":[true]}', '{"a": 1, "b": [true]}'),
        ("[1,2]", "[1, 2]"),
        ("[1,2", '"[1,2"'),
        ("{...}", '"{...}"'),
        ("3", '"3"'),
        (' {"a":1}', '" {\\"a\\":1}"'),
        ('{"a": NaN}', '"{\\"a\\": NaN}"'),
        ('{"a":1,"a":2}', '"{\\"a\\":1,\\"a\\":2}"'),
        ("漢🙂", '"漢🙂"'),
    ],
)
def test_a_result_that_looks_like_json_is_an_object_only_where_it_parses(content, written):
    turn = values([user(), asks(call("c")), result("c", content)])[2]
    assert (
        turn == f'<tool_response>\n{{"tool_call_id": "c", "name": "terminal", "content": {written}}}\n</tool_response>'
    )


def test_the_system_turn_is_generated_actual_or_none():
    messages = [{"role": "system", "content": "Mine."}, user()]
    generated = to_conversations(messages, [TERMINAL["function"]]).conversations
    assert [turn["from"] for turn in generated] == ["system", "human"]
    assert generated[0]["value"] == system_prompt([TERMINAL])
    assert '"required": null}]\n</tools>' in generated[0]["value"]
    assert to_conversations(messages, system="actual").conversations[0] == {"from": "system", "value": "Mine."}
    assert to_conversations(messages, system="none").conversations == [{"from": "human", "value": "go"}]
    assert "<tools>\n[]\n</tools>" in system_prompt([])
    with pytest.raises(ValueError, match="without a name"):
        system_prompt([{"type": "function"}])


def test_a_conversation_that_broke_off_is_written_only_as_not_completed():
    messages = [user(), asks(call("c"))]
    with pytest.raises(UnansweredToolCall):
        to_trajectory_entry(messages, model="m", completed=True)
    entry = to_trajectory_entry(messages, model="m", completed=False).entry
    assert entry["completed"] is False
    assert from_sharegpt(entry)[1]["tool_calls"] == [call("call_0")]


def test_parts_that_are_not_text_leave_their_type_and_a_warning():
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "data:"}}]
    conversion = to_conversations([{"role": "user", "content": parts}], system="none")
    assert conversion.conversations[0]["value"] == "see [image_url]"
    assert [warning.kind for warning in conversion.warnings] == [WarningKind.PART_OMITTED]


def test_an_entry_says_how_many_parts_it_lacks_and_one_that_lacks_none_says_nothing(tmp_path: Path):
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    answer = {"role": "assistant", "content": "A cat."}
    for content, omitted in (("What?", None), ([image, {"type": "text", "text": "What?"}, image], 2)):
        messages = [{"role": "user", "content": content}, answer]
        path = save_trajectory(to_conversations(messages), "m", True, directory=tmp_path / str(omitted))
        stats = {"completed": True, "partial": False, "api_calls": 1, "toolsets_used": [], "tool_stats": {}}
        entries = [
            to_trajectory_entry(messages, model="m", completed=True).entry,
            to_dataset_entry(messages).entry,
            to_batch_entry(messages, prompt_index=0, metadata={}, all_tools=(), **stats).entry,
            *load_trajectories(path),
        ]
        assert [entry.get("parts_omitted") for entry in entries] == [omitted] * 4
        assert omitting(path) == bool(omitted)
    text = '"parts_omitted": 1'
    path = save_trajectory(to_conversations([{"role": "user", "content": text}, answer]), "m", True, directory=tmp_path)
    assert omitting(path) == omitting(tmp_path / "none") == 0


def test_text_that_utf8_cannot_hold_is_replaced_with_a_warning():
    conversion = to_conversations([user("half \ud83d, whole \ud83d\ude42")], system="none")
    assert conversion.conversations[0]["value"] == "half �, whole 🙂"
    assert [warning.kind for warning in conversion.warnings] == [WarningKind.CHARACTER_REPLACED]


def test_metadata_joins_an_entry_and_cannot_replace_its_keys():
    entry = to_trajectory_entry([user()], model="m", completed=True, score=0.5).entry
    assert list(entry) == ["conversations", "timestamp", "model", "completed", "score"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}", entry["timestamp"])
    with pytest.raises(ValueError, match="conversations"):
        to_trajectory_entry([user()], model="m", completed=True, conversations=[])


def test_a_batch_entry_has_a_row_for_every_tool():
    entry, _ = to_batch_entry(
        [user()],
        prompt_index=42,
        metadata={"prompt_source": "gsm8k", "difficulty": "hard"},
        completed=True,
        partial=False,
        api_calls=7,
        toolsets_used=["code_tools", "file_tools"],
        tool_stats={"terminal": {"count": 3, "success": 2, "failure": 1}, "unlisted": {"count": 1}},
        all_tools=["terminal", "read_file"],
    )
    keys = "prompt_index, conversations, metadata, completed, partial, api_calls, toolsets_used, tool_stats"
    assert ", ".join(entry) == f"{keys}, tool_error_counts"
    assert entry["tool_stats"] == {
        "terminal": {"count": 3, "success": 2, "failure": 1},
        "read_file": {"count": 0, "success": 0, "failure": 0},
        "unlisted": {"count": 1, "success": 0, "failure": 0},
    }
    assert entry["tool_error_counts"] == {"terminal": 1, "read_file": 0, "unlisted": 0}


def test_scratchpads_are_converted():
    assert convert_scratchpad_to_think("<REASONING_SCRATCHPAD>a</REASONING_SCRATCHPAD>") == "<think>a</think>"


@given(hostile_text, st.booleans())
@settings(max_examples=some(40), deadline=None)
def test_escaped_text_has_no_tag_and_comes_back(text, think):
    escaped = escape_text(text, think=think)
    assert unescape_text(escaped, think=think) == text
    assert not re.search("</?tool_(call|response)>", escaped)
    assert not (think and re.search("</?think>", escaped))


@given(conversations())
@settings(max_examples=some(40), deadline=None)
def test_every_turn_has_the_documented_structure_whatever_the_texts_spell(messages):
    conversion = to_conversations(messages, [TERMINAL])
    turns = iter(conversion.conversations)
    assert next(turns)["value"] == system_prompt([TERMINAL])
    index = 1 if messages[0]["role"] == "system" else 0
    for turn in turns:
        message = messages[index]
        index += 1
        if message["role"] == "user":
            assert turn == {"from": "human", "value": message["content"]}
        elif message["role"] == "assistant":
            assert turn["from"] == "gpt"
            assert turn["value"].startswith("<think>\n")
            calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", turn["value"], re.DOTALL)
            wanted = [call["function"] for call in message.get("tool_calls", [])]
            assert [json.loads(text) for text in calls] == [
                {"name": call["name"], "arguments": json.loads(call["arguments"])} for call in wanted
            ]
            assert turn["value"].count("<tool_call>") == len(wanted)
        else:
            assert turn["from"] == "tool"
            results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", turn["value"], re.DOTALL)
            ids = [json.loads(text)["tool_call_id"] for text in results]
            index -= 1
            assert ids == [message["tool_call_id"] for message in messages[index : index + len(ids)]]
            index += len(ids)
    assert index == len(messages)


PLAIN = hostile_text.filter(
    lambda text: (
        "SCRATCHPAD" not in text and not text.lstrip().startswith("<think>") and split_opened_think(text) == ("", text)
    )
)


def normal_form(message: dict) -> dict:
    """What the format keeps of a message: no trailing space of the assistant's text, JSON in one spelling."""
    message = dict(message)
    if message["role"] == "assistant":
        content = message["content"] or ""
        if "tool_calls" not in message:
            message["content"] = content.rstrip()
        elif not content.strip():
            message["content"] = None
        if not message.get("reasoning", "").strip():
            message.pop("reasoning", None)
    if message["role"] == "tool" and message["content"].startswith(("{", "[")):
        try:
            content = json.loads(message["content"], object_pairs_hook=pairs_without_repetition)
        except ValueError:
            return message
        message["content"] = json.dumps(content, ensure_ascii=False)
    return message


def pairs_without_repetition(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError("repeated")
    return dict(pairs)


@given(conversations(text=PLAIN))
@settings(max_examples=some(40), deadline=None)
def test_a_trajectory_entry_reloads_to_the_same_messages(messages):
    entry = to_trajectory_entry(messages, [TERMINAL], model="m", completed=True, system="actual").entry
    reloaded = from_sharegpt(json.loads(json.dumps(entry)))
    ids = {message["tool_call_id"] for message in messages if message["role"] == "tool"}
    assert {message["tool_call_id"] for message in reloaded if message["role"] == "tool"} == ids
    assert reloaded == [normal_form(message) for message in messages]


@given(conversations(text=PLAIN))
@settings(max_examples=some(40), deadline=None)
def test_a_dataset_entry_reloads_to_the_same_messages_with_ids_by_number(messages):
    entry = to_dataset_entry(messages, [TERMINAL]).entry
    reloaded = from_sharegpt(json.loads(json.dumps(entry)))
    assert without_ids(reloaded) == without_ids(normal_dataset_form(message) for message in messages)
    MessageHistory(reloaded)
    made_up = [call["id"] for message in reloaded for call in message.get("tool_calls", [])]
    assert len(set(made_up)) == len(made_up)


def normal_dataset_form(message: dict) -> dict:
    """Bare results come back letter for letter; text that is alone in its turn loses the space at its end."""
    if message["role"] == "tool":
        structured = normal_form(message)["content"]
        try:
            keys = set(json.loads(structured)) if message["content"].startswith("{") else set()
        except ValueError:
            keys = set()
        return {**message, "content": structured} if keys == {"tool_call_id", "name", "content"} else message
    message = normal_form(message)
    if message["role"] == "assistant" and "tool_calls" not in message and "reasoning" not in message:
        message["content"] = message["content"].rstrip()
    return message


def without_ids(messages) -> list[dict]:
    """The messages with every id replaced by the place of its call."""
    places: dict[str, int] = {}
    for message in (messages := list(messages)):
        for asked in message.get("tool_calls", []):
            places[asked["id"]] = len(places)
    text = [json.loads(json.dumps(message)) for message in messages]
    for message in text:
        for asked in message.get("tool_calls", []):
            asked["id"] = places[asked["id"]]
        if message["role"] == "tool":
            message["tool_call_id"] = places[message["tool_call_id"]]
    return text


@given(conversations(), st.sampled_from(["trajectory", "dataset"]))
@example([user(), {"role": "assistant", "content": "<think> "}], "trajectory")
@example([user(), {"role": "assistant", "content": "<think> "}], "dataset")
@example([user(), {"role": "assistant", "content": " </think>\nhi"}], "trajectory")
@example([user(), {"role": "assistant", "content": "<REASONING_SCRATCHPAD> "}], "trajectory")
@example([user(), {"role": "assistant", "content": "<think>\n</think>\n<think> "}], "dataset")
@settings(max_examples=some(40), deadline=None)
def test_an_entry_survives_reading_and_writing(messages, variant):
    def write(these: list[dict]) -> dict:
        if variant == "dataset":
            return to_dataset_entry(these, [TERMINAL]).entry
        return to_trajectory_entry(these, [TERMINAL], model="m", completed=True, timestamp="t").entry

    entry = write(messages)
    assert write(from_sharegpt(entry)) == entry


def test_calls_without_a_result_are_distinguished_by_name_and_numbered_around_known_ids():
    messages = [user(), asks(call("x"), call("call_0", "read_file")), result("call_0", "")]
    entry = to_trajectory_entry(messages, model="m", completed=False).entry
    reloaded = from_sharegpt(entry)
    assert [asked["id"] for asked in reloaded[1]["tool_calls"]] == ["call_1", "call_0"]


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ({"from": "robot", "value": "x"}, UnknownRole),
        ({"from": "gpt", "value": None}, MalformedMessage),
        ({"value": "x"}, UnknownRole),
        ({"from": "gpt", "value": "<tool_call>\n{\n</tool_call>"}, MalformedMessage),
        ({"from": "gpt", "value": "<tool_call>\n[]\n</tool_call>"}, MalformedMessage),
        ({"from": "tool", "value": "bare"}, MalformedMessage),
        ({"from": "tool", "value": "<tool_response>\nx\n</tool_response>"}, UnexpectedToolResult),
    ],
)
def test_a_turn_that_is_not_in_the_format_is_named(turn, error):
    with pytest.raises(error) as caught:
        from_sharegpt({"conversations": [{"from": "human", "value": "x"}, turn]})
    assert caught.value.index == 1


def test_text_around_the_calls_of_other_writers_is_kept():
    calls = ['<tool_call>{"name": "a", "arguments": {}}</tool_call>', '<tool_call> {"name": "b"} </tool_call>']
    value = f"before\n{calls[0]}\nbetween {calls[1]} after"
    (message,) = from_sharegpt({"conversations": [{"from": "gpt", "value": value}]})
    assert message["content"] == "before\nbetween  after"
    assert [asked["function"] for asked in message["tool_calls"]] == [
        {"name": "a", "arguments": "{}"},
        {"name": "b", "arguments": "{}"},
    ]


def test_converting_takes_time_in_proportion_to_the_text():
    spaces = " " * 200_000 + "<" * 200_000 + "&amp;" * 50_000 + "\n" * 200_000
    messages = [user(spaces), asks(call("c", arguments=json.dumps({"x": spaces})), content=spaces), result("c", spaces)]
    entry = to_trajectory_entry(messages, model="m", completed=True).entry
    assert from_sharegpt(entry) == messages
    dataset = to_dataset_entry(messages).entry
    assert from_sharegpt(dataset)[2]["content"] == spaces


def test_what_a_program_sent_is_complete_with_open_calls_and_late_system_messages() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "submit"}'}}
    messages = [
        {"role": "system", "content": "Work."},
        {"role": "user", "content": "Go."},
        {"role": "system", "content": "Be quick."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    entry = to_trajectory_entry(messages, [TERMINAL], model="m", completed=True, of_program=True, system="actual").entry
    assert entry["completed"] is True
    assert [turn["from"] for turn in entry["conversations"]] == ["system", "human", "system", "gpt"]
    assert entry["conversations"][2]["value"] == "Be quick."
    with pytest.raises(RoleOrder):
        to_trajectory_entry(messages, [TERMINAL], model="m", completed=True)
    del messages[2]
    with pytest.raises(UnansweredToolCall):
        to_trajectory_entry(messages, [TERMINAL], model="m", completed=True)
