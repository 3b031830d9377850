"""Formats whose turns are messages with headers: gpt-oss (Harmony), Muse, Inkling, Kimi K3."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.run import some
from tool_call_parsers import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    CallStatus,
    ContentDelta,
    Finish,
    ParsedCompletion,
    ReasoningDelta,
    get_parser,
)

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {
        "read": {"path": {"type": "string"}, "lines": {"type": "integer"}, "options": {"type": "object"}},
        "ping": {},
    }.items()
]
START = "<|start|>assistant"
READ = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
INVOKE = "<|content_invoke_tool_json|>"


def call(body: str = "", name: str = "read") -> str:
    return f'<|open|>call tool="{name}" index="1"<|sep|>{body}<|close|>call<|sep|>'


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def tools(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


def atem(name: str = "read", parameters: str = '<atem:parameter name="path">a</atem:parameter>\n') -> str:
    invoke = f'<atem:invoke name="{name}">\n{parameters}</atem:invoke>'
    return f"<atem:function_calls>\n{invoke}\n</atem:function_calls>"


def parse(name: str, text: str, **options: bool) -> ParsedCompletion:
    return get_parser(name).parse(text, TOOLS, **options)


def seen(completion: ParsedCompletion) -> tuple[object, ...]:
    calls = [(attempt.status.value, attempt.name, attempt.arguments) for attempt in completion.attempts]
    return completion.content, completion.reasoning, calls


A = {"path": "a"}
ok, repaired = [("ok", "read", A)], [("repaired", "read", A)]

CASES = [
    # The header decides the kind of a message.
    (
        "openai",
        '<|channel|>analysis to=functions.read <|constrain|>json<|message|>{"path":"a"}<|call|>',
        None,
        None,
        repaired,
    ),
    ("openai", f'{READ}{{"path":"a"}}', None, None, ok),
    ("openai", f'{READ}{{"path":"a"}}<|end|>', None, None, repaired),
    ("openai", ' to=functions.read<|channel|>commentary json<|message|>{"path":"a"}<|call|>', None, None, ok),
    ("openai", 'commentary to=functions.read<|message|>{"path":"a"}<|call|>', None, None, repaired),
    ("openai", '<|start|>commentary to=functions.read<|message|>{"path":"a"}<|call|>', None, None, repaired),
    ("openai", f"{READ}null<|call|>", None, None, [("repaired", "read", {})]),
    ("openai", "<|message|>Hi<|return|>", "Hi", None, []),
    ("openai", "Hi", "Hi", None, []),
    (
        "openai",
        f"<|channel|>commentary<|message|>P<|end|>{START}<|channel|>final<|message|>C<|return|>",
        "P\nC",
        None,
        [],
    ),
    (
        "openai",
        f"<|channel|>analysis<|message|>R<|end|>{START}<|channel|>analysis<|message|>S<|end|>",
        None,
        "R\nS",
        [],
    ),
    ("muse", f" to=self<|message|>R<|eom|>{START} to=read<|message|>{atem()}<|eot|>", None, "R", ok),
    ("muse", f"to=commentary<|message|>C<|eom|>{START} to=read<|message|>{atem()}", "C", None, ok),
    ("muse", atem(), None, None, ok),
    ("muse", f" to=read.read<|message|>{atem('read.read')}", None, None, ok),
    ("muse", ' to=read<|message|>{"path": "a"}<|eom|>', None, None, [("repaired", "read", A)]),
    ("inkling", f'read{INVOKE}{{"name":"read","args":{{"path":"a"}}}}<|end_message|>', None, None, ok),
    ("inkling", f'C.<|message_model|>read{INVOKE}{{"name":"read","args":{{"path":"a"}}}}', "C.", None, repaired),
    (
        "inkling",
        f"<|message_model|><|content_text|>C<|end_message|><|message_model|><|content_thinking|>R<|end_message|>"
        f'<|message_model|>ping{INVOKE}{{"name":"ping","args":{{}}}}<|end_message|><|content_model_end_sampling|>',
        "C",
        "R",
        [("ok", "ping", {})],
    ),
    ("kimi_k3", tools(call(argument("path", "string", "a"))), None, None, ok),
    ("kimi_k3", "<|open|>tools<|sep|>" + call(argument("path", "string", "a")), None, None, repaired),
    ("kimi_k3", call(argument("path", "string", "a")), None, None, repaired),
    ("kimi_k3", tools(call('<|open|>json type="object"<|sep|>{"path":"a"}<|close|>json<|sep|>')), None, None, ok),
    ("kimi_k3", tools(call(argument("lines", "number", "1e2"))), None, None, [("ok", "read", {"lines": 100.0})]),
    (
        "kimi_k3",
        tools(call(argument("path", "string", ' "&quot;1" '))),
        None,
        None,
        [("ok", "read", {"path": ' "&quot;1" '})],
    ),
    (
        "kimi_k3",
        tools(call(argument("a&amp;&quot;b", "null", "null"), "x&amp;y")),
        None,
        None,
        [("unknown_tool", "x&y", {'a&"b': None})],
    ),
    (
        "kimi_k3",
        tools(call(argument("path", "string", "say <|close|>argument<|sep|> or <|close|>call<|sep|>!"))),
        None,
        None,
        [("ok", "read", {"path": "say <|close|>argument<|sep|> or <|close|>call<|sep|>!"})],
    ),
    (
        "kimi_k3",
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>R<|close|>think<|sep|><|open|>response<|sep|>C'
        "<|close|>response<|sep|>" + tools(call(name="ping")) + "<|close|>message<|sep|><|end_of_msg|>",
        "C",
        "R",
        [("ok", "ping", {})],
    ),
    # A quotation is not a call.
    (
        "openai",
        f'<|channel|>final<|message|>So: {START}{READ}{{"path":"a"}}<|call|> it is.<|return|>',
        f'So: {START}{READ}{{"path":"a"}}<|call|> it is.',
        None,
        [("malformed", "read", {})],
    ),
    (
        "openai",
        "<|channel|>final<|message|>Write <|end|> or <|channel|> there.",
        "Write <|end|> or <|channel|> there.",
        None,
        [],
    ),
    (
        "openai",
        "The model writes <|channel|> and then the call.",
        "The model writes <|channel|> and then the call.",
        None,
        [],
    ),
    (
        "muse",
        f" to=self<|message|>Maybe {atem()}.<|eom|>{START} to=user<|message|>C<|eot|>",
        "C",
        f"Maybe {atem()}.",
        [],
    ),
    ("muse", f" to=self<|message|>Maybe {atem()} but", None, f"Maybe {atem()} but", []),
    (
        "kimi_k3",
        "It writes <|open|>tools<|sep|> and then the call.",
        "It writes <|open|>tools<|sep|> and then the call.",
        None,
        [],
    ),
    (
        "kimi_k3",
        f"<|open|>response<|sep|>So: {tools(call())}<|close|>response<|sep|>",
        f"So: {tools(call())}",
        None,
        [("malformed", "read", {})],
    ),
    ("inkling", f"It writes {INVOKE} and then JSON.", f"It writes {INVOKE} and then JSON.", None, []),
    # Closed reasoning makes no calls. Reasoning that is not closed ends at the next message.
    (
        "openai",
        f'<|channel|>analysis<|message|>R {START}{READ}{{"path":"a"}}<|call|> no<|end|>'
        f"{START}<|channel|>final<|message|>C",
        "C",
        f'R {START}{READ}{{"path":"a"}}<|call|> no',
        [("in_reasoning", "read", A)],
    ),
    ("openai", f'<|channel|>analysis<|message|>R{START}{READ}{{"path":"a"}}<|call|>', None, "R", ok),
    ("kimi_k3", f"<|open|>think<|sep|>R{tools(call(name='ping'))}", None, "R", [("ok", "ping", {})]),
    # Repairs.
    ("openai", f'{READ}{{"path":"a"}}}}<|call|>', None, None, [("repaired", "read", A)]),
    ("openai", f'{READ}{{"path":"a"<|call|>', None, None, [("repaired", "read", A)]),
    ("openai", f"{READ}<|call|>", None, None, [("repaired", "read", {})]),
    ("openai", f'{READ}{{"path":"a"}} done<|call|>', " done", None, [("repaired", "read", A)]),
    (
        "openai",
        '<|channel|>commentary to=functions.read code extra<|message|>{"path":"a"}<|call|>',
        None,
        None,
        [("repaired", "read", A)],
    ),
    (
        "openai",
        '<|channel|>analysis<|message|>R<|end|>commentary to=functions.read<|message|>{"path":"a"}<|call|>',
        None,
        "R",
        [("repaired", "read", A)],
    ),
    (
        "kimi_k3",
        tools(call(argument("options", "object", "{'n': 1}"))),
        None,
        None,
        [("repaired", "read", {"options": {"n": 1}})],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), CASES)
def test_reads(
    name: str, text: str, content: str | None, reasoning: str | None, calls: list[tuple[str, str, dict[str, object]]]
) -> None:
    assert seen(parse(name, text)) == (content, reasoning, calls)


@pytest.mark.parametrize(
    ("name", "text", "status", "tool"),
    [
        ("openai", f'{READ}{{"path": a}}<|call|>', CallStatus.INVALID_JSON, "read"),
        ("openai", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", CallStatus.INVALID_JSON, "python"),
        ("openai", f"{READ}[1]<|call|>", CallStatus.NOT_AN_OBJECT, "read"),
        ("openai", f'{READ}{{"path": "a', CallStatus.INCOMPLETE, "read"),
        ("openai", READ, CallStatus.INCOMPLETE, "read"),
        ("openai", "<|channel|>commentary to=functions.rea", CallStatus.INCOMPLETE, ""),
        (
            "openai",
            "<|channel|>commentary to=functions. <|constrain|>json<|message|>{}<|call|>",
            CallStatus.MISSING_NAME,
            "",
        ),
        ("openai", "<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", CallStatus.MISSING_NAME, ""),
        ("muse", " to=read<|message|>well<|eom|>", CallStatus.MALFORMED, "read"),
        ("muse", " to=read<|message|><atem:funct", CallStatus.INCOMPLETE, "read"),
        ("inkling", f"{INVOKE}@@ {{[<|end_message|>", CallStatus.MALFORMED, ""),
        ("inkling", INVOKE, CallStatus.INCOMPLETE, ""),
        ("kimi_k3", "<|open|>tools<|sep|>", CallStatus.INCOMPLETE, ""),
        ("kimi_k3", "<|open|>tools<|sep|><|open|>call to", CallStatus.INCOMPLETE, ""),
        ("kimi_k3", tools(call(argument("path", "string", "a")))[:-60], CallStatus.INCOMPLETE, "read"),
        ("kimi_k3", tools(call("well")), CallStatus.MALFORMED, "read"),
        (
            "kimi_k3",
            tools(call('<|open|>argument type="null"<|sep|>null<|close|>argument<|sep|>')),
            CallStatus.MALFORMED,
            "read",
        ),
        ("kimi_k3", tools(call(name="")), CallStatus.MISSING_NAME, ""),
    ],
)
def test_a_failed_attempt_stays_content(name: str, text: str, status: CallStatus, tool: str) -> None:
    completion = parse(name, text)
    assert [(attempt.status, attempt.name) for attempt in completion.attempts] == [(status, tool)]
    assert not completion.tool_calls
    assert completion.content is not None
    assert completion.content.startswith(text.removesuffix("<|close|>tools<|sep|>"))
    assert completion.finish is (Finish.INCOMPLETE if status is CallStatus.INCOMPLETE else Finish.STOP)


def test_a_bad_sibling_costs_no_call() -> None:
    good = f'{READ}{{"path":"a"}}<|call|>'
    for bad in (f'{READ}{{"path": a}}<|call|>', f'{READ}{{"path": "a}}<|call|>'):
        completion = parse("openai", f"{good}{START}{bad}{START}{good}")
        assert [attempt.status.value for attempt in completion.attempts] == ["ok", "invalid_json", "ok"]
        assert completion.content == START + bad
    bad = call("well")
    completion = parse("kimi_k3", tools(call(), bad, call()))
    assert [attempt.status.value for attempt in completion.attempts] == ["ok", "malformed", "ok"]
    assert completion.content == bad


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("openai", f"R<|end|>{START}<|channel|>final<|message|>C"),
        ("openai", f"<|channel|>analysis<|message|>R<|end|>{START}<|channel|>final<|message|>C"),
        ("muse", f"R<|eom|>{START} to=user<|message|>C<|eot|>"),
        ("inkling", "R<|end_message|><|message_model|><|content_text|>C<|end_message|>"),
        ("kimi_k3", "R<|close|>think<|sep|><|open|>response<|sep|>C<|close|>response<|sep|><|close|>message<|sep|>"),
    ],
)
def test_the_prompt_may_have_opened_the_reasoning(name: str, text: str) -> None:
    completion = parse(name, text, prompt_opened_reasoning=True)
    assert (completion.content, completion.reasoning, completion.reasoning_complete) == ("C", "R", True)
    cut = parse(name, text[: text.index("R") + 1], prompt_opened_reasoning=True)
    assert (cut.content, cut.reasoning, cut.reasoning_complete, cut.finish) == (None, "R", False, Finish.INCOMPLETE)


def test_strict_mode_rejects_a_repaired_header() -> None:
    text = '<|channel|>commentary to=functions.read code extra<|message|>{"path":"a"}<|call|>'
    completion = parse("openai", text, strict=True)
    assert not completion.tool_calls
    assert completion.content == text


# -- writing ----------------------------------------------------------------------------------------------------------

CANONICAL = {
    # The recipient is where the chat template puts it. Sampled headers also have it after the channel.
    "openai": (
        f"<|channel|>analysis<|message|>R<|end|>{START}<|channel|>commentary<|message|>C<|end|>{START}"
        f' to=functions.read<|channel|>commentary json<|message|>{{"path": "ä", "lines": 3}}<|call|>{START}'
        " to=functions.ping<|channel|>commentary json<|message|>{}"
    ),
    # As in trl's template for Muse Glimmer, except for the content, which the template drops beside calls.
    "muse": (
        f" to=self<|message|>R<|eom|>{START} to=commentary<|message|>C<|eom|>{START} to=read<|message|>"
        '<atem:function_calls>\n<atem:invoke name="read">\n<atem:parameter name="path">ä</atem:parameter>\n'
        '<atem:parameter name="lines">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
        f'{START} to=ping<|message|><atem:function_calls>\n<atem:invoke name="ping">\n</atem:invoke>\n'
        "</atem:function_calls>"
    ),
    "inkling": (
        "<|content_thinking|>R<|end_message|><|message_model|><|content_text|>C<|end_message|><|message_model|>read"
        f'{INVOKE}{{"name":"read","args":{{"path":"ä","lines":3}}}}<|end_message|><|message_model|>ping'
        f'{INVOKE}{{"name":"ping","args":{{}}}}<|end_message|>'
    ),
    "kimi_k3": (
        "<|open|>think<|sep|>R<|close|>think<|sep|><|open|>response<|sep|>C<|close|>response<|sep|>"
        + tools(
            call(argument("path", "string", "ä") + argument("lines", "number", "3")),
            call(name="ping").replace('index="1"', 'index="2"'),
        )
    ),
}


@pytest.mark.parametrize("name", CANONICAL)
def test_canonical_text_is_written_as_it_was(name: str) -> None:
    completion = parse(name, CANONICAL[name])
    assert seen(completion) == ("C", "R", [("ok", "read", {"path": "ä", "lines": 3}), ("ok", "ping", {})])
    rendered = get_parser(name).render(completion.content, completion.reasoning, completion.tool_calls, TOOLS)
    assert rendered == CANONICAL[name]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("openai", "<|channel|>final<|message|>C"),
        ("muse", " to=user<|message|>C"),
        ("inkling", "<|content_text|>C<|end_message|>"),
    ],
)
def test_an_answer_without_calls(name: str, text: str) -> None:
    assert get_parser(name).render("C") == text
    assert parse(name, text).content == "C"


def test_an_answer_may_end_in_a_marker() -> None:
    assert get_parser("openai").render("End it by <|call|>") == "<|channel|>final<|message|>End it by <|call|>"


words = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="<"), min_size=1).filter(str.strip)
arguments = st.fixed_dictionaries(
    {"path": words},
    optional={"lines": st.integers(), "options": st.dictionaries(words, st.none() | st.booleans() | words)},
)


@given(st.sampled_from(sorted(CANONICAL)), words, words, st.lists(arguments, max_size=3))
def test_a_written_turn_is_read_back(name: str, content: str, reasoning: str, calls: list[dict[str, object]]) -> None:
    requested = [
        {"id": str(index), "function": {"name": "read", "arguments": values}} for index, values in enumerate(calls)
    ]
    completion = parse(name, get_parser(name).render(content, reasoning, requested, TOOLS))
    assert seen(completion) == (content, reasoning, [("ok", "read", values) for values in calls])


# -- streams ----------------------------------------------------------------------------------------------------------

PIECES = {
    "openai": [
        *(START, "<|start|>", "<|channel|>", "analysis", "commentary", "final", " to=functions.read", " to=user"),
        *(
            "<|constrain|>",
            "json",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            '{"path": "a"}',
            '{"path": "a',
            "}",
        ),
        *(f"{READ}{{}}<|call|>", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "</s>"),
    ],
    "muse": [
        *(
            START,
            "<|start|>",
            " to=self",
            " to=user",
            " to=read",
            " to=commentary",
            "<|message|>",
            "<|eom|>",
            "<|eot|>",
        ),
        *(atem(), "<atem:function_calls>", '<atem:invoke name="read">', "</atem:invoke>", "</atem:function_calls>"),
    ],
    "inkling": [
        *("<|message_model|>", "read", "<|content_text|>", "<|content_thinking|>", INVOKE, "<|end_message|>"),
        *(
            '{"name":"read","args":{"path":"a"}}',
            '{"name":"read","args":{"path":"a',
            "}",
            "<|content_model_end_sampling|>",
        ),
    ],
    "kimi_k3": [
        *(
            "<|open|>",
            "<|close|>",
            "<|sep|>",
            "think",
            "response",
            "tools",
            "call",
            "argument",
            '<|open|>call tool="read"<|sep|>',
        ),
        *("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        *("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|close|>call<|sep|>", "<|close|>argument<|sep|>"),
        *('<|open|>argument key="path" type="string"<|sep|>', '<|open|>argument key="lines" type="number"<|sep|>', "3"),
        *('<|open|>json type="object"<|sep|>', '{"path": "a"}', "<|close|>json<|sep|>", "<|close|>message<|sep|>"),
    ],
}


@st.composite
def soups(draw: st.DrawFn) -> tuple[str, str]:
    """A format's markers and words in any order, or canonical text that is cut and patched."""
    name = draw(st.sampled_from(sorted(PIECES)))
    pieces = st.sampled_from([*PIECES[name], " ", "\n", "x", "ä", "<", "<|", "Sure. "])
    if draw(st.booleans()):
        return name, "".join(draw(st.lists(pieces, max_size=16)))
    text = CANONICAL[name]
    start, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return name, draw(st.sampled_from([text[:start], text[start:], text[:start] + draw(pieces) + text[end:]]))


