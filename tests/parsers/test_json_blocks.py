"""Calls as JSON between markers: calls, repairs, and text that stays text."""

import json

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lachesis_testing.parser_checks import event_problems, facts, shape_problems, streamed
from tests.run import some
from tool_call_parsers import ArgumentsDelta, CallStart, CallStatus, Finish, ReasoningDelta, get_parser
from tool_call_parsers.engine import Needles
from tool_call_parsers.json_blocks import JsonBlocks
from tool_call_parsers.json_blocks.named import NamedJson
from tool_call_parsers.json_scan import JsonScan
from tool_call_parsers.parser import Format, ToolCallParser

TOOLS = [
    {"type": "function", "function": {"name": "python", "parameters": {"properties": {"code": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "write_file", "parameters": {}}},
]

hermes = get_parser("hermes", reasoning="auto")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(), json_values, max_size=4)


def block(name, args):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': args}, ensure_ascii=False)}\n</tool_call>"


def statuses(text, parser=hermes, **options):
    return [attempt.status for attempt in parser.parse(text, TOOLS, **options).attempts]


@settings(max_examples=some(40))
@given(arguments)
@example({"</think>": "<think>"})
def test_a_cut_call_is_an_attempt_and_never_a_call(args):
    text = block("python", {**args, "code": "x"})
    assume(text.count("<tool_call>") == 1)  # in a string that is cut off, another opener begins another call
    for cut in range(text.index("{") + 1, text.rindex("}") - 1):
        parsed = hermes.parse(text[:cut], TOOLS)
        assert parsed.tool_calls == ()
        assert [call.status for call in parsed.attempts] == [CallStatus.INCOMPLETE]
        assert parsed.finish is Finish.INCOMPLETE
        assert parsed.content == text[:cut], "a failed attempt stays in the content"


def test_complete_arguments_without_the_last_brace_are_a_call():
    parsed = hermes.parse('<tool_call>\n{"name": "python", "arguments": {"code": "1"}', TOOLS)
    assert [(call.status, call.arguments) for call in parsed.tool_calls] == [(CallStatus.REPAIRED, {"code": "1"})]
    parsed = hermes.parse('<tool_call>\n{"name": "python", "arguments": {"code": "1"}}', TOOLS)
    assert [(call.status, call.error) for call in parsed.tool_calls] == [(CallStatus.REPAIRED, "no closing marker")]


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ('{"name": "python", "arguments": {"code": 1 + 1}}', CallStatus.INVALID_JSON),
        ('{"name": "python", "arguments": {"code": "no end}}', CallStatus.INVALID_JSON),
        ('{"name": "python", "arguments": [1]}', CallStatus.NOT_AN_OBJECT),
        ('{"name": "python", "arguments": "[1]"}', CallStatus.NOT_AN_OBJECT),
        ('{"name": "", "arguments": {}}', CallStatus.MISSING_NAME),
        ('{"arguments": {}}', CallStatus.MISSING_NAME),
        ("[1]", CallStatus.MALFORMED),
        ("nothing", CallStatus.MALFORMED),
    ],
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_bad_sibling_never_removes_a_good_call(bad, status, order):
    bad, good = f"<tool_call>\n{bad}\n</tool_call>", block("write_file", {"path": "a"})
    parsed = hermes.parse(bad + "\n" + good if order == "before" else good + "\n" + bad, TOOLS)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("write_file", {"path": "a"})]
    assert sorted(attempt.status for attempt in parsed.attempts) == sorted([CallStatus.OK, status])
    assert bad in (parsed.content or ""), "the text of the failed attempt stays in the content"


def test_a_bad_sibling_in_a_list_never_removes_a_good_call():
    text = '[{"name": "python", "arguments": {"code": Oslo}}, {"name": "write_file", "arguments": {}}]'
    parsed = get_parser("jamba").parse(f"<tool_calls>{text}</tool_calls>", TOOLS)
    assert [call.name for call in parsed.tool_calls] == ["write_file"]
    assert [attempt.status for attempt in parsed.attempts] == [CallStatus.INVALID_JSON, CallStatus.OK]


