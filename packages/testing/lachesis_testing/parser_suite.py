"""The conformance suite for tool-call parsers: a format is done when its suite passes. Needs pytest and hypothesis.

A test module subclasses `ParserSuite` under a name that begins with `Test`, and pytest does the rest:

    class TestMyFormat(ParserSuite):
        parser = "my_format"
        cases = (
            Case("my_format", "one call", "<call>...</call>", [("ping", {})]),
            Case("my_format", "cut", "<call>...", [], statuses=["incomplete"]),
        )
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lachesis_testing.parser_checks import (
    BOOLEAN,
    CASE_TOOLS,
    INTEGER,
    NUMBER,
    STRING,
    Case,
    case_problems,
    event_problems,
    facts,
    pieces_of,
    shape_problems,
    streamed,
    tool,
    typed,
)
from tool_call_parsers import CallStatus, ToolCallParser, ToolSchemas, get_parser
from tool_call_parsers.parser import ENDS

__all__ = ["CASE_TOOLS", "Case", "FormatLimits", "ParserSuite", "tool"]

FLAGS = {"type": "object", "properties": {"on": BOOLEAN, "of": STRING}}
TOOLS = [
    tool(
        "survey",
        place=STRING,
        count=INTEGER,
        scale=NUMBER,
        raw=BOOLEAN,
        label={"anyOf": [STRING, {"type": "null"}]},
        grid={"type": "array", "items": {"type": "array", "items": INTEGER}},
        options={
            "type": "object",
            "properties": {"n": INTEGER, "names": {"type": "array", "items": STRING}, "flags": FLAGS},
        },
        extra={"type": "object"},
    ),
    tool("write", path=STRING, text=STRING),
    tool("list_all"),
]
"""The tools that the properties offer."""
PROPERTIES = {entry["function"]["name"]: entry["function"]["parameters"]["properties"] for entry in TOOLS}


@dataclass(frozen=True)
class FormatLimits:
    """What a format cannot write, or cannot tell from a cut. Set them as narrowly as the format allows."""

    calls: int = 4
    """How many calls an answer can hold."""
    text_beside_calls: bool = True
    """False if the list of calls is the whole answer."""
    untyped: bool = True
    """False if values without a schema come back as text."""
    shorter_when_cut: bool = False
    """Only the end of the call shows that no further argument follows, and models omit it."""


NO_OBJECTS = ("[1, 2]", '[{"path": "p"}]', '"x"', "3", "true")
NO_JSON = ("not json at all", "path: p", "[1, 2")
SENTINELS = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫"
"""Characters that occur in no format's tags: wherever a text has them, the result must have them."""


def sized(examples: int) -> settings:
    """Settings for properties that run for many formats, each as a class that inherits the test.

    `examples` are those of hypothesis' default profile; one with fewer than its 100 has fewer here as well.
    """
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example]
    checks.append(HealthCheck.differing_executors)
    return settings(
        max_examples=max(1, examples * settings().max_examples // 100), deadline=None, suppress_health_check=checks
    )


# -- texts and calls that a format can hold ----------------------------------------------------------------------------

identifiers = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)
plain = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
pieces = ["\n", "\t", " ", '"', "'", "\\", "\\n", '\\\\"', "\u2028", "\x00", "```", "é", "🧪", "null", "true", "1e5"]
pieces += ["<b>", "</b>", "{", "}]", "],", "f(x=1)", "&amp;", "<|", "|>", "[X]", "<i:b>", "call:f{", ">>>"]
texts = st.lists(plain | st.sampled_from(pieces), max_size=5).map("".join)
numbers = st.integers(-(2**70), 2**70) | st.integers(-5, 5)
floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(identifiers, inner, max_size=3),
    max_leaves=5,
)


@cache
def parser_of(name: str) -> ToolCallParser:
    """The parser of a format, with the reasoning of its models."""
    parser = get_parser(name, reasoning="auto")
    if not isinstance(parser, ToolCallParser):
        raise TypeError(f"the suite tests a parser that is registered as a Format, and {name!r} is a {type(parser)}")
    return parser