@settings(max_examples=some(300))
@given(soups(), st.lists(st.integers(1, 30), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_a_stream_ends_in_the_result_of_parse(
    soup: tuple[str, str], sizes: list[int], opened: bool, strict: bool
) -> None:
    name, text = soup
    parser = get_parser(name)
    stream = parser.stream(TOOLS, prompt_opened_reasoning=opened, strict=strict)
    events, position, turn = [], 0, 0
    while position < len(text):
        events += stream.feed(text[position : position + sizes[turn % len(sizes)]])
        position += sizes[turn % len(sizes)]
        turn += 1
    completion = stream.finish()
    events += stream.last_events
    assert completion == parser.parse(text, TOOLS, prompt_opened_reasoning=opened, strict=strict)
    assert ("".join(event.text for event in events if isinstance(event, ContentDelta)) or None) == completion.content
    assert (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)) or None
    ) == completion.reasoning
    assert [event.call for event in events if isinstance(event, CallEnd)] == list(completion.attempts)
    for index, attempt in enumerate(completion.attempts):
        assert attempt.raw == text[attempt.span.start : attempt.span.end]
        if attempt.status is CallStatus.OK:
            fragments = [e.fragment for e in events if isinstance(e, ArgumentsDelta) and e.index == index]
            assert json.loads("".join(fragments)) == attempt.arguments