@pytest.mark.parametrize(
    ("body", "args"),
    [
        ('{"name": "python", "parameters": {"code": "1"}}', {"code": "1"}),
        ('{"tool": "python", "args": {"code": "1"}}', {"code": "1"}),
        ('{"name": "python", "code": "1"}', {"code": "1"}),
        ('{"name": "python", "arguments": {"code": "a\nb"}}', {"code": "a\nb"}),
        ('{"name": "python", "arguments": {"code": "1"}', {"code": "1"}),
        ('{"name": "python", "arguments": {"code": "1"}}}', {"code": "1"}),
        ('{"name": "python", "arguments": {"code": "1",}}', {"code": "1"}),
        ("{'name': 'python', 'arguments': {'code': True}}", {"code": True}),
        ('{"name": "python", "arguments": {"code": NaN}}', {"code": "NaN"}),
        ('{"name": "python", "arguments": {"code": 1e999}}', {"code": "1e999"}),
        ('{"name": "python", "arguments": {"code": "\\ud83c"}}', {"code": "\ufffd"}),
        ('{"name": "python", "arguments": "{\'code\': 1}"}', {"code": 1}),
        ('{"type": "function", "function": {"name": "python", "arguments": {"code": "1"}}}', {"code": "1"}),
        ('{"name": "python", "name": "write_file", "arguments": {"code": "1"}, "arguments": {}}', {"code": "1"}),
    ],
)
def test_clear_meaning_in_bad_form_is_repaired_with_a_note(body, args):
    text = f"<tool_call>\n{body}\n</tool_call>"
    (call,) = hermes.parse(text, TOOLS).tool_calls
    assert (call.name, call.status, call.arguments) == ("python", CallStatus.REPAIRED, args)
    assert json.loads(call.arguments_json) == args
    assert call.error
    strict = hermes.parse(text, TOOLS, strict=True)
    assert strict.tool_calls == ()
    assert strict.content == text


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "python", "arguments": null}',
        '{"name": "python"}',
        '{"name": "python", "arguments": ""}',
        '{"name": "python", "arguments": "{}"}',
    ],
)
def test_no_arguments_are_an_empty_object(body):
    (call,) = hermes.parse(f"<tool_call>\n{body}\n</tool_call>", TOOLS).tool_calls
    assert (call.status, call.arguments, call.arguments_json) == (CallStatus.REPAIRED, {}, "{}")


def test_arguments_stay_the_text_that_the_model_wrote():
    text = '<tool_call>{"name":"python", "arguments":{ "x":1e5,"n" : 1.0, "i": 123456789012345678901 }}</tool_call>'
    (call,) = hermes.parse(text).tool_calls
    assert call.arguments_json == call.arguments_raw == '{ "x":1e5,"n" : 1.0, "i": 123456789012345678901 }'
    assert call.to_openai() == {
        "id": call.id,
        "type": "function",
        "function": {"name": "python", "arguments": call.arguments_raw},
    }
    assert get_parser("hermes").render(None, None, [call]).count(call.arguments_raw) == 1


def test_prose_about_markers_is_content_to_the_letter():
    prose = "  The model writes <tool_call> and then the call.\n"
    assert hermes.parse(prose, TOOLS).content == prose
    assert statuses(prose) == []
    assert hermes.parse("a\n" + block("python", {}) + "\nb", TOOLS).content == "a\nb"


def test_several_calls_in_one_block():
    one, two = '{"name": "python", "arguments": {}}', '{"name": "write_file", "arguments": {}}'
    for body in (f"[{one}, {two}]", f"{one}\n{two}", f"```json\n[{one},{two}]\n```", f"{one}\n{two}}}"):
        parsed = hermes.parse(f"<tool_call>\n{body}\n</tool_call>", TOOLS)
        assert [call.name for call in parsed.tool_calls] == ["python", "write_file"], body
        assert parsed.content is None


def test_without_a_marker_only_an_offered_tool_is_called():
    parser, call = get_parser("bare_json"), '{"name": "python", "arguments": {"code": "1"}}'
    for text in (call, f"```json\n{call}\n```", f"[{call}]", call.replace("arguments", "parameters")):
        assert [c.arguments for c in parser.parse(text, TOOLS).tool_calls] == [{"code": "1"}], text
        assert parser.parse(text).tool_calls == ()
    for text in ('{"name": "Bingo", "arguments": {}}', f"Here: {call}", '{"name": "python", "age": 3}', "[]", "{}"):
        parsed = parser.parse(text, TOOLS)
        assert (parsed.tool_calls, parsed.content) == ((), text)