def has_reasoning(parser: ToolCallParser) -> bool:
    """Whether the parser can write reasoning."""
    return parser.reasoning is not None or parser.format.channels


@cache
def tags_of(name: str) -> tuple[str, ...]:
    """The text that the format writes around the words of a turn, whole and tag by tag."""
    parser = parser_of(name)
    call = {"function": {"name": "write", "arguments": {"path": "Qp", "text": "Qt"}}}
    turns = [("Qc", [call]), (None, [call]), ("Qc", [])]
    written = [parser.render(content, None, calls, TOOLS) for content, calls in turns]
    if has_reasoning(parser):
        written += [parser.render(content, "Qr", calls, TOOLS) for content, calls in turns]
    around = {piece for text in written for piece in re.split(r"Qc|Qr|Qp|Qt|\bwrite\b|\bpath\b|\btext\b", text)}
    tags = {
        tag
        for piece in around
        for tag in re.findall(r"<[^<>]*>|\[/?[A-Z_]+\]|\]<\]\w+\[>\[|[a-z]+\[|<\W*\w+[= ]|\W{1,4}", piece)
    }
    shape = parser.reasoning  # with the spellings that are read and never written
    read = {*shape.opens, *shape.closes} if shape is not None else set()
    return tuple(sorted(piece for piece in around | tags | read if piece.strip()))


@cache
def forbidden(name: str) -> re.Pattern[str]:
    """Tags that free text, or a verbatim value, cannot contain without being read as tags."""
    tags = [tag.strip() for tag in tags_of(name) if len(tag.strip()) > 3]
    ends = (*ENDS, *parser_of(name).format.ends)  # hypothesis finds them in the sources, where it looks for texts
    return re.compile("|".join(map(re.escape, [*tags, *ends])))


def words_for(name: str) -> st.SearchStrategy[str]:
    """Text without the format's tags."""
    pattern = forbidden(name)
    return texts.filter(lambda text: not pattern.search(text))


def arguments_for(name: str, limits: FormatLimits, function: str) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of a tool that the format can write."""
    words = words_for(name)
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "place": words,
        "count": numbers,
        "scale": floats,
        "raw": st.booleans(),
        "label": st.none() | words.filter(lambda text: text.strip().lower() not in ("null", "none")),
        "grid": st.lists(st.lists(numbers, max_size=3), max_size=3),
        "options": st.fixed_dictionaries(
            {},
            optional={
                "n": numbers,
                "names": st.lists(words, max_size=3),
                "flags": st.fixed_dictionaries({}, optional={"on": st.booleans(), "of": words}),
            },
        ),
        "path": words,
        "text": words,
    }
    if limits.untyped:
        pattern = forbidden(name)
        kinds["extra"] = st.dictionaries(identifiers, json_values, max_size=3).filter(
            lambda value: not pattern.search(repr(value))
        )
    optional = {key: kinds[key] for key in PROPERTIES[function] if key in kinds}
    return st.fixed_dictionaries({}, optional=optional)


Turn = tuple[str | None, str | None, list[tuple[str, dict[str, Any]]]]


@cache
def turns(name: str, limits: FormatLimits) -> st.SearchStrategy[Turn]:
    """Content, reasoning and calls of an assistant turn that the format can write."""
    free = words_for(name).filter(lambda text: bool(text.strip()))
    reasoning = st.none() | free if has_reasoning(parser_of(name)) else st.none()
    call = st.sampled_from(list(PROPERTIES)).flatmap(
        lambda function: st.tuples(st.just(function), arguments_for(name, limits, function))
    )
    calls = st.lists(call, max_size=limits.calls)
    return st.tuples(st.none() | free, reasoning, calls).map(
        lambda turn: (None, turn[1], turn[2]) if turn[2] and not limits.text_beside_calls else turn
    )


def written(name: str, turn: Turn) -> str:
    """The turn as the format writes it."""
    content, reasoning, calls = turn
    openai = [{"function": {"name": function, "arguments": arguments}} for function, arguments in calls]
    text = parser_of(name).render(content, reasoning, openai, TOOLS)
    for function, arguments in calls:
        assert function in text, f"`render` wrote no text for call {function}({arguments}); set `call`, or `written`"
    return text


def calls_in(found: Any) -> list[tuple[str, Any]]:
    """Name and arguments of the usable calls."""
    return [(call.name, typed(call.arguments)) for call in found.tool_calls]


@st.composite
def broken(draw: st.DrawFn, name: str, limits: FormatLimits) -> str:
    """A valid text with slices deleted, doubled, swapped and inserted; or a random sequence of the format's tags."""
    pieces = st.sampled_from(
        [*tags_of(name), "survey", "write", '"', "'", "\\", "{", "}", "[", "]", ":", ",", "=", "1", "\n", " ", "(", ")"]
    )
    pieces |= st.sampled_from(SENTINELS) | plain | st.text(max_size=3)
    if draw(st.booleans()):
        return "".join(draw(st.lists(pieces, max_size=14)))
    text = written(name, draw(turns(name, limits)))
    for _ in range(draw(st.integers(1, 4))):
        start, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        end = min(end, start + draw(st.integers(0, 30)))
        kind = draw(st.integers(0, 3))
        middle = ["", text[start:end] * 2, text[start:end][::-1], draw(pieces) + text[start:end]][kind]
        text = text[:start] + middle + text[end:]
    return text


