"""Calls as Python writes them: pythonic, llama4_pythonic, olmo3, lfm2."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis_testing.parser_checks import (
    INTEGER,
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
from tool_call_parsers.types import CallStart

TOOLS = [
    tool("bash", command=STRING, timeout=INTEGER),
    tool("search", query=STRING, tags={"type": "array"}, filters={"type": "object"}),
    tool("list_all"),
]
FRAMES = {
    "pythonic": ("[", ", ", "]"),
    "llama4_pythonic": ("<|python_start|>[", ", ", "]<|python_end|>"),
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "\n", "</function_calls>"),
}
TAGGED = [name for name in FRAMES if name != "pythonic"]
every_format = pytest.mark.parametrize("name", FRAMES)
every_tagged_format = pytest.mark.parametrize("name", TAGGED)


def block(name: str, *calls: str) -> str:
    start, between, end = FRAMES[name]
    return start + between.join(calls) + end


def parse(name: str, text: str, **options: Any) -> ParsedCompletion:
    """The result for a text, also streamed by characters."""
    parser = get_parser(name)
    return parsed(parser, text, TOOLS, **options)


# -- literals ----------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'a\\'b\\\\'", "a'b\\"),
        ('"]) <|python_end|>"', "]) <|python_end|>"),
        ("'''two\nlines'''", "two\nlines"),
        ("'raw\nnewline'", "raw\nnewline"),
        ("'a' 'b'", "ab"),
        ("-74.5", -74.5),
        ("true", True),
        ("None", None),
        ("('a', [1, {'k': null}])", ["a", [1, {"k": None}]]),
        ('{"a": [1, true, null]}', {"a": [1, True, None]}),
    ],
)
def test_literals_of_both_styles_are_well_formed(name: str, literal: str, value: Any):
    found = parse(name, block(name, f"search(query={literal}, from=1)"), strict=True)
    assert [(call.status, typed(call.arguments)) for call in found.tool_calls] == [
        (CallStatus.OK, typed({"query": value, "from": 1}))
    ]
    assert found.tool_calls[0].arguments_raw == f"query={literal}, from=1"


@every_format
@pytest.mark.parametrize("value", ["'a' + 'b'", "2**31", "cmd", "f'x'", "os.getcwd()", "'x'.upper()", "[x for x in y]"])
def test_nothing_is_evaluated_and_the_next_call_stays(name: str, value: str):
    found = parse(name, block(name, f"bash(command={value})", "list_all()"))
    assert attempts_of(found) == [("invalid_json", "bash", {}), ("ok", "list_all", {})]
    assert f"bash(command={value})" in (found.content or "")


# -- repairs: vllm#48171, vllm#32539, vllm#30722 -----------------------------------------------------------------------


@every_format
@pytest.mark.parametrize(
    "command", ["sed -n '1,9p' f.py", "it's", "print('a', 'b')", "say 'hi'", "echo f('x') done", "d['k'] = 1"]
)
def test_unescaped_quotes_stay_in_the_string(name: str, command: str):
    text = block(name, f"bash(command='{command}')", "list_all()") if name in TAGGED else f"[bash(command='{command}')]"
    found = parse(name, text)
    assert attempts_of(found)[0] == ("repaired", "bash", {"command": command})
    assert [call.name for call in found.tool_calls[1:]] == ["list_all"] * (name in TAGGED)
    assert all(call.name != "bash" for call in parse(name, text, strict=True).tool_calls)


@every_format
def test_positional_arguments_take_the_order_of_the_schema(name: str):
    found = parse(
        name, block(name, "bash('ls', 3)", "list_all(1)", "bash('ls', command='x')", "bash({'command': 'ls'})")
    )
    assert attempts_of(found) == [
        ("repaired", "bash", {"command": "ls", "timeout": 3}),
        ("invalid_json", "list_all", {}),
        ("invalid_json", "bash", {}),
        ("repaired", "bash", {"command": "ls"}),
    ]


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic", "lfm2"])
def test_missing_brackets_and_commas_are_repaired(name: str):
    start, _, end = FRAMES[name]
    assert attempts_of(parse(name, f"{start}list_all(), bash(command='x'){end.removeprefix(']')}")) == [
        ("ok", "list_all", {}),
        ("repaired", "bash", {"command": "x"}),
    ]
    assert attempts_of(parse(name, f"{start}list_all() bash(command='x'){end}")) == [
        ("repaired", "list_all", {}),
        ("ok", "bash", {"command": "x"}),
    ]
    assert attempts_of(parse(name, f"{start}list_all(),{end}")) == [("ok", "list_all", {})]


def test_the_opening_bracket_may_be_missing():
    found = parse("lfm2", "<|tool_call_start|>list_all()<|tool_call_end|>")
    assert attempts_of(found) == [("repaired", "list_all", {})]


# -- blocks ------------------------------------------------------------------------------------------------------------


@every_tagged_format
def test_text_that_is_not_a_call_does_not_affect_the_others(name: str):
    found = parse(name, "A" + block(name, "list_all", "bash(command='x')", "this is prose", "list_all()") + "B")
    assert [status for status, _, _ in attempts_of(found)] == ["malformed", "ok", "malformed", "ok"]
    assert [call.name for call in found.tool_calls] == ["bash", "list_all"]
    assert (found.content or "").startswith("A" + FRAMES[name][0] + "list_all")
    assert (found.content or "").endswith("this is proseB")


@every_tagged_format
def test_a_block_that_is_not_closed_ends_where_another_begins(name: str):
    broken = block(name, "bash(command='x'")
    found = parse(name, broken + "then " + block(name, "list_all()"))
    assert attempts_of(found) == [("invalid_json", "bash", {}), ("ok", "list_all", {})]
    assert found.content == broken + "then "


@every_tagged_format
def test_markers_in_prose_are_prose(name: str):
    start = FRAMES[name][0].removesuffix("[")
    text = f"The model writes {start} and then the call."
    found = parse(name, text)
    assert (found.content, found.attempts, found.finish) == (text, (), Finish.STOP)


@every_tagged_format
def test_the_end_marker_may_be_missing(name: str):
    text = block(name, "list_all()").removesuffix(FRAMES[name][2].removeprefix("]"))
    assert attempts_of(parse(name, text + "<|im_end|>")) == [("repaired", "list_all", {})]


def test_an_echo_before_a_second_end_marker_is_no_second_call():
    text = block("lfm2", "bash(command='x')")
    found = parse("lfm2", text + text.removeprefix("<|tool_call_start|>") * 2 + "Done.")
    assert attempts_of(found) == [("repaired", "bash", {"command": "x"})]
    assert found.content == "Done."
    assert len(parse("lfm2", text + text).tool_calls) == 2
    assert parse("lfm2", text + "[list_all()]").content == "[list_all()]"


@pytest.mark.parametrize(("name", "status"), [("llama4_pythonic", "repaired"), ("lfm2", "ok")])
def test_a_list_of_json_objects_is_read_as_such(name: str, status: str):
    text = block(name, '{"name": "bash", "arguments": {"command": "]"}}', '{"name": "list_all", "parameters": {}}')
    found = parse(name, text)
    assert attempts_of(found) == [(status, "bash", {"command": "]"}), ("repaired", "list_all", {})]


# -- lists without markers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic"])
@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("  [list_all()]\n", 1, None),
        ("[teleport(to='x')]", 1, None),
        ("[list_all()]\nDone.", 1, "\nDone."),
        ("I look.\n[list_all()]<|eot_id|>", 1, "I look."),
        ("So [1, 2] and f(x=1) are data.", 0, "So [1, 2] and f(x=1) are data."),
        ("[list_all()] is how.", 0, "[list_all()] is how."),
        ("[list_all()](http://a.b)", 0, "[list_all()](http://a.b)"),
        ("Write [list_all()]", 0, "Write [list_all()]"),
        ("Write\n[list_all()]\nthere.", 0, "Write\n[list_all()]\nthere."),
        ("Write\n[teleport()]", 0, "Write\n[teleport()]"),
        ("Write\n[bash(command=x)]", 0, "Write\n[bash(command=x)]"),
        ("[f(x) for x in y]", 0, "[f(x) for x in y]"),
        ("[list_all(), 5]", 0, "[list_all(), 5]"),
    ],
)
def test_a_bare_list_fills_its_lines(name: str, text: str, calls: int, content: str | None):
    found = parse(name, text)
    assert (len(found.tool_calls), found.content) == (calls, content)
    assert len(found.attempts) == calls


def test_a_failed_bare_list_is_an_attempt_and_content():
    found = parse("pythonic", "[bash(command='a' + 'b')]")
    assert attempts_of(found) == [("invalid_json", "bash", {})]
    assert found.content == "[bash(command='a' + 'b')]"


# -- cuts --------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("rest", ["bash(command='rm -rf /tmp/", "bash(command='rm'", "bash(command=", "bash("])
def test_a_cut_call_is_incomplete_and_those_before_it_are_calls(name: str, rest: str):
    start, between, _ = FRAMES[name]
    found = parse(name, f"{start}list_all(){between}{rest}")
    assert attempts_of(found) == [("ok", "list_all", {}), ("incomplete", "bash", {})]
    assert (found.content, found.finish) == (rest, Finish.INCOMPLETE)


@every_format
def test_a_text_cut_between_two_calls_is_incomplete(name: str):
    start, between, _ = FRAMES[name]
    if between != "\n":
        assert parse(name, f"{start}list_all(){between}").finish is Finish.INCOMPLETE


values = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["'", '"', "\\", "\n", "\r", ")", "]", "bash(command='x')", "'''", "\\'", ", "])
    | st.sampled_from([block(name, "list_all()", "bash(command='x')") for name in FRAMES]),
    max_size=4,
).map("".join)


@every_format
@settings(max_examples=some(30), deadline=None)
@given(data=st.data())
def test_no_cut_makes_a_call_of_a_string(name: str, data: st.DataObject):
    arguments = [{"command": data.draw(values)}, {"query": data.draw(values), "tags": [data.draw(values)]}]
    calls = [{"name": "bash", "arguments": arguments[0]}, {"name": "search", "arguments": arguments[1]}]
    parser = get_parser(name)
    text = parser.render(tool_calls=calls, tools=TOOLS)
    assert [call.arguments for call in parser.parse(text, TOOLS, strict=True).tool_calls] == arguments
    for cut in range(len(text)):
        found = parser.parse(text[:cut], TOOLS)
        made = [call.arguments for call in found.tool_calls]
        assert made == arguments[: len(made)], text[:cut]


# -- streams and size --------------------------------------------------------------------------------------------------


@every_tagged_format
def test_a_call_is_announced_when_its_name_is_whole(name: str):
    parser = get_parser(name)
    text = block(name, "bash(command='" + "x" * 50 + "')")
    stream = parser.stream(TOOLS)
    events = stream.feed(text[: text.index("x")])
    assert [event.name for event in events if isinstance(event, CallStart)] == ["bash"]


@every_format
@pytest.mark.parametrize(
    "flood",
    ["[", "(", "'", '"', "'a'b ", "[f(", "\n[f('", "f(x), ", "f('x'y, ", "'a' + ", "list_all() x\n", "\\", "<", " '"],
)
def test_floods_neither_raise_nor_lose_text(name: str, flood: str):
    for text in (FRAMES[name][0] + flood * 500, FRAMES[name][0] + "bash(" + flood * 500 + FRAMES[name][2]):
        found = get_parser(name).parse(text, TOOLS)
        again, _ = streamed(get_parser(name), pieces_of(text, range(0, len(text), 7)), TOOLS)
        assert facts(again) == facts(found)


# -- writing -----------------------------------------------------------------------------------------------------------

TURN = [
    {"name": "f", "arguments": {"k": "it's\n", "n": -3, "b": True, "o": {"x": [1, True, None, "s"]}}},
    {"name": "g", "arguments": {}},
]
PYTHON = r"f(k='it\'s\n', n=-3, b=True, o={'x': [1, True, None, 's']})"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("pythonic", PYTHON),
        ("llama4_pythonic", PYTHON),
        ("lfm2", r"""f(k='it\'s\n', n=-3, b=True, o={"x": [1, true, null, "s"]})"""),
        ("olmo3", r"""f(k="it's\n", n=-3, b=true, o={"x": [1, true, null, "s"]})"""),
    ],
)
def test_a_turn_is_written_as_the_models_write_it(name: str, call: str):
    assert get_parser(name).render(tool_calls=TURN) == block(name, call, "g()")


@every_tagged_format
@pytest.mark.parametrize("length", [256, 257, 300])
def test_a_name_without_end_reads_the_same_in_pieces(name: str, length: int):
    start, between, _ = FRAMES[name]
    assert parse(name, start + "a" * length).tool_calls == ()
    assert [call.name for call in parse(name, start + "list_all()" + between + "a" * length).tool_calls] == ["list_all"]


def test_a_failed_block_that_is_repeated_is_not_lost():
    text = "[bash(command=1+)]<|tool_call_end|>"
    assert parse("lfm2", f"<|tool_call_start|>{text}{text}").content == f"<|tool_call_start|>{text}{text}"