def test_kimi_keeps_native_ids_and_makes_them_unique():
    kimi = get_parser("kimi_k2")
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>functions.python:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    parsed = kimi.parse(begin + call + call + end, TOOLS)
    first, second = parsed.tool_calls
    assert first.id == "functions.python:3" != second.id
    assert kimi.render(None, None, [first]) == begin + call + end


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("functions.python:0", "python"),
        ("python:12", "python"),
        ("functions_write_file_3", "write_file"),
        ("functionspython5", "python"),
        ("7", "python"),
        ("call00003", "python"),
    ],
)
def test_kimi_reads_ids_that_it_learnt_from_other_clients(header, name):
    text = f'<|tool_call_begin|>{header}<|tool_call_argument_begin|>{{"code": "1"}}<|tool_call_end|>'
    (call,) = get_parser("kimi_k2").parse(text, TOOLS).tool_calls
    assert (call.name, call.arguments) == (name, {"code": "1"})


def test_mistral_takes_lists_headers_and_ids():
    for text, native, status in (
        (
            '[TOOL_CALLS] [{"name": "python", "arguments": {"code": "1"}, "id": "Aa1Bb2Cc3"}]',
            "Aa1Bb2Cc3",
            CallStatus.OK,
        ),
        ('[TOOL_CALLS]python[CALL_ID]Aa1Bb2Cc3[ARGS]{"code": "1"}', "Aa1Bb2Cc3", CallStatus.OK),
        ('[TOOL_CALLS]python{"code": "1"}', None, CallStatus.REPAIRED),
    ):
        (call,) = get_parser("mistral").parse(text, TOOLS).tool_calls
        assert (call.name, call.arguments, call.status) == ("python", {"code": "1"}, status)
        assert native is None or call.id == native


@given(json_values.filter(lambda value: isinstance(value, dict | list)), st.text(), st.data())
def test_a_scan_finds_the_end_of_json_however_it_is_cut(value, rest, data):
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.none() | st.just(1)))
    whole, scan = text + rest, JsonScan(0)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    for cut in [*cuts, len(whole)]:
        scan.advance(whole[:cut])
    assert scan.closed
    assert scan.position == len(text)
    if isinstance(value, dict):
        for key, member in scan.members.items():
            assert json.loads(whole[member.start : member.end]) == value[key]


@given(st.lists(st.sampled_from(["<a>", "<ab>", "<", "a>", "</a>", "x"]), max_size=8).map("".join), st.integers(0, 20))
def test_unsettled_text_is_what_a_marker_may_begin_in(text, cut):
    needles = Needles("<a>", "<ab>", "</a>")
    settled = needles.unsettled(text[:cut], 0)
    assert not any(match.start() < settled < match.end() for match in needles.pattern.finditer(text))


def read(name, text):
    """The result for a text, also streamed by characters."""
    parser = get_parser(name)
    found = parser.parse(text, TOOLS)
    again, events = streamed(parser, text, TOOLS)
    assert facts(again) == facts(found)
    assert event_problems(events, again) == []
    assert shape_problems(found, text) == []
    return found


@pytest.mark.parametrize(
    ("name", "text", "args"),
    [
        ("hermes", '<tool_call>{"name": "python", "arguments": {"a": 1}, "arguments": null}</tool_call>', {"a": 1}),
        ("bare_json", '{"name": "python", "arguments": {"a": 1}, "name": {"b": 2}}', {"a": 1}),
        ("bare_json", '{"name": "python", "arguments": {"a": 1}, "name": "nothing"}', {"a": 1}),
        ("llama3_json", '{"name": "python", "parameters": {"a": 1}, "name": 5}', {"a": 1}),
        ("apertus", '<|tools_prefix|>[{"python": {"a": 1}, "python": {"a": 2}}]<|tools_suffix|>', {"a": 1}),
        ("apertus", '<|tools_prefix|>[{"python": {"a": 1}, "python": 3}]<|tools_suffix|>', {"a": 1}),
    ],
)
def test_the_first_of_repeated_members_counts(name, text, args):
    (call,) = read(name, text).tool_calls
    assert (call.name, call.arguments, call.status) == ("python", args, CallStatus.REPAIRED)


def test_the_first_of_two_ids_counts():
    text = '<|START_ACTION|>[{"tool_call_id": "a", "tool_name": "python", "parameters": {}, "tool_call_id": "b"}]'
    assert [call.id for call in read("cohere_command4", text).tool_calls] == ["a"]


