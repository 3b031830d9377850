"""Calls of keys and values with delimited strings: gemma4, functiongemma."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_testing.parser_checks import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    attempts_of,
    facts,
    parsed,
    pieces_of,
    streamed,
    tool,
    typed,
)
from tests.run import some
from tool_call_parsers import CallStatus, Finish, ParsedCompletion, get_parser
from tool_call_parsers.types import ArgumentsDelta, CallStart

TOOLS = [
    tool("note", title=STRING, body=STRING, count=INTEGER, on=BOOLEAN, scale=NUMBER, tags={"type": "array"}),
    tool("label", text={"anyOf": [STRING, {"type": "null"}]}, size={"type": ["object", "null"]}),
    tool("ping"),
]
MARKS = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}
every_format = pytest.mark.parametrize("name", MARKS)


def wire(name: str, text: str) -> str:
    """The text with `<(`, `)>` and `~` as the format's markers and delimiter."""
    opener, closer, delimiter = MARKS[name]
    return text.replace("<(", opener).replace(")>", closer).replace("~", delimiter)


def parse(name: str, text: str, **options: Any) -> ParsedCompletion:
    """The result for a text in short notation, also streamed by characters."""
    parser, text = get_parser(name), wire(name, text)
    return parsed(parser, text, TOOLS, **options)


@every_format
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        ("title:~x~", {"title": "x"}),
        ("title:~~,body:~ a\n~", {"title": "", "body": " a\n"}),
        ("title:~007~,count:7,on:true,scale:-1.5e-7", {"title": "007", "count": 7, "on": True, "scale": -1.5e-7}),
        ("title:None,on:false,count:9007199254740993", {"title": None, "on": False, "count": 9007199254740993}),
        ("title:null,tags:[~a]~,[1,{k:~}~,l:[]}],{}]", {"title": None, "tags": ["a]", [1, {"k": "}", "l": []}], {}]}),
        (" title : ~x~ ,\n count : 3 ", {"title": "x", "count": 3}),
        ("title:~x~,from:~y~,a-b:1,two words:2,~k:~:3", {"title": "x", "from": "y", "a-b": 1, "two words": 2, "k:": 3}),
        (r"body:~\n \" 'q' {[(~", {"body": r"\n \" 'q' {[("}),
        ("body:~a)>b<(call:ping{})>c~", None),
        ("body:~say ~hi~ now~", None),
        ("body:~<~", {"body": "<"}),
    ],
)
def test_text_of_the_format_is_well_formed(name: str, body: str, arguments: dict[str, Any] | None):
    if arguments is None:
        arguments = {"body": wire(name, body.removeprefix("body:~").removesuffix("~"))}
    found = parse(name, f"<(call:note{{{body}}})>", strict=True)
    assert [(call.status, call.name, typed(call.arguments)) for call in found.attempts] == [
        (CallStatus.OK, "note", typed(arguments))
    ]
    assert found.attempts[0].arguments_raw == wire(name, body)
    assert found.content is None


@every_format
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("call:note(title=~x~,count=3)", {"title": "x", "count": 3}),
        (":note{title:~x~}", {"title": "x"}),
        ("note{title:~x~}", {"title": "x"}),
        ("call:note{title=~x~}", {"title": "x"}),
        ("call:note{title:\"x\",body:'it\\'s'}", {"title": "x", "body": "it's"}),
        ("call:note{tags:[\"a\",'b']}", {"tags": ["a", "b"]}),
        ('call:note{"title":"x"}', {"title": "x"}),
        ("call:note{title:Oslo}", {"title": "Oslo"}),
        ("call:note{title:02134,count:3}", {"title": "02134", "count": 3}),
        ("call:note{title:~x~,}", {"title": "x"}),
        ("call:note{title:~x~}}", {"title": "x"}),
        ("call:note{title:~x~", {"title": "x"}),
        ("call:note", {}),
        ("call:note{title:None,on:False}", {"title": None, "on": False}),
        ("call:note{~title~:~x~}", {"title": "x"}),
        ("call:note{title:~x~ count:3}", {"title": "x", "count": 3}),
        ("call:note{count:3 title:~x~}", {"title": "x", "count": 3}),
        ("call:note{tags:[~x~]count:3}", {"tags": ["x"], "count": 3}),
        ("call:note{title:~x~,title:~y~}", {"title": "y"}),
        ("call:note{title:~~x~,body:~y~~}", {"title": "x", "body": "y"}),
        ("call:shop:mcp:notes:note{title:~x~}", {"title": "x"}),
        ("call:note{scale:1e999}", {"scale": "1e999"}),
    ],
)
def test_slips_are_repaired(name: str, call: str, arguments: dict[str, Any]):
    found = parse(name, f"A<({call})>B")
    assert attempts_of(found) == [("repaired", "note", arguments)]
    assert found.content == "AB"
    strict = parse(name, f"A<({call})>B", strict=True)
    assert (strict.tool_calls, strict.content) == ((), wire(name, f"A<({call})>B"))


@every_format
@pytest.mark.parametrize("call", ["call:{}", "call: { }", "call:"])
def test_a_call_without_a_name_is_reported(name: str, call: str):
    found = parse(name, f"<({call})><(call:ping{{}})>")
    assert attempts_of(found) == [("missing_name", "", {}), ("ok", "ping", {})]