class ParserSuite:
    """The tests that every parser passes: its cases, and properties over random turns and random texts."""

    parser: ClassVar[str]
    """The registered name."""
    limits: ClassVar[FormatLimits] = FormatLimits()
    cases: ClassVar[Sequence[Case]] = ()
    """At least one text that is well formed, and one that is cut or malformed."""
    tools: ClassVar[ToolSchemas] = CASE_TOOLS
    """The tools that the cases offer."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Make a test of each case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=lambda case: case.name)

    def test_cases_show_plain_and_malformed_text(self) -> None:
        assert self.cases, f"write at least one case for {self.parser!r}: set `cases`"
        names = [case.name for case in self.cases]
        assert len(set(names)) == len(names), "two cases share a name"
        others = {case.parser for case in self.cases if get_parser(case.parser).name != parser_of(self.parser).name}
        assert not others, f"cases of {self.parser!r} name other parsers: {sorted(others)}"
        usable = {"ok", "repaired", "unknown_tool"}
        assert any(case.calls and set(case.expected_statuses) == {"ok"} for case in self.cases), (
            "write a case with a call, all `ok`"
        )
        assert any(
            not usable.intersection(status.split("|")) for case in self.cases for status in case.expected_statuses
        ), "write a case that is cut or malformed"

    def test_a_case_is_read_as_expected(self, case: Case) -> None:
        problems = case_problems(case, self.tools) + case_problems(case, self.tools, strict=True)
        assert not problems, problems

    def test_the_pieces_of_a_case_end_in_the_result_of_the_whole(self, case: Case) -> None:
        parser = parser_of(case.parser)
        whole = parser.parse(case.text, self.tools)
        for size in (1, 7, 64):
            found, events = streamed(parser, pieces_of(case.text, range(size, len(case.text), size)), self.tools)
            assert facts(found) == facts(whole), (found, whole)
            assert not (problems := event_problems(events, found)), problems

    def test_a_complete_call_without_an_object_of_arguments_is_not_ok(self) -> None:
        written_as = '{"path":"Qp"}'
        call = {"function": {"name": "write", "arguments": written_as}}
        text = parser_of(self.parser).render(None, None, [call], TOOLS)
        if written_as not in text:
            return  # the format does not write arguments as JSON
        for wrong in (*NO_OBJECTS, *NO_JSON):
            found = parser_of(self.parser).parse(text.replace(written_as, wrong), TOOLS)
            assert not found.tool_calls, (wrong, found)
            if wrong in NO_OBJECTS:
                assert [call.status for call in found.attempts] == [CallStatus.NOT_AN_OBJECT], (wrong, found)

    @sized(40)
    @given(data=st.data())
    def test_a_written_turn_is_read_back(self, data: st.DataObject) -> None:
        name = self.parser
        content, reasoning, calls = turn = data.draw(turns(name, self.limits))
        text = written(name, turn)
        found = parser_of(name).parse(text, TOOLS, strict=True)
        assert calls_in(found) == [(function, typed(arguments)) for function, arguments in calls], (text, found)
        assert (found.content, found.reasoning) == (content, reasoning), (text, found)
        assert found.reasoning_complete, text
        again = parser_of(name).render(found.content, found.reasoning, found.tool_calls, TOOLS)
        assert again == text, f"{text!r} is read, and written as {again!r}"

    @sized(40)
    @given(data=st.data())
    def test_any_cut_into_pieces_ends_in_the_result_of_the_whole(self, data: st.DataObject) -> None:
        name = self.parser
        text = data.draw(turns(name, self.limits).map(lambda turn: written(name, turn)) | broken(name, self.limits))
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8) | st.just(list(range(len(text)))))
        opened, strict = data.draw(st.booleans()), data.draw(st.booleans())
        whole = parser_of(name).parse(text, TOOLS, prompt_opened_reasoning=opened, strict=strict)
        found, events = streamed(parser_of(name), pieces_of(text, cuts), TOOLS, opened=opened, strict=strict)
        assert facts(found) == facts(whole), (found, whole)
        assert not (problems := event_problems(events, found)), problems

    @sized(60)
    @given(data=st.data())
    def test_no_text_raises_and_none_is_lost(self, data: st.DataObject) -> None:
        name = self.parser
        text = data.draw(broken(name, self.limits))
        opened, strict = data.draw(st.booleans()), data.draw(st.booleans())
        parser = parser_of(name) if data.draw(st.booleans()) else get_parser(name)
        tools = data.draw(st.sampled_from([TOOLS, None]))
        found = parser.parse(text, tools, prompt_opened_reasoning=opened, strict=strict)
        assert not (problems := shape_problems(found, text, strict=strict)), problems
        spans = {call.span: call.raw for call in found.tool_calls}  # calls of one block share its span
        kept = (found.content or "") + (found.reasoning or "") + "".join(spans.values())
        lost = [char for char in SENTINELS if kept.count(char) != text.count(char)]
        assert not lost, f"{lost} of {text!r} are lost or doubled in {found}"

    @sized(6)
    @given(data=st.data())
    def test_a_text_cut_short_loses_no_whole_call_and_invents_none(self, data: st.DataObject) -> None:
        name = self.parser
        text = written(name, data.draw(turns(name, self.limits)))
        parser = parser_of(name)
        whole = parser.parse(text, TOOLS)
        expected = calls_in(whole)
        for cut in range(len(text)):
            found = parser.parse(text[:cut], TOOLS)
            calls = calls_in(found)
            assert len(calls) >= sum(call.span.end <= cut for call in whole.tool_calls), text[:cut]
            if calls and self.limits.shorter_when_cut and calls[-1] != expected[len(calls) - 1]:
                last, full = calls.pop(), expected[len(calls)]
                assert last[0] == full[0], text[:cut]
                assert last[1].items() <= full[1].items() if isinstance(full[1], Mapping) else False, text[:cut]
            assert calls == expected[: len(calls)], text[:cut]
            if not found.reasoning_complete:
                assert found.content is None, text[:cut]
                # `seen` may end in half of a closing tag, and an opening tag with a label is whole only at its end.
                thought, seen = whole.reasoning or "", found.reasoning or ""
                half_opened = cut < text.find(thought)
                assert thought.startswith(seen) or (thought and seen.startswith(thought)) or half_opened, text[:cut]