@pytest.mark.parametrize("blank", ["\xa0", "\x0c", "\u2028"])
def test_blanks_unknown_to_json_are_an_error(blank):
    for text in (f'{{{blank}"name": "python", "arguments": {{}}}}', f'{{"name": "python", "arguments": {{}}{blank}}}'):
        (attempt,) = read("hermes", f"<tool_call>{text}</tool_call>").attempts
        assert attempt.status is CallStatus.INVALID_JSON


@pytest.mark.parametrize(("levels", "status"), [(198, CallStatus.OK), (199, CallStatus.INVALID_JSON)])
def test_the_object_around_the_arguments_counts_as_a_level(levels, status):
    nested = "[" * levels + "]" * levels
    text = f'<tool_call>{{"name": "python", "arguments": {{"code": {nested}}}}}</tool_call>'
    assert [attempt.status for attempt in read("hermes", text).attempts] == [status]


def test_a_colon_after_a_comma_names_no_member():
    (attempt,) = read("hermes", '<tool_call>{"name": 1,: "python", "arguments": {}}</tool_call>').attempts
    assert (attempt.status, attempt.name) == (CallStatus.INVALID_JSON, "")


def test_arguments_beside_the_name_may_say_the_same():
    (call,) = read("hermes", '<tool_call>{"name": "f", "mode": "f"}</tool_call>').tool_calls
    assert (call.name, call.arguments) == ("f", {"mode": "f"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", '<|tool_call|>[{"name": "python", "arguments": {}}]'),
        ("phi4_mini_json", 'functools[{"name": "python", "arguments": {}}]'),
        ("mistral_v3", '[TOOL_CALLS] [{"name": "python", "arguments": {}}]'),
        ("granite-20b-fc", '<function_call> {"name": "python", "arguments": {}}'),
        ("llama3_json", '<|python_tag|>{"name": "python", "parameters": {}}'),
        ("gigachat3", '<|function_call|>{"name": "python", "arguments": {}}'),
    ],
)
def test_data_after_a_call_is_content(name, text):
    data = '\n{"name": "Bingo", "age": 3}'
    found = read(name, text + data)
    assert [call.name for call in found.tool_calls] == ["python"]
    assert found.content == data


def test_an_open_string_in_data_hides_no_call_in_the_next_line():
    found = read("bare_json", '{"id": "a\n{"name": "python", "arguments": {}}')
    assert [call.name for call in found.tool_calls] == ["python"]


CALL = '{"name": "python", "arguments": {"code": "1"}}'
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>%s<|tool_call_argument_begin|>%s<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("granite", f"<|tool_call|>[{CALL[:-1]}]"),
        ("jamba", f"<tool_calls>[{CALL[:-1]}]</tool_calls>"),
        ("mistral", f"[TOOL_CALLS] [{CALL[:-1]}]"),
        ("xlam", f"[{CALL[:-1]}]"),
        ("xlam", "[" + CALL.replace("arguments", "parameters") + "]"),
        # hermes-agent#6841
        ("hermes", f'<tool_call>\n{CALL[:-1]}{{"code": "1"}}}}\n</tool_call>'),
        ("kimi_k2", KIMI % ("functions_python:3", '{"code": "1"}')),
    ],
)
@pytest.mark.parametrize("width", [1, 9])
def test_slips_with_one_meaning_are_repaired(name, text, width):
    parser = get_parser(name)
    parsed = parser.parse(text, TOOLS)
    assert [(call.status, call.name, call.arguments) for call in parsed.attempts] == [
        (CallStatus.REPAIRED, "python", {"code": "1"})
    ]
    assert parser.parse(text, TOOLS, strict=True).tool_calls == ()
    found, events = streamed(parser, [text[i : i + width] for i in range(0, len(text), width)], TOOLS)
    assert facts(found) == facts(parsed)
    assert event_problems(events, found) == []


@pytest.mark.parametrize("name", ["xlam", "pythonic", "llama3_json"])
@pytest.mark.parametrize("before", ["<think>So?</think>", "<think>\nSo?\n</think>\n\n", "So?</think>\n"])
def test_a_bare_call_may_follow_reasoning_that_is_not_read(name, before):
    text = {"xlam": f"[{CALL}]", "pythonic": "[python(code='1')]", "llama3_json": CALL}[name]
    parsed = get_parser(name).parse(before + text, TOOLS)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("python", {"code": "1"})]
    assert (parsed.content or "").strip() == before.strip()


