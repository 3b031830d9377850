"""Cases for parsers, and checks of a parser's results against them and against each other."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tool_call_parsers import (
    CALLABLE,
    ArgumentsDelta,
    CallEnd,
    CallStart,
    CallStatus,
    ContentDelta,
    Event,
    ParsedCompletion,
    ParsedToolCall,
    ReasoningDelta,
    ToolCallParser,
    ToolSchemas,
    get_parser,
)


def tool(name: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI tool schema."""
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties, "required": []}},
    }


STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
CASE_TOOLS = [
    tool(
        "measure",
        sensor=STRING,
        count=INTEGER,
        scale=NUMBER,
        raw=BOOLEAN,
        label={"anyOf": [STRING, {"type": "null"}]},
        range={"type": "array", "items": INTEGER},
        options={"type": "object", "properties": {"n": INTEGER, "f": {"type": "array", "items": STRING}}},
    ),
    tool("note", title=STRING, body=STRING),
    tool("ping"),
]
"""The tools that cases offer unless a suite names others."""


@dataclass(frozen=True)
class Case:
    """A text and the calls, content and reasoning that a parser must find in it."""

    parser: str
    """The registered name of the format."""
    name: str
    """The name of the test."""
    text: str
    """The text that a model wrote."""
    calls: Sequence[tuple[str, Mapping[str, Any]]]
    """Name and arguments of the usable calls."""
    content: str | None = None
    """The content, but for whitespace."""
    reasoning: str | None = None
    """The reasoning, but for whitespace."""
    statuses: Sequence[str] | None = None
    """The status of each attempt, in order; `|` separates alternatives. None: one `ok` for each call."""
    ids: Sequence[str | None] = ()
    """The ids of the calls, where the model wrote them."""
    rendered: bool = False
    """`render` writes these calls, content and reasoning as `text`."""

    def __str__(self) -> str:
        return f"{self.parser}/{self.name}"

    @property
    def expected_statuses(self) -> Sequence[str]:
        """The status of each attempt."""
        return ["ok"] * len(self.calls) if self.statuses is None else self.statuses


def case_problems(case: Case, tools: ToolSchemas, *, strict: bool = False) -> list[str]:
    """Where a parser's result differs from the case; empty if nowhere. `strict` rejects the calls that are repaired."""
    found = get_parser(case.parser, reasoning="auto").parse(case.text, tools, strict=strict)
    differences = _differences(case, found, strict)
    problems = [f"{name} {got!r}, want {want!r}" for name, got, want in differences if got != want]
    statuses, expected = [str(call.status) for call in found.attempts], case.expected_statuses
    if len(statuses) != len(expected) or any(
        got not in want.split("|") for got, want in zip(statuses, expected, strict=True)
    ):
        problems.append(f"statuses {statuses}, want {list(expected)}")
    if case.rendered and (text := _written(case, tools)) != case.text:
        problems.append(f"`render` writes {text!r}, want {case.text!r}")
    return problems + shape_problems(found, case.text, strict=strict)


def _written(case: Case, tools: ToolSchemas) -> str:
    """The turn of a case as its parser writes it."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in case.calls]
    calls = [
        {"id": native, "function": function}
        for function, native in itertools.zip_longest(functions, case.ids[: len(functions)])
    ]
    return get_parser(case.parser, reasoning="auto").render(case.content, case.reasoning, calls, tools)


def _differences(case: Case, found: ParsedCompletion, strict: bool) -> Iterator[tuple[str, Any, Any]]:
    usable = CALLABLE - {CallStatus.REPAIRED} if strict else CALLABLE
    handed_out = [status in usable for status in case.expected_statuses if status in CALLABLE]
    calls = case.calls if not strict else list(itertools.compress(case.calls, handed_out))
    yield (
        "calls",
        [(call.name, typed(call.arguments)) for call in found.tool_calls],
        [(name, typed(arguments)) for name, arguments in calls],
    )
    if all(status in usable or status == CallStatus.IN_REASONING for status in case.expected_statuses):
        yield "content", words(found.content), words(case.content)
    yield "reasoning", words(found.reasoning), words(case.reasoning)
    for call, native in zip(found.tool_calls, case.ids, strict=False):
        if native is not None:
            yield "id", call.id, native


def words(text: str | None) -> str:
    """The text with each run of whitespace as one blank, because chat templates differ in framing."""
    return " ".join((text or "").split())


def typed(value: Any) -> Any:
    """The value in a form that compares `1`, `True` and `1.0`, and `0.0` and `-0.0`, as different."""
    if isinstance(value, dict):
        return {key: typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [typed(inner) for inner in value]
    return (type(value).__name__, math.copysign(1, value), value) if isinstance(value, float) else (type(value), value)


def shape_problems(found: ParsedCompletion, text: str, *, strict: bool = False) -> list[str]:
    """Violations of the rules for every result: types, spans, statuses, and values that JSON or UTF-8 cannot hold."""
    problems = []
    usable = CALLABLE - {CallStatus.REPAIRED} if strict else CALLABLE
    if [call for call in found.attempts if call.status in usable] != list(found.tool_calls):
        problems.append("tool_calls are not the usable attempts")
    text = _whole_characters(text)
    for call in found.attempts:
        start, end = call.span[:2]
        if not 0 <= start <= end <= len(text) or text[start:end] != call.raw:
            problems.append(f"span {start}:{end} does not hold the raw text of {call.name!r}")
        problems += _value_problems(call)
    if len({call.id for call in found.attempts}) != len(found.attempts):
        problems.append("two attempts share an id")
    for piece in (found.content, found.reasoning):
        if piece is not None and not _encodable(piece):
            problems.append("text that is not UTF-8")
        if piece is not None and not piece.strip():
            problems.append("blank text instead of None")
    return problems


def _value_problems(call: ParsedToolCall) -> Iterator[str]:
    if not isinstance(call.arguments, dict):
        yield f"arguments of {call.name!r} are not a dict"  # type: ignore[unreachable]  # what a parser promises
        return
    try:
        written = json.dumps([call.name, call.arguments], allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        yield f"arguments of {call.name!r} are not JSON: {error}"
        return
    if not _encodable(written + call.raw + call.arguments_raw + (call.error or "")):
        yield f"arguments of {call.name!r} are not UTF-8"
    if call.status in CALLABLE:
        if not call.name:
            yield "a call without a name"
        if typed(json.loads(call.arguments_json)) != typed(call.arguments):
            yield f"arguments_json of {call.name!r} differs from arguments"
    elif call.error is None:
        yield f"{call.status} without an error"


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole_characters(text: str) -> str:
    """The text with lone surrogates replaced, as parsers do."""
    return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)


def facts(found: ParsedCompletion) -> dict[str, Any]:
    """All fields of a result in a comparable form. Random ids are left out."""
    whole = {name: getattr(found, name) for name in ("content", "reasoning", "reasoning_complete", "finish")}
    return whole | {
        "calls": [call.name for call in found.tool_calls],
        "attempts": [
            (
                "" if call.id.startswith("call_") else call.id,
                call.name,
                typed(call.arguments),
                call.arguments_raw,
                call.status,
                call.error,
                call.raw,
                call.span,
            )
            for call in found.attempts
        ],
    }


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """The text cut at these positions."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


