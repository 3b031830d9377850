"""End tags of values that a model damaged: no value ends with them, and no such call is `ok`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lachesis_testing.parser_checks import INTEGER, STRING, event_problems, facts, pieces_of, streamed, tool
from tool_call_parsers import CallStatus, get_parser
from tool_call_parsers.formats.tag_blocks import FORMATS

TOOLS = [tool("bash", command=STRING, timeout=INTEGER), tool("ping")]
TOOLS[0]["function"]["parameters"]["required"] = ["command"]
BOTH_REQUIRED = [tool("bash", command=STRING, timeout=INTEGER), tool("ping")]
BOTH_REQUIRED[0]["function"]["parameters"]["required"] = ["command", "timeout"]

TAGS = sorted({format.name for format in FORMATS} | {"beam", "muse"})
CALLS = {
    "one value": ([("bash", {"command": "ls -la"})], "ls -la"),
    "the first of two": ([("bash", {"command": "ls -la", "timeout": 3})], "ls -la"),
    "the last of two": ([("bash", {"command": "pwd", "timeout": 3141})], "3141"),
    "the second call": ([("ping", {}), ("bash", {"command": "ls -la"})], "ls -la"),
    "the first call": ([("bash", {"command": "ls -la"}), ("bash", {"command": "pwd"})], "ls -la"),
    "an unknown parameter follows": ([("bash", {"command": "ls -la", "cwd": "/tmp"})], "ls -la"),
}
_END = re.compile(r"\n?((?:\]<\]minimax\[>\[)?</[^>]*>)")
_NAME = re.compile(r"[A-Za-z_]{4,}(?=[^A-Za-z]*$)")


def written(parser: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    """The calls as tags. LongCat's template writes JSON, and its models write tags too. Beam's calls have no end tag
    but the marker after the message."""
    turn = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if parser != "longcat":
        return get_parser(parser).render("Look.", None, turn, TOOLS) + "<|end|>" * (parser == "beam")
    text = get_parser("glm45").render("Look.", None, turn, TOOLS)
    return text.replace("tool_call", "longcat_tool_call").replace("arg_", "longcat_arg_")


def damaged(tag: str, others: set[str]) -> Iterator[str]:
    """What models write in place of an end tag."""
    name = _NAME.search(tag)
    assert name is not None
    before, word, after = tag[: name.start()], name.group(), tag[name.end() :]
    yield from (tag[:-1], tag[1:], tag[: len(tag) // 2], tag[:-1] + "]", tag[:-1] + " >")
    yield from (tag.replace("/", ""), tag.replace("</", "</ "), tag.replace("</", "<//"), tag.replace("</", "<\\"))
    yield from (before + word[:-2] + word[-1] + after, before + word + "s" + after, before + word.upper() + after)
    misspelt = before + word[0] + word[2:] + after
    yield from (tag + tag, tag + "\n" + tag, tag + ">", misspelt + tag)
    yield from (misspelt + " " * 40 + tag, tag[:-1] + "0\n" + tag, tag[1:] + tag, before + "0" + word + after + tag)
    yield from others


@pytest.mark.sample(80)
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("parser", TAGS)
def test_no_value_ends_with_a_damaged_tag_and_no_such_call_is_ok(parser: str, case: str) -> None:
    calls, value = CALLS[case]
    text = written(parser, calls)
    end = _END.match(text, text.index(value) + len(value))
    assert end is not None
    others = {*re.findall(r"</[^>]*>", text), "</function>"} - {end[1].rpartition("[")[2]}
    for tools in (TOOLS, BOTH_REQUIRED, None):
        for tag in damaged(end[1], others):
            broken = text[: end.start(1)] + tag + text[end.end(1) :]
            found = get_parser(parser).parse(broken, tools)
            assert found.attempts, broken
            for call in found.tool_calls:
                read = {(key, str(item)) for key, item in call.arguments.items()}
                right = [
                    {(key, str(item)) for key, item in given.items()} for name, given in calls if name == call.name
                ]
                assert any(read <= given for given in right), (broken, call)
                assert call.status is not CallStatus.OK or value not in map(str, call.arguments.values()), broken
            again, _ = streamed(get_parser(parser), pieces_of(broken, range(3, len(broken), 3)), tools)
            assert facts(again) == facts(found)


@pytest.mark.parametrize("parser", TAGS)
def test_a_damaged_tag_inside_a_value_without_an_end_leaves_no_call(parser: str) -> None:
    text = written(parser, [("bash", {"command": "ls -la"})])
    end = _END.match(text, text.index("ls -la") + len("ls -la"))
    assert end is not None
    name = _NAME.search(end[1])
    assert name is not None
    misspelt = end[1].replace(name.group(), name.group()[:-2] + name.group()[-1])
    found = get_parser(parser).parse(text[: end.start(1)] + misspelt + " && pwd" + text[end.end(1) :], TOOLS)
    assert not found.tool_calls
    assert [attempt.status for attempt in found.attempts] == [CallStatus.MALFORMED]


KEPT = ["<p>one</p>", "a </b> c", "x < 3", "</p", "see </function> here", "a/parameter", "<b>/etc/{name}s", "/{name}"]


@pytest.mark.sample(80)
@pytest.mark.parametrize("parser", TAGS)
@pytest.mark.parametrize("value", KEPT)
def test_a_value_with_its_end_tag_keeps_other_tags_and_paths(parser: str, value: str) -> None:
    plain = written(parser, [("bash", {"command": "ls -la"})])
    end = _END.match(plain, plain.index("ls -la") + len("ls -la"))
    assert end is not None
    name = _NAME.search(end[1])
    assert name is not None
    value = value.format(name=name.group())
    text = plain.replace("ls -la", value)
    found = get_parser(parser).parse(text, TOOLS)
    assert [(call.arguments, call.status) for call in found.tool_calls] == [({"command": value}, CallStatus.OK)]
    again, events = streamed(get_parser(parser), pieces_of(text, range(len(text))), TOOLS)
    assert facts(again) == facts(found)
    assert not event_problems(events, again)


def test_a_damaged_end_tag_before_the_right_one_is_dropped_from_a_whole_text_and_from_a_stream() -> None:
    text = (
        "<|channel|>commentary<|message|>0<|end|><|start|>assistant to=write<|channel|>analysis <|constrain|>xml"
        '<|message|><rfl:parameter name="path">\n\n</rfl:parameter><rfl:parameter name="text">\n0\n'
        "</rfl:parameter0\n</rfl:parameter><|end|>"
    )
    (call,) = (found := get_parser("beam").parse(text)).tool_calls
    assert (call.arguments, call.status) == ({"path": "", "text": "0"}, CallStatus.REPAIRED)
    again, _ = streamed(get_parser("beam"), list(text), None)
    assert facts(again) == facts(found)


@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_m2", "glm45"])
def test_elements_in_a_value_without_an_end_tag_are_data(parser: str) -> None:
    text = written(parser, [("bash", {"command": "<params>a</params>"})])
    end = _END.match(text, text.index("</params>") + len("</params>"))
    assert end is not None
    (call,) = get_parser(parser).parse(text[: end.start()] + text[end.end() :], TOOLS).tool_calls
    assert (call.arguments, call.status) == ({"command": "<params>a</params>"}, CallStatus.REPAIRED)


@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_m2", "glm47", "deepseek_v4"])
def test_a_lost_opening_tag_of_a_required_parameter_leaves_no_call(parser: str) -> None:
    text = written(parser, [("bash", {"command": "ls -la", "timeout": 3})])
    first = text.index("ls -la") + len("ls -la")
    end = _END.match(text, first)
    assert end is not None
    broken = text[: end.end()] + text[text.index("3", end.end()) :]
    found = get_parser(parser).parse(broken, BOTH_REQUIRED)
    assert not found.tool_calls
    assert [attempt.status for attempt in found.attempts] == [CallStatus.MALFORMED]