def test_kimi_infers_no_tool_from_nothing():
    parsed = get_parser("kimi_k2").parse(KIMI % ("0", "{}"), TOOLS)
    assert [call.status for call in parsed.attempts] == [CallStatus.MISSING_NAME]


def test_arguments_in_a_long_string_are_read_however_they_come():
    value = json.dumps({"code": "x" * 3000 + "[TOOL_CALLS]"})
    text = f"[TOOL_CALLS]python[ARGS]{json.dumps(value)}[TOOL_CALLS]write_file[ARGS]{{}}"
    parser = get_parser("mistral")
    parsed = parser.parse(text, TOOLS)
    assert [call.arguments for call in parsed.tool_calls] == [json.loads(value), {}]
    assert facts(streamed(parser, list(text), TOOLS)[0]) == facts(parsed)


def test_a_marker_within_another_does_not_hide_it():
    found = read(
        "gigachat3", 'function call<|role_sep|>\n{"name"<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": 1}'
    )
    assert [attempt.raw.count("role_sep") for attempt in found.attempts] == [1, 1]


def test_a_closing_marker_in_open_reasoning_is_text_of_it():
    found = read("ernie45", '<tool_call>\n{"name": "python", "arguments": {}}<think>\n</tool_call>')
    assert [call.name for call in found.tool_calls] == ["python"]
    found = get_parser("ernie45", reasoning="auto").parse('<tool_call>\n{"name": "python", "arguments": {}}<think>\nhm')
    assert found.reasoning == "hm"


def test_a_repaired_call_is_streamed_in_the_models_words():
    _, events = streamed(hermes, '<tool_call>{"name": "python", "arguments": {"code":"1"}}}</tool_call>', TOOLS)
    assert "".join(event.fragment for event in events if isinstance(event, ArgumentsDelta)) == '{"code":"1"}'


@pytest.mark.parametrize("name", ["xlam", "llama3_json", "pythonic"])
def test_brackets_in_reasoning_hold_nothing_back(name):
    stream = get_parser(name, reasoning="qwen3").stream(TOOLS)
    assert stream.feed("<think>Say ") == [ReasoningDelta("Say")]
    assert stream.feed('[1] or {"a": 2}, and') == [ReasoningDelta(' [1] or {"a": 2}, and')]


@pytest.mark.parametrize(
    ("header", "name"), [("functions.ls_2", "ls"), ("ls", "ls"), ("functions.", None), ("functions", None)]
)
def test_a_kimi_id_without_a_counter_is_a_name_where_no_tools_are_known(header, name):
    text = f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert [call.name for call in get_parser("kimi_k2").parse(text).tool_calls] == ([name] if name else [])


@pytest.mark.parametrize("name", [" python", "python ", "pyth\\ron"])
def test_a_streamed_name_is_the_name_of_the_call(name):
    stream = get_parser("apertus").stream()
    events = stream.feed(f'<|tools_prefix|>[{{"{name}": {{"a": 1}}}}]<|tools_suffix|>')
    (call,) = stream.finish().tool_calls
    assert [event.name for event in events if isinstance(event, CallStart)] == [call.name]


NAMED = NamedJson(
    opens=("@@call ",), closes=("@@",), marks=(" ",), call="@@call %(name)s %(arguments)s@@", between="\n"
)
KEYED = JsonBlocks(
    opens=("@@call ",),
    closes=("@@",),
    frame=("@@call ", "@@"),
    written='{"name": %(name)s, "arguments": %(arguments)s}',
)


@pytest.mark.parametrize(
    ("grammar", "first", "second"),
    [
        (NAMED, 'a {"x": 1}', 'b {"y": 2}'),
        (KEYED, '{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "arguments": {"y": 2}}'),
    ],
    ids=["named", "keyed"],
)
@pytest.mark.parametrize("between", ["\n", ""])
def test_a_closing_marker_that_begins_the_opening_one_ends_one_call_only(grammar, first, second, between):
    parser = ToolCallParser(Format("at_call", grammar, "none"), None)
    text = f"@@call {first}@@{between}@@call {second}@@"
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]
    for found in (parser.parse(text, tools), streamed(parser, list(text), tools)[0]):
        assert [(each.name, each.arguments) for each in found.tool_calls] == [("a", {"x": 1}), ("b", {"y": 2})]
        assert {attempt.status for attempt in found.attempts} == {CallStatus.OK}
