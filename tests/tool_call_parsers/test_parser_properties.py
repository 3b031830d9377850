"""What holds for every format: round trips, streams, cuts, and that no text raises, hangs or gets lost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parser_cases import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    event_problems,
    facts,
    pieces_of,
    shape_problems,
    streamed,
    tool,
    typed,
)

from tool_call_parsers import ToolCallParser, get_parser, list_parsers
from tool_call_parsers.parser import ENDS

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
PROPERTIES = {entry["function"]["name"]: entry["function"]["parameters"]["properties"] for entry in TOOLS}


@dataclass(frozen=True)
class Limits:
    """What a format cannot write, or cannot tell when it is cut. Each with its reason, as narrow as it is."""

    calls: int = 4
    """How many calls an answer can hold."""
    text_beside_calls: bool = True
    """False where the whole answer is the list of calls."""
    untyped: bool = True
    """False where values without a schema come back as text."""
    shorter_when_cut: bool = False
    """Nothing but the end of the call tells that no further argument follows, and models leave that out."""


LIMITS: dict[str, Limits] = {
    "gigachat3": Limits(calls=1),  # one call per message is all there is
    **dict.fromkeys(("bare_json", "llama3_json", "pythonic", "xlam"), Limits(text_beside_calls=False)),
    "minimax_m3": Limits(untyped=False),  # elements: their names and nesting are all that is written
    # An unclosed call whose last argument is whole is one with its end tag left out, or one cut between two arguments.
    **dict.fromkeys(
        ("glm45", "glm47", "ling3", "minicpm5", "poolside_v1", "step3"),
        Limits(shorter_when_cut=True),
    ),
}
PARSERS = [name for name in list_parsers() if isinstance(get_parser(name), ToolCallParser)]
SENTINELS = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫"
"""Characters that no format's markup contains: wherever they stand, they have to turn up again."""

every_parser = pytest.mark.parametrize("name", PARSERS)


def tuned(examples: int) -> settings:
    """Settings by cost: the formats are many."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


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
    return get_parser(name, reasoning="auto")


def has_reasoning(parser: ToolCallParser) -> bool:
    return parser.reasoning is not None or parser.format.channels


def limits(name: str) -> Limits:
    return LIMITS.get(parser_of(name).name, Limits())


@cache
def markers(name: str) -> tuple[str, ...]:
    """The format's own markup: what it writes around the words of a turn, whole and tag by tag."""
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
    shape = parser.reasoning  # with the spellings that it only reads
    read = {*shape.opens, *shape.closes} if shape is not None else set()
    return tuple(sorted(piece for piece in around | tags | read if piece.strip()))


@cache
def forbidden(name: str) -> re.Pattern[str]:
    """Markup that free text, or a verbatim value, cannot contain without being read as such."""
    tags = [marker.strip() for marker in markers(name) if len(marker.strip()) > 3]
    ends = (*ENDS, *parser_of(name).format.ends)  # hypothesis finds them in the sources, where it looks for texts
    return re.compile("|".join(map(re.escape, [*tags, *ends])))


def words_for(name: str) -> st.SearchStrategy[str]:
    """Text without the format's own markup."""
    pattern = forbidden(name)
    return texts.filter(lambda text: not pattern.search(text))


def arguments_for(name: str, function: str) -> st.SearchStrategy[dict[str, Any]]:
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
    if limits(name).untyped:
        pattern = forbidden(name)
        kinds["extra"] = st.dictionaries(identifiers, json_values, max_size=3).filter(
            lambda value: not pattern.search(repr(value))
        )
    optional = {key: kinds[key] for key in PROPERTIES[function] if key in kinds}
    return st.fixed_dictionaries({}, optional=optional)


Turn = tuple[str | None, str | None, list[tuple[str, dict[str, Any]]]]


@cache
def turns(name: str) -> st.SearchStrategy[Turn]:
    """Content, reasoning and calls of an assistant turn that the format can write."""
    free = words_for(name).filter(lambda text: text.strip())
    reasoning = st.none() | free if has_reasoning(parser_of(name)) else st.none()
    call = st.sampled_from(list(PROPERTIES)).flatmap(
        lambda function: st.tuples(st.just(function), arguments_for(name, function))
    )
    calls = st.lists(call, max_size=limits(name).calls)
    return st.tuples(st.none() | free, reasoning, calls).map(
        lambda turn: (None, turn[1], turn[2]) if turn[2] and not limits(name).text_beside_calls else turn
    )


def written(name: str, turn: Turn) -> str:
    content, reasoning, calls = turn
    openai = [{"function": {"name": function, "arguments": arguments}} for function, arguments in calls]
    return parser_of(name).render(content, reasoning, openai, TOOLS)


