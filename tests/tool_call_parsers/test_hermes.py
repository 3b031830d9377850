"""The hermes and bare_json parsers: what becomes a call, what does not, and that nothing is lost or raised."""

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tool_call_parsers import CallStatus, UnknownParser, get_parser, list_parsers, register_parser

TOOLS = [
    {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object"}}},
]
hermes = get_parser("hermes")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(), json_values, max_size=4)
markup = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "python"',
        '"arguments": {',
        "}",
        "```json",
        '"',
        "\n",
    ]
)


def block(name: str, args: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': args}, ensure_ascii=False)}\n</tool_call>"


def statuses(text: str) -> list[str]:
    return [call.status.value for call in hermes.parse(text, TOOLS).attempts]


@given(st.lists(st.tuples(st.sampled_from(["python", "write_file"]), arguments), min_size=1, max_size=4))
@example([("write_file", {"content": "a </tool_call> b <tool_call> c </think> d <think>"}), ("python", {})])
def test_every_well_formed_call_comes_back_exactly(calls):
    parsed = hermes.parse("Let me see.\n" + "\n".join(block(*call) for call in calls), TOOLS)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert [json.loads(call.arguments_json) for call in parsed.tool_calls] == [args for _, args in calls]
    assert parsed.content == "Let me see."
    assert len({call.id for call in parsed.tool_calls}) == len(calls)


@given(st.lists(st.text() | markup, max_size=12).map("".join), st.sampled_from(list_parsers()))
def test_no_text_makes_a_parser_raise_and_no_text_is_lost(text, name):
    parsed = get_parser(name).parse(text, TOOLS)
    kept = (parsed.content or "") + (parsed.reasoning or "") + "".join(call.raw for call in parsed.tool_calls)
    lost = {char for char in text if not char.isspace()} - set(kept) - set("<think>/")
    assert not lost
    assert [call for call in parsed.attempts if call in parsed.tool_calls] == list(parsed.tool_calls)


@settings(max_examples=25)
@given(arguments)
@example({"</think>": "<think>"})
def test_a_cut_call_is_an_attempt_and_never_a_call(args):
    text = block("python", {**args, "code": "x"})
    body_end = text.rindex("}")
    for cut in range(text.index("{") + 1, body_end):
        parsed = hermes.parse(text[:cut], TOOLS)
        assert parsed.tool_calls == ()
        assert [call.status for call in parsed.attempts] == [CallStatus.INCOMPLETE]


def test_an_unclosed_last_block_with_complete_json_is_a_call():
    parsed = hermes.parse('<tool_call>\n{"name": "python", "arguments": {"code": "1"}}', TOOLS)
    assert [call.status for call in parsed.tool_calls] == [CallStatus.OK]


@pytest.mark.parametrize(
    "bad",
    [
        '<tool_call>\n{"name": "python", "arguments": {"code": 1 + 1}}\n</tool_call>',
        '<tool_call>\n{"name": "python", "arguments": {"code": "say "hi""}}\n</tool_call>',
        '<tool_call>\n{"name": "python", "arguments": {"code": "no end}}\n</tool_call>',
        '<tool_call>\n{"name": "python", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "python", "arguments": {"x": NaN}}\n</tool_call>',
        "<tool_call>\n[1]\n</tool_call>",
    ],
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_bad_sibling_never_removes_a_good_call(bad, order):
    good = block("write_file", {"path": "a"})
    parsed = hermes.parse(bad + "\n" + good if order == "before" else good + "\n" + bad, TOOLS)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("write_file", {"path": "a"})]
    assert len(parsed.attempts) == 2
    assert bad in (parsed.content or ""), "the text of the failed attempt stays in the content"


@pytest.mark.parametrize(
    ("body", "args"),
    [
        ('{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}', {"code": "1"}),
        ('{"name": "python", "parameters": {"code": "1"}}', {"code": "1"}),
        ('{"name": "python", "arguments": null}', {}),
        ('{"name": "python"}', {}),
        ('{"name": "python", "arguments": {"code": "a\nb"}}', {"code": "a\nb"}),
        ('{"name": "python", "arguments": {"code": "1"}', {"code": "1"}),
        ('{"type": "function", "function": {"name": "python", "arguments": {"code": "1"}}}', {"code": "1"}),
    ],
)
def test_plain_meaning_in_bad_form_is_repaired_and_says_so(body, args):
    (call,) = hermes.parse(f"<tool_call>\n{body}\n</tool_call>", TOOLS).tool_calls
    assert (call.status, call.arguments, json.loads(call.arguments_json)) == (CallStatus.REPAIRED, args, args)
    assert call.error


def test_arguments_stay_the_text_that_the_model_wrote():
    (call,) = hermes.parse('<tool_call>{"name":"python", "arguments":{ "x":1e5,"n" : 1.0 }}</tool_call>').tool_calls
    assert call.arguments_json == call.arguments_raw == '{ "x":1e5,"n" : 1.0 }'


def test_calls_drafted_in_closed_reasoning_are_not_calls():
    draft, real = block("python", {"code": "draft"}), block("python", {"code": "real"})
    for text in (f"<think>maybe {draft}</think>\n{real}", f"maybe {draft}</think>\n{real}"):
        parsed = hermes.parse(text, TOOLS)
        assert [call.arguments["code"] for call in parsed.tool_calls] == ["real"]
        assert "draft" in (parsed.reasoning or "") and parsed.content is None


def test_reasoning_without_an_end_yields_to_a_call():
    parsed = hermes.parse("<think>I will run it.\n" + block("python", {"code": "1"}), TOOLS)
    assert (parsed.reasoning, parsed.content, len(parsed.tool_calls)) == ("I will run it.", None, 1)


def test_text_around_calls_is_content_and_untouched_text_is_verbatim():
    assert hermes.parse("a\n" + block("python", {}) + "\nb", TOOLS).content == "a\n\nb"
    prose = "  The model writes <tool_call> and then the call.\n"
    assert hermes.parse(prose, TOOLS).content == prose
    assert statuses(prose) == []


def test_an_unknown_tool_is_a_call_with_a_flag():
    (call,) = hermes.parse(block("pyhton", {}), TOOLS).tool_calls
    assert call.status is CallStatus.UNKNOWN_TOOL
    assert hermes.parse(block("pyhton", {})).tool_calls[0].status is CallStatus.OK, "nothing to compare with"


def test_several_calls_in_one_block():
    one, two = '{"name": "python", "arguments": {}}', '{"name": "write_file", "arguments": {}}'
    for body in (f"[{one}, {two}]", f"{one}\n{two}", f"```json\n[{one},{two}]\n```", f"{one}\n{two}}}"):
        parsed = hermes.parse(f"<tool_call>\n{body}\n</tool_call>", TOOLS)
        assert [call.name for call in parsed.tool_calls] == ["python", "write_file"], body
        assert parsed.content is None


@pytest.mark.parametrize("name", ["hermes", "bare_json"])
def test_a_bare_json_answer_is_a_call_only_to_an_offered_tool(name):
    parser, call = get_parser(name), '{"name": "python", "arguments": {"code": "1"}}'
    for text in (call, f"```json\n{call}\n```", f"[{call}]", call.replace("arguments", "parameters")):
        assert [c.arguments for c in parser.parse(text, TOOLS).tool_calls] == [{"code": "1"}], text
        assert parser.parse(text).tool_calls == ()
    for text in ('{"name": "Bingo", "arguments": {}}', f"Here: {call}", '{"name": "python", "age": 3}', "[]", "{}"):
        parsed = parser.parse(text, TOOLS)
        assert (parsed.tool_calls, parsed.content) == ((), text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 50_000,
        '<tool_call>{"name": "python", "arguments": {"a": x' * 4_000,
        '<tool_call>{"a":"' * 10_000,
        '<tool_call>{"a": x</tool_call>' * 10_000,
        "<tool_call>" + "[" * 200_000,
        '<tool_call>{"a":' * 10_000,
        "<think>" * 50_000,
        "</think>" * 50_000,
        '{"name": "python", "arguments": ' + '{"a":' * 100_000,
    ],
    ids=range(9),
)
def test_hostile_text_takes_linear_time(text):
    started = time.process_time()
    assert hermes.parse(text, TOOLS).tool_calls == ()
    assert time.process_time() - started < 3


def test_the_registry_names_what_it_has():
    with pytest.raises(UnknownParser, match=r"'nope' is unknown; there are: .*hermes"):
        get_parser("nope")
    with pytest.raises(ValueError, match="already registered by HermesParser"):
        register_parser("hermes")(type(get_parser("bare_json")))