def streamed(
    parser: ToolCallParser,
    pieces: Iterable[str],
    tools: ToolSchemas | None,
    *,
    opened: bool = False,
    strict: bool = False,
) -> tuple[ParsedCompletion, list[Event]]:
    """The result of a stream of these pieces, and all its events."""
    stream = parser.stream(tools, prompt_opened_reasoning=opened, strict=strict)
    events = [event for piece in pieces for event in stream.feed(piece)]
    found = stream.finish()
    return found, events + stream.last_events


def parsed(parser: ToolCallParser, text: str, tools: ToolSchemas | None, **options: Any) -> ParsedCompletion:
    """The result of `parse`, checked against the rules for every result and against a stream of single characters."""
    found = parser.parse(text, tools, **options)
    again, events = streamed(parser, text, tools, **options)
    assert facts(again) == facts(found)
    assert event_problems(events, again) == []
    assert shape_problems(found, text, strict=options.get("strict", False)) == []
    return found


def attempts_of(found: ParsedCompletion) -> list[tuple[str, str, dict[str, Any]]]:
    """Status, name and arguments of every attempt."""
    return [(str(call.status), call.name, call.arguments) for call in found.attempts]


def event_problems(events: Sequence[Event], found: ParsedCompletion) -> list[str]:
    """Where the events of a stream do not add up to its result."""
    problems = []
    for kind, whole in ((ContentDelta, found.content), (ReasoningDelta, found.reasoning)):
        joined = "".join(event.text for event in events if isinstance(event, kind))
        if joined != (whole or ""):
            problems.append(f"{kind.__name__}s join to {joined[-80:]!r}, not {(whole or '')[-80:]!r}")
    ended = [event for event in events if isinstance(event, CallEnd)]
    if [(event.index, event.call) for event in ended] != list(enumerate(found.attempts)):
        problems.append("the calls that end are not the attempts, in order")
    usable = {call.id for call in found.tool_calls}
    if any(event.index >= len(found.attempts) for event in events if isinstance(event, CallStart | ArgumentsDelta)):
        problems.append("a call is announced and is not among the attempts")
    for index, call in enumerate(found.attempts):
        own = [event for event in events if not isinstance(event, ContentDelta | ReasoningDelta)]
        own = [event for event in own if event.index == index]
        starts = [event for event in own if isinstance(event, CallStart)]
        if len(starts) > 1 or (call.id in usable and not starts):
            problems.append(f"{len(starts)} starts of attempt {index}, {call.status}")
        if starts and (own[0] is not starts[0] or not isinstance(own[-1], CallEnd)):
            problems.append(f"attempt {index} does not begin with its start or end with its end")
        # A repaired call is streamed as the model wrote it, before the repair.
        well_formed = call.status == CallStatus.OK or call.error == f"no tool named {call.name!r} was offered"
        if starts and (starts[0].id != call.id or (well_formed and starts[0].name != call.name)):
            problems.append(f"attempt {index} was announced as another")
        fragments = "".join(event.fragment for event in own if isinstance(event, ArgumentsDelta))
        if well_formed:
            try:
                same = typed(json.loads(fragments)) == typed(call.arguments)
            except ValueError:
                same = False
            if not same:
                problems.append(f"fragments of attempt {index} make {fragments[:80]!r}")
    return problems
