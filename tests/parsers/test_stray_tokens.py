"""Tokens that have no meaning where they were sampled: no call runs with one in it, and no text hides one.

Text is never joined over such a token: `run_`, an end of text, `cmd` are no call of `run_cmd`.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import BPE, sentencepiece_like

from tests.run import some
from tool_call_parsers import CallStatus, ParsedCompletion, get_parser, list_parsers
from tool_call_parsers.tokens import mark
from tool_call_parsers.types import CALLABLE

ROLE = BPE.convert_tokens_to_ids("<|im_start|>")
END = BPE.convert_tokens_to_ids("<|im_end|>")
UNUSED = len(BPE)
STRAYS = (ROLE, END, UNUSED, len(BPE) + 50, 1_000_000)
TOOL = {"type": "function", "function": {"name": "run_cmd", "parameters": {
    "type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}}}}  # fmt: skip
CALL = {"id": "call00001", "function": {"name": "run_cmd", "arguments": {"cmd": "rm abc", "n": 42}}}
OTHER = {"id": "call00002", "function": {"name": "run_cmd", "arguments": {"cmd": "ls", "n": 7}}}
FORMATS = {name: get_parser(name, reasoning="auto", tokenizer=BPE) for name in list_parsers()}


def ids(*parts: str | int) -> list[int]:
    out: list[int] = []
    for part in parts:
        out += [part] if isinstance(part, int) else BPE.encode(part, add_special_tokens=False)
    return out


def shown(parsed: ParsedCompletion) -> str:
    return "".join(
        [parsed.content or "", parsed.reasoning or "", *(attempt.raw for attempt in parsed.attempts)],
    )


def plain(parsed: ParsedCompletion) -> Any:
    """Without the ids of calls, which are random where the format has none."""
    calls = [[(c.name, c.arguments, c.status, c.error, c.raw, c.span) for c in each]
             for each in (parsed.tool_calls, parsed.attempts)]  # fmt: skip
    return parsed.content, parsed.reasoning, parsed.finish, calls


@pytest.mark.sample(200)
@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("where", ["run_", "rm a", "4"])
def test_a_call_with_a_stray_token_is_a_failed_attempt(name: str, where: str, stray: int) -> None:
    parser = FORMATS[name]
    text = parser.render(None, None, [CALL], [TOOL])
    at = text.rindex(where) + len(where)  # Inkling's header has the name too
    assert parser.parse(None, [TOOL], token_ids=ids(text)).tool_calls, "the call itself"
    parsed = parser.parse(None, [TOOL], token_ids=ids(text[:at], stray, text[at:]))
    assert not parsed.tool_calls
    failed = [each for each in parsed.attempts if each.status not in (*CALLABLE, CallStatus.IN_REASONING)]
    assert failed and all(each.error for each in failed)
    assert mark(stray) in (parsed.content or "")


@settings(max_examples=some(400), deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.booleans(), st.data())
def test_no_stray_token_is_in_a_call_or_hidden(name: str, thinks: bool, data: st.DataObject) -> None:
    parser = FORMATS[name]
    thinks = thinks and (parser.reasoning is not None or parser.format.channels)
    text = parser.render("I look.", "Hm." if thinks else None, [CALL, OTHER], [TOOL])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=1, max_size=3)))
    strays = [data.draw(st.sampled_from(STRAYS)) for _ in cuts]
    parts: list[str | int] = []
    for start, end, stray in zip([0, *cuts], cuts, strays, strict=False):
        parts += [text[start:end], stray]
    token_ids = ids(*parts, text[cuts[-1] :])
    parsed = parser.parse(None, [TOOL], token_ids=token_ids)
    last = len(token_ids)
    while last and token_ids[last - 1] == END:
        last -= 1
    places = [place for place, token in enumerate(token_ids[:last]) if token in STRAYS]
    for call in parsed.tool_calls:
        _, _, start, end = call.span
        assert start is not None and end is not None
        assert not [place for place in places if start <= place < end]
        assert (call.name, call.arguments) in [("run_cmd", each["function"]["arguments"]) for each in (CALL, OTHER)]
    for place in places:
        assert mark(token_ids[place]) in shown(parsed)
    if parser.parse(text, [TOOL]).tool_calls:  # some formats have no text beside calls
        assert parsed.attempts


@settings(max_examples=some(300), deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.integers(0, 200), max_size=3), st.data())
def test_a_stream_with_stray_tokens_is_read_as_the_whole(name: str, at: list[int], data: st.DataObject) -> None:
    parser = FORMATS[name]
    text = parser.render("I look.", None, [CALL, OTHER], [TOOL])
    cuts = sorted(min(place, len(text)) for place in at)
    token_ids: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        token_ids += ids(text[start:end], *([data.draw(st.sampled_from(STRAYS))] if end < len(text) else []))
    given_text = BPE.decode(token_ids, skip_special_tokens=False)
    whole = parser.parse(given_text, [TOOL], token_ids=token_ids)
    stream = parser.stream([TOOL])
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=30))
    sent = begun = 0
    while begun < len(token_ids):
        size = sizes[begun % len(sizes)]
        begun += size
        # Servers hold back the beginning of a character.
        so_far = BPE.decode(token_ids[:begun], skip_special_tokens=False)
        upto = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(so_far, given_text, strict=False)))
        stream.feed(given_text[sent:upto], token_ids[begun - size : begun])
        sent = upto
    assert plain(stream.finish()) == plain(whole)


@settings(max_examples=some(300), deadline=None)
@given(st.lists(st.one_of(st.integers(0, len(BPE) + 3), st.sampled_from(STRAYS)), max_size=30))
@example([*ids("4"), 1_000_000, *ids("2")])
def test_the_text_of_a_completion_has_each_token_or_its_mark(token_ids: list[int]) -> None:
    aligned = FORMATS["hermes"].tokens.align(None, token_ids)
    last = len(token_ids)
    while last and (token_ids[last - 1] == END or not BPE.decode(token_ids[last - 1 : last]).strip()):
        if (token_ids[last - 1] in STRAYS and token_ids[last - 1] != END) or token_ids[last - 1] >= len(BPE):
            break
        last -= 1
    expected, run = "", []
    for place, token in enumerate(token_ids):
        stray = token >= len(BPE) or token == ROLE or (token == END and place < last)
        if stray:
            expected += BPE.decode(run, skip_special_tokens=False) + mark(token)
            run = []
        else:
            run.append(token)
    expected += BPE.decode(run, skip_special_tokens=False)
    assert aligned.visible == expected


def test_the_ends_of_a_turn_at_the_end_are_no_text() -> None:
    parser = FORMATS["hermes"]
    for tail in ((END,), (END, END), (END, "\n"), (END, "\n", END)):
        parsed = parser.parse(None, [TOOL], token_ids=ids("Noon.", *tail))
        assert parsed.content == "Noon."
    parsed = parser.parse(None, [TOOL], token_ids=ids("Noon.", END, "\n", ROLE, "user\nWhy?", END))
    assert parsed.content == f"Noon.{mark(END)}\n{mark(ROLE)}user\nWhy?"


def test_bytes_of_a_character_are_not_joined_over_an_id_without_text() -> None:
    parser = FORMATS["hermes"]
    first, *rest = BPE.encode("🙂", add_special_tokens=False)
    parsed = parser.parse(None, [TOOL], token_ids=[*ids("a"), first, UNUSED, *rest])
    assert parsed.content is not None and "🙂" not in parsed.content and mark(UNUSED) in parsed.content


def test_a_sentencepiece_text_keeps_its_blanks_beside_a_mark() -> None:
    tokenizer = sentencepiece_like()
    parser = get_parser("hermes", tokenizer=tokenizer)
    words = tokenizer.encode("the tool", add_special_tokens=False)
    parsed = parser.parse(None, token_ids=[*words, 5_000, *words])
    assert parsed.content == f"the tool{mark(5_000)} the tool"


def test_a_text_that_spells_a_mark_is_text() -> None:
    parser = FORMATS["hermes"]
    spelled = parser.render(None, None, [{"function": {"name": "run_cmd", "arguments": {"cmd": mark(7)}}}], [TOOL])
    (call,) = parser.parse(None, [TOOL], token_ids=ids(spelled)).tool_calls
    assert call.arguments == {"cmd": mark(7)} and call.status is CallStatus.OK