@every_format
@pytest.mark.parametrize(
    "body",
    ["count:three", "on:", "count:1 2", "title:~x~]", "count", "tags:[1", "tags:[1)", "a:{b"],
)
def test_unreadable_text_is_content_and_the_next_call_stays(name: str, body: str):
    ends = {"title:~x~]": ")"}
    broken = f"<(call:note{{{body}{ends.get(body, '}')})>"
    found = parse(name, f"{broken}!<(call:ping{{}})>")
    assert attempts_of(found) == [("invalid_json", "note", {}), ("ok", "ping", {})]
    assert found.content == wire(name, broken + "!")


@every_format
def test_nesting_is_bounded(name: str):
    deep = parse(name, f"<(call:note{{tags:{'[' * 199}{']' * 199}}})>")
    assert [call.status for call in deep.attempts] == [CallStatus.OK]
    for bracket in ("[", "{a:"):
        found = parse(name, f"<(call:note{{tags:{bracket * 5000})><(call:ping{{}})>")
        assert attempts_of(found) == [("invalid_json", "note", {}), ("ok", "ping", {})]


@every_format
@pytest.mark.parametrize("text", ["The model writes <( and then.", "as in <(call:f{...} here", "<(call f", "<(call:{"])
def test_markers_in_prose_are_prose(name: str, text: str):
    found = parse(name, text)
    assert (found.content, found.attempts, found.finish) == (wire(name, text), (), Finish.STOP)


@every_format
def test_the_end_marker_may_be_missing(name: str):
    found = parse(name, "Hi.<(call:ping{}<(call:note{title:~x~}<|im_end|>")
    assert attempts_of(found) == [("repaired", "ping", {}), ("repaired", "note", {"title": "x"})]
    assert found.content == "Hi."


@every_format
def test_every_cut_before_the_brace_leaves_no_call(name: str):
    text = wire(name, "<(call:note{title:~a ~b~ c~,count:31,tags:[~x~,{k:true}]}")
    parser = get_parser(name)
    for cut in range(len(MARKS[name][0]), len(text)):
        found = parser.parse(text[:cut], TOOLS)
        assert (found.tool_calls, found.content, found.finish) == ((), text[:cut], Finish.INCOMPLETE)
        assert [call.status for call in found.attempts] == [CallStatus.INCOMPLETE]
    assert len(parser.parse(text, TOOLS).tool_calls) == 1


@every_format
def test_strings_are_streamed_as_they_arrive(name: str):
    stream = get_parser(name).stream(TOOLS)
    events = stream.feed(wire(name, '<(call:note{count:3,body:~one "two'))
    assert [event.name for event in events if isinstance(event, CallStart)] == ["note"]
    fragments = "".join(event.fragment for event in events if isinstance(event, ArgumentsDelta))
    assert fragments == '{"count": 3, "body": "one \\"two'


@every_format
@pytest.mark.parametrize(("argument", "taken"), [("text:a b", True), ("text:null", True), ("size:big", False)])
def test_a_word_is_a_string_where_the_schema_allows_one(name: str, argument: str, taken: bool):
    value = argument.partition(":")[2]
    found = parse(name, f"<(call:label{{{argument}}})>")
    assert [call.arguments for call in found.tool_calls] == ([{"text": None if value == "null" else value}] * taken)


@every_format
def test_a_word_of_an_unknown_tool_is_a_string(name: str):
    assert attempts_of(parse(name, "<(call:other{x:word})>")) == [("unknown_tool", "other", {"x": "word"})]


@every_format
@pytest.mark.parametrize(
    "flood", ["~", "~,", "a:", "a:[", "{", "a:1,", "a:x,", "a:'", 'a:"it"s,', " ", "<(", "<(call:f{", "}"]
)
def test_floods_neither_raise_nor_differ_in_pieces(name: str, flood: str):
    for text in (wire(name, flood * 500), wire(name, f"<(call:note{{{flood * 500}}})>")):
        found = get_parser(name).parse(text, TOOLS)
        again, _ = streamed(get_parser(name), pieces_of(text, range(0, len(text), 7)), TOOLS)
        assert facts(again) == facts(found)


texts = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.sampled_from(
        ["}", "]", ",", ":", "<|tool_call>call:ping{}<tool_call|>", "<end_function_call>", '"', "\\", "\n"]
    ),
    max_size=4,
).map("".join)
texts = texts.filter(lambda text: not any(mark in text for _, _, mark in MARKS.values()))  # at an end it is taken away
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@every_format
@settings(max_examples=some(150), deadline=None)
@given(arguments=st.dictionaries(texts, values, max_size=4))
def test_a_written_turn_is_read_back(name: str, arguments: dict[str, Any]):
    parser = get_parser(name)
    text = parser.render(tool_calls=[{"name": "f", "arguments": arguments}])
    found = parser.parse(text, strict=True)
    assert [typed(call.arguments) for call in found.tool_calls] == [typed(arguments)]
    assert parser.render(tool_calls=found.tool_calls) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|channel>thought\nhm\n<channel|><(call:f{A:1,k:~v~,o:{x:[1,true,null,~s~]}})><(call:g{})>Hi"),
        ("functiongemma", "Hi<(call:f{A:1,k:~v~,o:{x:[1,true,null,~s~]}})><(call:g{})>"),
    ],
)
def test_a_turn_is_written_as_the_template_writes_it(name: str, text: str):
    calls = [
        {"name": "f", "arguments": {"k": "v", "o": {"x": [1, True, None, "s"]}, "A": 1}},
        {"name": "g", "arguments": {}},
    ]
    reasoning = "hm" if name == "gemma4" else None
    parser = get_parser(name, reasoning="auto")
    assert parser.render("Hi", reasoning, calls) == wire(name, text)
    found = parser.parse(wire(name, text), strict=True)
    assert (found.content, found.reasoning, len(found.tool_calls)) == ("Hi", reasoning, 2)