@pytest.mark.parametrize("name", CANONICAL)
def test_half_a_call_is_not_a_call(name: str) -> None:
    text = CANONICAL[name]
    whole = parse(name, text).tool_calls
    for end in range(len(text)):
        calls = parse(name, text[:end]).tool_calls
        assert [(call.name, call.arguments) for call in calls] == [
            (call.name, call.arguments) for call in whole[: len(calls)]
        ]


@pytest.mark.parametrize(
    ("name", "head", "value", "expected"),
    [
        ("openai", READ, '{"path": "abc', '{"path": "abc'),
        ("inkling", f"read{INVOKE}", '{"name":"read","args":{"path":"abc', '{"path":"abc'),
        (
            "muse",
            " to=read<|message|>",
            '<atem:function_calls>\n<atem:invoke name="read">\n<atem:parameter name="path">abc',
            '{"path": "abc',
        ),
        ("kimi_k3", "<|open|>tools<|sep|>", call(argument("path", "string", "abc"))[:-41], '{"path": "abc'),
    ],
)
def test_a_call_is_streamed_while_it_is_written(name: str, head: str, value: str, expected: str) -> None:
    stream = get_parser(name).stream(TOOLS)
    events = [*stream.feed(head), *stream.feed(value)]
    assert [event.name for event in events if isinstance(event, CallStart)] == ["read"]
    assert "".join(event.fragment for event in events if isinstance(event, ArgumentsDelta)) == expected


def test_text_is_streamed_at_once() -> None:
    stream = get_parser("openai").stream()
    assert stream.feed("<|channel|>analysis<|message|>Let me") == [ReasoningDelta("Let me")]
    assert stream.feed(f"<|end|>{START}<|channel|>final<|message|>Hi") == [ContentDelta("Hi")]


@pytest.mark.parametrize("length", [511, 512, 513])
def test_a_tag_without_end_reads_the_same_in_pieces(length: int) -> None:
    text = "<|open|>" + 'call tool="'.ljust(length, "a")
    parser = get_parser("kimi_k3")
    stream = parser.stream(TOOLS)
    for character in text:
        stream.feed(character)
    found, whole = stream.finish(), parser.parse(text, TOOLS)
    assert (found.content, found.finish) == (whole.content, whole.finish)
    assert [attempt.status for attempt in found.attempts] == [attempt.status for attempt in whole.attempts]


def test_ends_of_turns_in_the_middle_of_a_text_are_text() -> None:
    text = "<|im_end|>" * 50_000 + "x"
    assert get_parser("openai").parse(text).content == text