def calls_in(found: Any) -> list[tuple[str, Any]]:
    return [(call.name, typed(call.arguments)) for call in found.tool_calls]


# -- texts that no format foresaw --------------------------------------------------------------------------------------


@st.composite
def broken(draw: st.DrawFn, name: str) -> str:
    """A valid text with slices deleted, doubled, swapped and put in; or a soup of the format's own markup."""
    pieces = st.sampled_from(
        [*markers(name), "survey", "write", '"', "'", "\\", "{", "}", "[", "]", ":", ",", "=", "1", "\n", " ", "(", ")"]
    )
    pieces |= st.sampled_from(SENTINELS) | plain | st.text(max_size=3)
    if draw(st.booleans()):
        return "".join(draw(st.lists(pieces, max_size=14)))
    text = written(name, draw(turns(name)))
    for _ in range(draw(st.integers(1, 4))):
        start, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        end = min(end, start + draw(st.integers(0, 30)))
        kind = draw(st.integers(0, 3))
        middle = ["", text[start:end] * 2, text[start:end][::-1], draw(pieces) + text[start:end]][kind]
        text = text[:start] + middle + text[end:]
    return text


# -- the properties ----------------------------------------------------------------------------------------------------


@every_parser
@tuned(40)
@given(data=st.data())
def test_what_is_written_is_read_again(name: str, data: st.DataObject):
    content, reasoning, calls = turn = data.draw(turns(name))
    text = written(name, turn)
    found = parser_of(name).parse(text, TOOLS, strict=True)
    assert calls_in(found) == [(function, typed(arguments)) for function, arguments in calls], text
    assert (found.content, found.reasoning) == (content, reasoning), text
    assert found.reasoning_complete
    assert parser_of(name).render(found.content, found.reasoning, found.tool_calls, TOOLS) == text


@every_parser
@tuned(40)
@given(data=st.data())
def test_any_cut_into_pieces_ends_in_what_the_whole_gives(name: str, data: st.DataObject):
    text = data.draw(turns(name).map(lambda turn: written(name, turn)) | broken(name))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8) | st.just(list(range(len(text)))))
    opened, strict = data.draw(st.booleans()), data.draw(st.booleans())
    whole = parser_of(name).parse(text, TOOLS, prompt_opened_reasoning=opened, strict=strict)
    pieces = pieces_of(text, cuts)
    found, events = streamed(parser_of(name), pieces, TOOLS, opened=opened, strict=strict)
    assert facts(found) == facts(whole)
    assert event_problems(events, found) == []


@every_parser
@tuned(60)
@given(data=st.data())
def test_no_text_raises_and_none_is_lost(name: str, data: st.DataObject):
    text = data.draw(broken(name))
    opened, strict = data.draw(st.booleans()), data.draw(st.booleans())
    parser = parser_of(name) if data.draw(st.booleans()) else get_parser(name)
    found = parser.parse(text, data.draw(st.sampled_from([TOOLS, None])), prompt_opened_reasoning=opened, strict=strict)
    assert shape_problems(found, text, strict=strict) == []
    spans = {call.span: call.raw for call in found.tool_calls}  # calls of one block share its span
    kept = (found.content or "") + (found.reasoning or "") + "".join(spans.values())
    assert {char: kept.count(char) for char in SENTINELS} == {char: text.count(char) for char in SENTINELS}


@every_parser
@tuned(6)
@given(data=st.data())
def test_a_text_cut_short_loses_no_whole_call_and_invents_none(name: str, data: st.DataObject):
    turn = data.draw(turns(name))
    text = written(name, turn)
    parser = parser_of(name)
    whole = parser.parse(text, TOOLS)
    expected = calls_in(whole)
    for cut in range(len(text)):
        found = parser.parse(text[:cut], TOOLS)
        calls = calls_in(found)
        assert len(calls) >= sum(call.span.end <= cut for call in whole.tool_calls), text[:cut]
        if calls and limits(name).shorter_when_cut and calls[-1] != expected[len(calls) - 1]:
            last, full = calls.pop(), expected[len(calls)]
            assert last[0] == full[0], text[:cut]
            assert last[1].items() <= full[1].items() if isinstance(full[1], Mapping) else False, text[:cut]
        assert calls == expected[: len(calls)], text[:cut]
        if not found.reasoning_complete:
            assert found.content is None, text[:cut]
            thought, seen = whole.reasoning or "", found.reasoning or ""  # `seen` may end in half of a closing marker
            half_opened = cut < text.find(thought)  # nor is an opener with a label behind it whole at once
            assert thought.startswith(seen) or (thought and seen.startswith(thought)) or half_opened, text[:cut]
