"""Conversations of other writers: what a file means is read, and what it cannot say is never made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.cli import main
from lachesis_data.files.entry_files import read_entries
from lachesis_data.files.foreign import NULLS_REMOVED, unpadded
from lachesis_data.files.formats import converter, read_chat
from lachesis_data.files.validation import validate_entry
from lachesis_messages.messages import Message
from lachesis_messages.records.jsonl import JsonlError
from tests.data.test_formats import PLAIN, call
from tests.support.token_trees import UNTIMED

ASKED = {"role": "user", "content": "go"}
DONE = {"role": "assistant", "content": "done"}


def offered(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def called(name: str, arguments: Any, *tools: Any) -> dict[str, Any]:
    asks = {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "r"}
    return {"messages": [ASKED, asks, answer, DONE], "tools": list(tools)}


def arguments_of(entry: Any) -> list[Any]:
    calls = [each for message in read_chat(entry).messages for each in message.get("tool_calls") or ()]
    return [json.loads(each["function"]["arguments"]) for each in calls]


def as_dataset(ending: str) -> Callable[[list[Any], Path], object]:
    def write(rows: list[Any], path: Path) -> object:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        made = Dataset.from_list(rows)
        return made.to_parquet(path) if ending == "parquet" else made.to_json(path, lines=ending == "jsonl")

    return write


def as_table(rows: list[Any], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)


NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
MAYBE = {"anyOf": [NUMBER, {"type": "null"}]}
DEEP = {"type": "object", "properties": {"unit": TEXT}}
LISTED = {"type": "array", "items": {"type": "object", "properties": {"k": NUMBER}}}
WEATHER = offered("weather", ("city",), city=TEXT, how=DEEP, days=LISTED)
ADD = offered("add", ("x",), x={"type": ["integer", "null"]}, y=NUMBER, z=MAYBE)
NOW = offered("now")
GIVEN: list[tuple[str, Any, Any]] = [
    ("weather", {"city": "Oslo", "how": {"unit": "c"}, "days": [{"k": 1}, {"k": 2}]}, WEATHER),
    ("add", {"x": None, "z": None, "how": {"other": True}, "days": [{"j": 1}]}, ADD),
    ("add", {"x": 1, "y": 2, "z": 3}, ADD),
    ("now", {}, NOW),
]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", as_dataset("parquet")),
        ("b.parquet", as_table),
        ("a.jsonl", as_dataset("jsonl")),
        ("a.json", as_dataset("json")),
    ],
)
def test_the_nulls_of_a_columnar_file_are_no_arguments(name: str, write: Any, tmp_path: Path) -> None:
    rows = [called(tool, arguments, schema) for tool, arguments, schema in GIVEN]
    write(rows, tmp_path / name)
    lines = list(read_entries([tmp_path / name]))
    assert [arguments_of(line.entry) for line in lines] == [[arguments] for _, arguments, _ in GIVEN]
    assert [line.entry["tools"] for line in lines] == [[schema] for _, _, schema in GIVEN]
    assert all(line.changes == (NULLS_REMOVED,) for line in lines)


def test_without_their_tools_no_null_of_a_columnar_file_is_an_argument(tmp_path: Path) -> None:
    rows = [{"messages": called(tool, arguments)["messages"]} for tool, arguments, _ in GIVEN[:1] + GIVEN[2:]]
    as_table(rows, tmp_path / "a.parquet")
    found = [arguments_of(line.entry) for line in read_entries([tmp_path / "a.parquet"])]
    assert found == [[arguments] for _, arguments, _ in GIVEN[:1] + GIVEN[2:]]


def test_a_null_in_lines_that_no_column_held_is_what_the_model_said(tmp_path: Path) -> None:
    row = called("weather", {"city": "Oslo", "made_up": None}, WEATHER)
    assert unpadded(row) == (row, False)
    written = converter("trl").convert(row, set())
    assert arguments_of(written) == [{"city": "Oslo", "made_up": None}]


def test_removed_nulls_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "a.parquet", tmp_path / "out.jsonl"
    as_table([called("weather", {"city": "Oslo"}, WEATHER), called("add", {"x": 1}, ADD)], source)
    assert main(["trajectories", "convert", str(source), "--to", "hermes", "--out", str(out)]) == 0
    assert "changed: 2, null_arguments_removed" in capsys.readouterr().out


json_values = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner),
    max_leaves=6,
)


@UNTIMED
@given(of=st.lists(st.dictionaries(st.sampled_from("abc"), json_values), min_size=1, max_size=3))
def test_arguments_survive_a_column_that_gives_every_row_all_keys(of: list[dict[str, Any]]) -> None:
    every = sorted({name for arguments in of for name in arguments} | {"other"})
    for arguments in of:
        row = called(
            "t", {name: arguments.get(name) for name in every}, offered("t", **{name: {} for name in arguments})
        )
        row["messages"] = [
            {key: message.get(key) for key in ("role", "content", "tool_calls", "tool_call_id")}
            for message in row["messages"]
        ]
        assert arguments_of(unpadded(row)[0]) == [arguments]


# Arguments.


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("to", ["hermes", "openai", "trl", "parquet"])
def test_arguments_that_were_encoded_more_than_once_are_decoded(to: str, times: int) -> None:
    arguments: Any = {"path": 'a "quoted" name', "n": [1, None]}
    for _ in range(times):
        arguments = json.dumps(arguments)
    for entry in (called("t", arguments), called("t", json.loads(arguments))):
        written = converter(to).convert(entry, set())
        assert arguments_of(written) == [{"path": 'a "quoted" name', "n": [1, None]}]


@pytest.mark.parametrize("arguments", ['{"a": 1}', '"{\\"a\\": 1}"'])
def test_a_call_in_sharegpt_whose_arguments_are_text_is_read(arguments: str) -> None:
    said = json.dumps({"name": "t", "arguments": arguments})
    turns = [("human", "go"), ("gpt", f"<tool_call>\n{said}\n</tool_call>")]
    entry = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": "[]", "source": "s"}
    assert arguments_of(entry) == [{"a": 1}]


@pytest.mark.parametrize("arguments", ["[1]", "seven", "7", '{"a": 1'])
def test_arguments_that_are_no_object_are_an_error_and_never_empty(arguments: str) -> None:
    said = json.dumps({"name": "t", "arguments": arguments})
    turns = [("human", "go"), ("gpt", f"<tool_call>\n{said}\n</tool_call>")]
    entry = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": "[]", "source": "s"}
    assert any("the arguments of t are not an object" in problem for problem in validate_entry(entry))
    with pytest.raises(ValueError, match="arguments"):
        converter("trl").convert(called("t", arguments), set())


# Reasoning.

THOUGHTS: list[tuple[Any, str]] = [
    ([{"type": "thinking", "thinking": [{"type": "text", "text": "six "}, {"type": "text", "text": "sevens"}]}], ""),
    ([{"type": "thinking", "thinking": "six sevens", "signature": "Zm9v"}], ""),
    ([{"type": "thinking", "thinking": "six"}, {"type": "thinking", "thinking": "sevens"}], "six\nsevens"),
    ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "six sevens"}]}], ""),
    ([{"type": "reasoning", "text": "six sevens"}, {"type": "redacted_thinking", "data": "Zm9v"}], ""),
]


@pytest.mark.parametrize(("parts", "thought"), THOUGHTS)
def test_reasoning_in_parts_of_the_content_is_reasoning(parts: list[Any], thought: str) -> None:
    thought = thought or "six sevens"
    said = {"role": "assistant", "content": [*parts, {"type": "text", "text": "42"}]}
    read = Message.from_openai(said)
    assert (read.content, read.reasoning) == ("42", thought)
    entry = {"messages": [ASKED, said]}
    hermes = converter("hermes").convert(entry, set())
    assert hermes["conversations"][-1]["value"] == f"<think>\n{thought}\n</think>\n42"
    answer = converter("trl").convert(entry, set())["messages"][-1]
    assert (answer["content"], answer["reasoning_content"]) == ("42", thought)
    warnings: set[str] = set()
    assert converter("openai").convert(entry, warnings)["messages"][-1]["content"] == "42"
    assert warnings == {"reasoning_dropped"}


@pytest.mark.parametrize("key", ["reasoning_details", "thinking_blocks"])
def test_reasoning_in_a_list_beside_the_content_is_reasoning(key: str) -> None:
    blocks = [{"type": "thinking", "thinking": "six "}, {"type": "reasoning.text", "text": "sevens"}]
    entry = {"messages": [ASKED, {"role": "assistant", "content": "42", key: blocks}]}
    assert converter("trl").convert(entry, set())["messages"][-1]["reasoning_content"] == "six sevens"


# Ids.


def test_ids_that_a_later_turn_uses_again_stay_with_their_results() -> None:
    turns = [
        message
        for number in range(3)
        for message in (
            {"role": "assistant", "content": None, "tool_calls": [call("a", "{}", "c0"), call("b", "{}", "c1")]},
            {"role": "tool", "tool_call_id": "c1", "content": f"b{number}"},
            {"role": "tool", "tool_call_id": "c0", "content": f"a{number}"},
        )
    ]
    entry = {"messages": [ASKED, *turns, DONE], "tools": []}
    assert validate_entry(entry, "openai") == []
    for to in ("hermes", "openai", "trl", "parquet", "sharegpt-tools"):
        chat = read_chat(converter(to).convert(entry, set()))
        names = {each["id"]: each["function"]["name"] for m in chat.messages for each in m.get("tool_calls") or ()}
        assert len(names) == 6
        results = [(names[m["tool_call_id"]], m["content"]) for m in chat.messages if m["role"] == "tool"]
        assert sorted(results) == [(name, f"{name}{number}") for name in "ab" for number in range(3)]


def test_an_id_that_one_message_has_twice_is_an_error() -> None:
    asks = {"role": "assistant", "content": None, "tool_calls": [call("a", "{}", "c"), call("b", "{}", "c")]}
    answer = {"role": "tool", "tool_call_id": "c", "content": "r"}
    entry = {"messages": [ASKED, asks, answer, answer, DONE]}
    assert "twice in this message" in validate_entry(entry)[0]


def test_results_without_ids_are_those_of_the_calls_before_them() -> None:
    function = call("a", "{}")["function"]
    asks = {"role": "assistant", "tool_calls": [{"function": function}, {"function": {**function, "name": "b"}}]}
    entry = {"messages": [ASKED, asks, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, DONE]}
    said = converter("hermes").convert(entry, set())["conversations"][3]["value"]
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [(each["name"], each["content"]) for each in found] == [("a", "1"), ("b", "2")]
    assert validate_entry(entry), "OpenAI's format has ids"


# Arrays.


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("size", [0, 70_000])
def test_a_json_array_is_read_item_by_item(indent: int | None, size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    entries = [{"messages": [*PLAIN, {"role": "user", "content": "é€😀]," * size + str(n)}]} for n in range(3)]
    path.write_text("\ufeff \n" + json.dumps(entries, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = list(read_entries([path]))
    assert [line.entry for line in lines] == entries
    assert [line.number for line in lines] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1}, {"a": ', "line 2: not JSON"),
        ('[{"a": 1}', "it is not closed: the file is cut off"),
        ('[{"a": 1} {"a": 2}]', "',' is missing"),
        ('[{"a": 1}]\n[{"a": 2}]\n', "more text after the end of the array"),
        ('[{"a": 1, "a": 2}]', "more than once"),
        ("[1, 2]", "line 1: not an entry: int, not an object"),
    ],
)
def test_what_is_wrong_with_an_array_is_named(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(JsonlError, match=problem):
        list(read_entries([path]))
    named: list[str] = []
    list(read_entries([path], bad=lambda error: named.append(str(error))))
    assert problem in named[0]


def test_an_array_is_converted_without_a_word_about_a_torn_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.json", tmp_path / "out.jsonl"
    source.write_text(json.dumps([{"messages": PLAIN}], indent=1))
    assert main(["trajectories", "convert", str(source), "--to", "hermes", "--out", str(out)]) == 0
    assert capsys.readouterr().err == ""
    assert main(["trajectories", "dedup", str(source), "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"messages": PLAIN}


def test_calls_and_results_that_are_content_parts_are_calls_and_results() -> None:
    asks = [{"type": "text", "text": "let me"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]
    answers = [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]}]
    entry = {"messages": [ASKED, {"role": "assistant", "content": asks}, {"role": "user", "content": answers}, DONE]}
    messages = read_chat(entry).messages
    assert arguments_of(entry) == [{"a": 1}]
    assert [(message["role"], message["content"]) for message in messages[1:3]] == [
        ("assistant", "let me"),
        ("tool", "r"),
    ]


@pytest.mark.parametrize(
    "said",
    [
        {"content": [{"type": "reasoning_text", "text": "six"}, {"type": "text", "text": "42"}]},
        {"content": "42", "reasoning": {"content": "six"}},
        {"content": "42", "reasoning_text": "six"},
    ],
)
def test_reasoning_of_other_writers_is_reasoning(said: dict[str, Any]) -> None:
    message = read_chat({"messages": [ASKED, {"role": "assistant", **said}]}).messages[-1]
    assert (message["reasoning"], message["content"]) == ("six", "42")


def test_a_refusal_is_what_was_said() -> None:
    said = {"role": "assistant", "content": None, "refusal": "I cannot"}
    assert read_chat({"messages": [ASKED, said]}).messages[-1]["content"] == "I cannot"
