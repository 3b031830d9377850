"""Calls as tags: ends of values, data, cuts and repairs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_testing.parser_checks import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    event_problems,
    facts,
    pieces_of,
    streamed,
    tool,
)
from tool_call_parsers import CallStatus, ParsedCompletion, get_parser

TOOLS = [
    tool("note", title=STRING, body=STRING, count=INTEGER, raw=BOOLEAN, scale=NUMBER),
    tool("ping"),
    tool("pack", tags={"type": "array", "items": STRING}, options={"type": "object"}, items={"type": "array"}),
]
TOOLS[0]["function"]["parameters"]["required"] = ["title"]


@dataclass(frozen=True)
class Spelling:
    """A format's tags, written independently of its grammar."""

    parser: str
    wrap: str
    call: str
    parameter: str
    value_end: str
    end: str
    unwrap: str
    frame: str = ""
    """Around values."""
    gap: str = "\n"
    """After end tags."""
    open_end: bool = False
    """The end tag of a call may be missing at the end of the text."""

    def open_value(self, key: str, text: str = "0") -> str:
        string = key not in ("count", "raw", "scale") or not is_json(text)
        return self.parameter.replace("KEY", key).replace("STRING", str(string).lower()) + self.frame

    def close_value(self, key: str) -> str:
        return self.frame + self.value_end.replace("KEY", key) + self.gap

    def value(self, key: str, text: str) -> str:
        return self.open_value(key, text) + text + self.close_value(key)

    def bare(self, name: str, values: Iterable[tuple[str, str]] = ()) -> str:
        return self.call.replace("NAME", name) + "".join(self.value(*pair) for pair in values) + self.end

    def whole(self, name: str, values: Iterable[tuple[str, str]] = ()) -> str:
        return self.wrap + self.bare(name, values) + self.unwrap

    def parse(self, text: str, **options: Any) -> ParsedCompletion:
        """The result for a text, the same for every cut that is tried."""
        parser = get_parser(self.parser)
        whole = parser.parse(text, TOOLS, **options)
        for cuts in (range(len(text)), range(0, len(text), 7)):
            found, events = streamed(parser, pieces_of(text, cuts), TOOLS, **options)
            assert facts(found) == facts(whole)
            assert not event_problems(events, found)
        return whole


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _function(parser: str, wrap: str = "tool_call", frame: str = "") -> Spelling:
    return Spelling(
        parser,
        f"<{wrap}>\n",
        "<function=NAME>\n",
        "<parameter=KEY>",
        "</parameter>",
        "</function>",
        f"\n</{wrap}>",
        frame,
    )


def _pairs(parser: str, gap: str, wrap: str = "", unwrap: str = "", sep: str = "", prefix: str = "") -> Spelling:
    return Spelling(
        parser,
        wrap,
        f"<{prefix}tool_call>NAME{sep}{gap}",
        f"<{prefix}arg_key>KEY</{prefix}arg_key>{gap}<{prefix}arg_value>",
        f"</{prefix}arg_value>",
        f"</{prefix}tool_call>",
        unwrap,
        gap=gap,
        open_end=not wrap,  # a missing wrapper says nothing about the end of the call
    )


def _invoke(parser: str, wrap: str, prefix: str = "", typed: str = "") -> Spelling:
    return Spelling(
        parser,
        f"<{wrap}>\n",
        f'<{prefix}invoke name="NAME">\n',
        f'<{prefix}parameter name="KEY"{typed}>',
        f"</{prefix}parameter>",
        f"</{prefix}invoke>",
        f"\n</{wrap}>",
    )


M3 = "]<]minimax[>["
SPELLINGS = [
    _function("qwen3_coder", frame="\n"),
    _function("step3p5", frame="\n"),
    _function("mimo"),
    _function("seed_oss", "seed:tool_call"),
    _pairs("glm45", "\n"),
    _pairs("glm47", ""),
    _pairs("ling3", ""),
    _pairs("poolside_v1", "\n"),
    _pairs("hy_v3", "\n", "<tool_calls>\n", "\n</tool_calls>", "<tool_sep>"),
    _pairs("hy_v4", "", "<tool_calls>", "</tool_calls>"),
    _pairs("longcat", "\n", prefix="longcat_"),
    _pairs("k2_horizon", "", "<ifm|tool_calls>", "</ifm|tool_calls>", prefix="ifm|"),
    _invoke("minimax_m2", "minimax:tool_call"),
    _invoke("dots", "dots_function_call"),
    _invoke("deepseek_v32", "｜DSML｜function_calls", "｜DSML｜", ' string="STRING"'),
    _invoke("deepseek_v4", "｜DSML｜tool_calls", "｜DSML｜", ' string="STRING"'),
    _invoke("deepseek_v41", "｜DSML｜ calls", "｜DSML｜ ", ' string="STRING"'),
    Spelling(
        "step3",
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>",
        '<steptml:invoke name="NAME">',
        '<steptml:parameter name="KEY">',
        "</steptml:parameter>",
        "</steptml:invoke>",
        "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
        gap="",
        open_end=True,
    ),
    Spelling(
        "minicpm5", "", '<function name="NAME">', '<param name="KEY">', "</param>", "</function>", "", "", "", True
    ),
    Spelling(
        "minimax_m3",
        f"{M3}<tool_call>\n",
        f'{M3}<invoke name="NAME">',
        f"{M3}<KEY>",
        f"{M3}</KEY>",
        f"{M3}</invoke>",
        f"\n{M3}</tool_call>",
        gap="",
    ),
]
EVERY = pytest.mark.parametrize("tags", SPELLINGS, ids=lambda tags: tags.parser)
FUNCTIONS = pytest.mark.parametrize(
    "tags", [tags for tags in SPELLINGS if "=NAME" in tags.call], ids=lambda tags: tags.parser
)
INVOKES = pytest.mark.parametrize(
    "tags", [tags for tags in SPELLINGS if 'name="KEY"' in tags.parameter], ids=lambda tags: tags.parser
)
PAIRS = pytest.mark.parametrize(
    "tags", [tags for tags in SPELLINGS if "arg_key" in tags.parameter], ids=lambda tags: tags.parser
)


def calls(found: ParsedCompletion) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in found.tool_calls]


def statuses(found: ParsedCompletion) -> list[str]:
    return [str(call.status) for call in found.attempts]


# -- values ------------------------------------------------------------------------------------------------------------


@EVERY
def test_a_call_in_content(tags: Spelling) -> None:
    text = "Well.\n\n" + tags.whole("note", [("title", "a"), ("count", "12345678901234567890"), ("raw", "true")])
    found = tags.parse(text + "\nDone.", strict=True)
    assert calls(found) == [("note", {"title": "a", "count": 12345678901234567890, "raw": True})]
    assert found.content is not None
    assert found.content.split() == ["Well.", "Done."]
    call = found.attempts[0]
    assert (
        call.raw.strip()
        == tags.whole("note", [("title", "a"), ("count", "12345678901234567890"), ("raw", "true")])[
            : len(call.raw)
        ].strip()
    )


@pytest.mark.sample(80)
@EVERY
@pytest.mark.parametrize(
    "value",
    ["", " ", "\n", "\n\n a \n\n", " a ", "a &amp; <b>c</b> < d && \\n", "null", "007", '"q"', "{'a': 1}", "é🌍\u2028"],
)
def test_strings_are_verbatim(tags: Spelling, value: str) -> None:
    assert calls(tags.parse(tags.whole("note", [("title", value)]), strict=True)) == [("note", {"title": value})]


@EVERY
def test_values_that_do_not_fit_their_schema_stay_text(tags: Spelling) -> None:
    found = tags.parse(tags.whole("note", [("title", "t"), ("count", "three"), ("scale", "1e999"), ("x", "5")]))
    assert calls(found) == [("note", {"title": "t", "count": "three", "scale": "1e999", "x": "5"})]


@EVERY
def test_tags_inside_values_are_data(tags: Spelling) -> None:
    end = tags.value_end.replace("KEY", "body")
    for value in (
        f"doc says {end} ends it; keep this tail",
        f"{end} at first, {end}{end} twice",
        f"a {tags.wrap.strip()} b",
        f"a {tags.end} b",
        f"a {tags.unwrap.strip() or tags.end} b",
        f"a {tags.end}{tags.unwrap} b",
        f"a {tags.call.replace('NAME', 'f').strip()} b",
        f"a {tags.open_value('zz')} b",
        f"a {end} b {tags.open_value('count')} c",
        f"a {end[:-1]} b <",
    ):
        found = tags.parse(tags.whole("note", [("title", "t"), ("body", value)]))
        assert calls(found) == [("note", {"title": "t", "body": value})], value
        assert found.content is None


@EVERY
def test_a_whole_call_inside_a_value_is_data(tags: Spelling) -> None:
    inside = tags.whole("ping") + "\nand " + tags.whole("note", [("title", "x"), ("body", "y")])
    for value in (
        f"Like this: {inside} or so.",
        f"{inside}\n{inside}",
        f"1.\n{tags.bare('note', [('title', 'x')])} 2.",
    ):
        found = tags.parse(tags.whole("note", [("body", value), ("title", "t")]) + tags.gap + tags.whole("ping"))
        assert calls(found) == [("note", {"body": value, "title": "t"}), ("ping", {})], value


@EVERY
def test_a_value_that_only_quotes_the_beginning_of_a_call(tags: Spelling) -> None:
    value = "Write " + tags.call.replace("NAME", "note") + tags.open_value("zz") + " and go on"
    text = tags.whole("note", [("title", value)]) + tags.gap
    for following in ("", tags.whole("ping"), tags.whole("note", [("title", "b")])):
        found = tags.parse(text + following)
        assert calls(found)[0] == ("note", {"title": value})
        assert len(calls(found)) == 1 + bool(following)


@EVERY
def test_the_last_of_doubled_parameters_counts(tags: Spelling) -> None:
    text = tags.whole("note", [("title", "a"), ("body", "b"), ("title", "c")])
    assert calls(tags.parse(text)) == [("note", {"body": "b", "title": "c"})]


@EVERY
def test_names_with_dots_and_dashes(tags: Spelling) -> None:
    found = tags.parse(tags.whole("mcp.fs-read__v2", [("max-n", "1"), ("a.b", "")]))
    assert calls(found) == [("mcp.fs-read__v2", {"max-n": "1", "a.b": ""})]
    assert statuses(found) == ["unknown_tool"]


# -- cut and incomplete calls -----------------------------------------------------------------------------------------


@EVERY
def test_a_cut_call_is_not_a_call(tags: Spelling) -> None:
    first = tags.whole("ping")
    whole = tags.whole("note", [("title", "rm -rf /tmp/x"), ("body", "b")])
    text = first + tags.gap + whole
    begin = len(first) + len(tags.gap)
    parser = get_parser(tags.parser)
    for end in range(begin, len(text)):
        found = parser.parse(text[:end], TOOLS)
        assert calls(found)[:1] == [("ping", {})]
        rest = calls(found)[1:]
        # With its pairs complete, a call may count without its end tag, if the format allows it.
        assert rest in ([], [("note", {"title": "rm -rf /tmp/x", "body": "b"})]) or (
            tags.open_end and rest == [("note", {"title": "rm -rf /tmp/x"})]
        )
        if rest:
            assert tags.close_value("body").strip() in text[begin:end] or tags.open_end
        elif end - begin > len(tags.wrap + tags.call.split("NAME")[0]):
            assert found.attempts[-1].status is CallStatus.INCOMPLETE, text[begin:end]
            assert text[begin:end].strip() in (found.content or "")


@EVERY
def test_the_end_of_the_text_inside_a_value(tags: Spelling) -> None:
    head = tags.wrap + tags.call.replace("NAME", "note") + tags.value("title", "t")
    for tail in (tags.open_value("body"), tags.open_value("body") + "a", tags.open_value("body") + "a<", "<"):
        found = tags.parse(head + tail)
        assert statuses(found) == ["incomplete"]
        assert found.content == head + tail


@EVERY
def test_required_parameters_must_be_there_without_an_end_tag(tags: Spelling) -> None:
    text = tags.wrap + tags.call.replace("NAME", "note")
    found = tags.parse(text + tags.value("body", "b"))
    assert not found.tool_calls
    assert statuses(found) == ["incomplete"]
    assert bool(tags.parse(text + tags.value("title", "b")).tool_calls) is tags.open_end


@EVERY
def test_the_wrapper_may_be_missing(tags: Spelling) -> None:
    text = "So: " + tags.bare("note", [("title", "a")])
    assert calls(tags.parse(text)) == [("note", {"title": "a"})]
    assert calls(tags.parse(tags.wrap + tags.bare("note", [("title", "a")]))) == [("note", {"title": "a"})]
    found = tags.parse(tags.wrap + tags.bare("note", [("title", "a")]) + tags.bare("ping") + tags.unwrap)
    assert calls(found) == [("note", {"title": "a"}), ("ping", {})]
    assert found.content is None


@EVERY
def test_prose_about_tags(tags: Spelling) -> None:
    opener = tags.wrap.strip() or tags.call.split("NAME")[0]
    for text in (
        f"The model writes {opener} and then the call. I will not.",
        f"First {tags.call.split('NAME')[0]} and then some.",
        f"{tags.call.replace('NAME', 'x').strip()} opens a call, and that is all.",
    ):
        found = tags.parse(text)
        assert found.content == text
        assert not found.tool_calls


@EVERY
def test_a_bad_sibling_takes_no_call_away(tags: Spelling) -> None:
    good = tags.whole("ping")
    nameless = tags.whole("", [("title", "x")])
    found = tags.parse(nameless + tags.gap + good)
    assert calls(found) == [("ping", {})]
    assert statuses(found) == ["missing_name", "ok"]
    unclosed = tags.wrap + tags.call.replace("NAME", "note") + tags.open_value("title") + "Os"
    if tags.unwrap:
        found = tags.parse(unclosed + tags.unwrap + tags.gap + good)
        assert calls(found) == [("ping", {})]
        assert statuses(found) == ["malformed", "ok"]


# -- repairs ----------------------------------------------------------------------------------------------------------


@EVERY
def test_missing_and_doubled_end_tags_of_values(tags: Spelling) -> None:
    want = [("note", {"title": "a b", "count": 3})]
    head = tags.wrap + tags.call.replace("NAME", "note") + tags.open_value("title") + "a b"
    assert calls(tags.parse(head + "\n" + tags.value("count", "3") + tags.end + tags.unwrap)) == want
    text = tags.wrap + tags.call.replace("NAME", "note") + tags.value("title", "a b") + tags.open_value("count") + "3\n"
    assert calls(tags.parse(text + tags.end + tags.unwrap)) == want
    doubled = tags.value("title", "a b") + tags.value_end.replace("KEY", "title") + "\n" + tags.value("count", "3")
    text = tags.wrap + tags.call.replace("NAME", "note") + doubled + tags.value_end.replace("KEY", "count")
    found = tags.parse(text + tags.end + tags.unwrap)
    assert calls(found) == want
    assert statuses(found) == ["repaired"]


@EVERY
def test_text_between_parameters_is_dropped(tags: Spelling) -> None:
    text = tags.wrap + tags.call.replace("NAME", "note") + tags.value("title", "a") + "now the count:\n"
    found = tags.parse(text + tags.value("count", "3") + tags.end + tags.unwrap)
    assert calls(found) == [("note", {"title": "a", "count": 3})]
    assert statuses(found) == ["repaired"]


@EVERY
def test_a_missing_end_tag_of_a_call_before_the_next(tags: Spelling) -> None:
    text = tags.wrap + tags.call.replace("NAME", "note") + tags.value("title", "a")
    found = tags.parse(text + tags.whole("ping"))
    assert calls(found) == [("note", {"title": "a"}), ("ping", {})]
    assert statuses(found) == ["repaired", "ok"]


@FUNCTIONS
def test_missing_angle_brackets(tags: Spelling) -> None:
    text = tags.wrap + "<function=note\n<parameter=title\na\n</parameter>\n" + tags.value("body", "b") + tags.end
    found = tags.parse(text + tags.unwrap)
    assert calls(found) == [("note", {"title": "a", "body": "b"})]
    assert statuses(found) == ["repaired"]
    text = tags.wrap + "<function=note>\n<parameter=not a key\na\n</parameter>\n" + tags.end + tags.unwrap
    assert not tags.parse(text).tool_calls
    assert calls(tags.parse(tags.whole(" note ", [(" title ", "a")]))) == [("note", {"title": "a"})]


@FUNCTIONS
def test_framed_values_that_end_with_an_end_tag(tags: Spelling) -> None:
    if tags.frame:
        value = "see </parameter>"
        assert calls(tags.parse(tags.whole("note", [("title", value)]))) == [("note", {"title": value})]


@INVOKES
def test_attributes_as_models_write_them(tags: Spelling) -> None:
    text = tags.whole("note", [("title", "a")])
    assert calls(tags.parse(text.replace('name="', 'name = "'), strict=True)) == [("note", {"title": "a"})]
    glued = text.replace(" name=", "name=")
    unclosed = tags.wrap + tags.call.replace("NAME", "note").replace(">", "") + tags.value("title", "a") + tags.end
    for spelled in (glued, unclosed, text.replace('"', "'"), text.replace('"', "")):
        found = tags.parse(spelled)
        assert calls(found) == [("note", {"title": "a"})]
        assert statuses(found) == ["repaired"]
    closed = tags.wrap + tags.call.replace('NAME">', 'ping"/>') + tags.unwrap
    assert calls(tags.parse(closed)) == [("ping", {})]


@PAIRS
def test_keys_without_values(tags: Spelling) -> None:
    key = tags.parameter.split("KEY")
    dangling = f"{key[0]}count{key[1].split('<', 2)[1].join(('<', ''))}"
    text = tags.wrap + tags.call.replace("NAME", "note") + tags.value("title", "a") + dangling + tags.gap
    assert calls(tags.parse(text + tags.end + tags.unwrap)) == [("note", {"title": "a"})]
    assert calls(tags.parse(text + tags.value("body", "b") + tags.end)) == [("note", {"title": "a", "body": "b"})]
    found = tags.parse(text)
    assert statuses(found) == ["incomplete"]


@PAIRS
def test_an_empty_block_names_no_tool(tags: Spelling) -> None:
    found = tags.parse(tags.whole(""))
    assert statuses(found) == ["missing_name"]
    assert found.content == tags.whole("")


@EVERY
def test_json_instead_of_tags(tags: Spelling) -> None:
    own = tags.parser in ("longcat", "k2_horizon")
    opener = tags.wrap if not own else tags.wrap + tags.call.split("NAME")[0]
    if opener and tags.parser != "step3":
        text = opener + '{"name": "note", "arguments": {"title": "a"}}' + (tags.end if own else "") + tags.unwrap
        found = tags.parse(text)
        assert calls(found) == [("note", {"title": "a"})]
        assert statuses(found) == ["ok" if own else "repaired"]
    if "NAME" in tags.call and tags.parser != "hy_v3":
        text = tags.wrap + tags.call.replace("NAME", "note") + '{"title": "a", "count": 3}' + tags.end + tags.unwrap
        found = tags.parse(text)
        assert calls(found) == [("note", {"title": "a", "count": 3})]
        assert statuses(found) == ["repaired"]


@EVERY
def test_an_unclosed_value_swallows_no_sibling(tags: Spelling) -> None:
    begin = tags.wrap + tags.call.replace("NAME", "note") + tags.open_value("title") + "Os\n"
    sibling = tags.whole("note", [("title", "b"), ("body", "c")])
    for end in ("", "<|im_end|>", "\n"):
        found = tags.parse(begin + sibling + end)
        assert calls(found) == [("note", {"title": "b", "body": "c"})]
        assert statuses(found) == ["malformed", "ok"]
        assert "Os" in (found.content or "")
    assert calls(tags.parse(begin + tags.whole("ping"))) == [("ping", {})]
    many = tags.parse(tags.whole("ping") + "\n" + begin + begin + sibling + "\n" + tags.whole("ping"))
    assert statuses(many) == ["ok", "malformed", "malformed", "ok", "ok"]
    # Cut, it may also be a text that shows calls.
    assert not tags.parse(begin + sibling + "\nand").tool_calls


@EVERY
def test_a_cut_text_that_shows_calls_holds_none(tags: Spelling) -> None:
    shown = "Write:\n" + tags.whole("note", [("title", "b")]) + "\nor\n" + tags.whole("ping") + "\nso."
    text = tags.wrap + tags.call.replace("NAME", "note") + tags.open_value("body") + shown
    parser = get_parser(tags.parser)
    for end in range(len(text)):
        # Directly after a whole block, nothing distinguishes it from one that follows an unclosed call.
        if not text[:end].rstrip().endswith((tags.unwrap.strip() or tags.end, "<｜tool_call_end｜>")):
            assert not parser.parse(text[:end], TOOLS).tool_calls, text[:end]


@EVERY
def test_text_after_the_last_value_is_dropped(tags: Spelling) -> None:
    text = tags.wrap + tags.call.replace("NAME", "note") + tags.value("title", "a") + "That is all.\n"
    found = tags.parse(text + tags.end + tags.unwrap)
    assert calls(found) == [("note", {"title": "a"})]
    assert statuses(found) == ["repaired"]


@EVERY
def test_the_end_of_the_turn_after_a_value_that_quotes_a_call(tags: Spelling) -> None:
    value = "Write " + tags.call.replace("NAME", "f").strip() + tags.open_value("zz") + " and go on"
    text = tags.whole("note", [("title", value)])
    for end in ("", "<|im_end|>", "\n<|im_end|>\n"):
        assert calls(tags.parse(text + end)) == [("note", {"title": value})]


@EVERY
@pytest.mark.parametrize("name", ["@@", "_", "--", "a\"b'", "a b"])
def test_invalid_names(tags: Spelling, name: str) -> None:
    for values in ([], [("title", "a")]):
        found = tags.parse(tags.whole(name, values) + tags.gap + tags.whole("ping"))
        assert calls(found) == [("ping", {})]
        assert statuses(found) == ["malformed", "ok"]
        assert tags.call.split("NAME")[0] + name in (found.content or "")
    tools = [*TOOLS, tool(name)]
    if not set(name) & set("\"' "):
        assert calls(get_parser(tags.parser).parse(tags.whole(name), tools)) == [(name, {})]


@EVERY
def test_a_parameter_without_a_name(tags: Spelling) -> None:
    found = tags.parse(tags.whole("note", [("", "x"), ("title", "a")]) + tags.gap + tags.whole("ping"))
    assert calls(found) == [("ping", {})]
    assert statuses(found) == ["malformed", "ok"]


_PIECES = st.sampled_from(
    ["wrap", "call", "open", "close", "value", "end", "unwrap", "whole", "cut", "a", " ", "\n", "<", "{", "<|im_end|>"]
)


@EVERY
@given(data=st.data())
def test_a_stream_ends_in_the_result_of_parse(tags: Spelling, data: st.DataObject) -> None:
    """Whole texts use a separate fast path, with the results of the other path."""
    pieces = data.draw(st.lists(_PIECES, max_size=12))
    keys = data.draw(st.lists(st.sampled_from(["title", "body", "count", "zz"]), min_size=12, max_size=12))
    spelled: dict[str, Callable[[str], str]] = {
        "wrap": lambda key: tags.wrap,
        "call": lambda key: tags.call.replace("NAME", "note"),
        "open": tags.open_value,
        "close": tags.close_value,
        "value": lambda key: tags.value(key, "1"),
        "end": lambda key: tags.end,
        "unwrap": lambda key: tags.unwrap,
        "whole": lambda key: tags.whole("note", [("title", "t"), (key, "x")]),
        "cut": lambda key: tags.end[: len(key)],
    }
    text = "".join(spelled[piece](key) if piece in spelled else piece for piece, key in zip(pieces, keys, strict=False))
    tags.parse(text)


# -- features of some formats -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
def test_dsml_types(parser: str) -> None:
    blank = " " if parser == "deepseek_v41" else ""
    tag = f"<｜DSML｜{blank}parameter name="

    def read(*values: str) -> ParsedCompletion:
        inside = "".join(f"{tag}{value}</｜DSML｜{blank}parameter>\n" for value in values)
        (tags,) = (tags for tags in SPELLINGS if tags.parser == parser)
        return tags.parse(f'{tags.wrap}<｜DSML｜{blank}invoke name="note">\n{inside}{tags.end}{tags.unwrap}')

    assert statuses(read('"count" string="true">7', '"title" string="false">"a"')) == ["ok"]
    found = read('"count" string="true">7', '"title" string="false">7', '"body" string="false">"a\\n"', '"raw">true')
    assert calls(found) == [("note", {"count": "7", "title": 7, "body": "a\n", "raw": True})]
    assert statuses(found) == ["repaired"]  # "raw" does not state its type
    assert statuses(read('"title" string="false">a')) == ["repaired"]  # nor is this JSON
    found = read('"arguments" string="false">{"title": "a", "count": 2}')
    assert calls(found) == [("note", {"title": "a", "count": 2})]
    assert statuses(found) == ["repaired"]
    assert calls(read('"arguments" string="true">x')) == [("note", {"arguments": "x"})]


def test_suffixed_tags() -> None:
    tags = _pairs("hy_v4", "", "<tool_calls>", "</tool_calls>")
    plain = "Hm." + tags.whole("note", [("title", "a <tool_call> b"), ("count", "2")]) + " So."
    suffixed = plain.replace("_call>", "_call:x>").replace("_calls>", "_calls:x>")
    suffixed = (
        suffixed.replace("_key>", "_key:x>").replace("_value>", "_value:x>").replace("a <tool_call:x>", "a <tool_call>")
    )
    for parser in ("hy_v3", "hy_v4"):
        for text in (plain, suffixed):
            found = Spelling(parser, "", "", "", "", "", "").parse(text)
            assert calls(found) == [("note", {"title": "a <tool_call> b", "count": 2})]
            assert found.content == "Hm. So."


def test_character_data_sections() -> None:
    tags = next(tags for tags in SPELLINGS if tags.parser == "minicpm5")
    for inside, value in (
        ("<![CDATA[]]>", ""),
        (" \n<![CDATA[ a </param></function> ]] > ]]>\n", " a </param></function> ]] > "),
        ("<![CDATA[a]]]]><![CDATA[>b]]>", "a]]>b"),
        ("<![CDATA[ not closed", "<![CDATA[ not closed"),
    ):
        assert calls(tags.parse(tags.whole("note", [("title", inside)]))) == [("note", {"title": value})]
    found = tags.parse(tags.whole("note", [("title", "t"), ("count", "<![CDATA[3]]>")]))
    assert calls(found) == [("note", {"title": "t", "count": 3})]


def test_every_open_section_is_data() -> None:
    tags = next(tags for tags in SPELLINGS if tags.parser == "minicpm5")
    values = [("title", "<![CDATA[a"), ("body", "<![CDATA[b")]
    assert calls(tags.parse(tags.whole("note", values))) == [("note", dict(values))]


def test_a_completion_has_few_suffixes() -> None:
    blocks = [f"<tool_call:{n}>ping</tool_call:{n}>" for n in range(20)]
    assert 0 < len(get_parser("hy_v4").parse("".join(blocks), TOOLS).tool_calls) < 20
    assert len(get_parser("hy_v4").parse(blocks[0] * 20, TOOLS).tool_calls) == 20


def test_wrappers_without_a_call_are_text() -> None:
    for parser, wrapper in (
        ("qwen3_coder", "<tool_call>"),
        ("hy_v3", "<tool_calls>"),
        ("dots", "<dots_function_call>"),
    ):
        tags = next(tags for tags in SPELLINGS if tags.parser == parser)
        for between in ("", "\n"):
            text = (wrapper + between) * 5 + "and so on. "
            found = tags.parse(text + tags.whole("ping"))
            assert calls(found) == [("ping", {})]
            assert (found.content or "").strip() == text.strip()


def test_typed_keys() -> None:
    text = (
        "<ifm|tool_calls><ifm|tool_call>other<ifm|arg_key>n</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type>"
        "<ifm|arg_value>3</ifm|arg_value><ifm|arg_key>s</ifm|arg_key><ifm|arg_type>string</ifm|arg_type>"
        "<ifm|arg_value>3</ifm|arg_value></ifm|tool_call></ifm|tool_calls>"
    )
    found = get_parser("k2_horizon").parse(text)
    assert calls(found) == [("other", {"n": 3, "s": "3"})]


def test_nested_elements() -> None:
    item = {"type": "object", "properties": {"sku": STRING, "n": INTEGER}}
    defs = {"$defs": {"ship": {"type": "object", "properties": {"fast": BOOLEAN, "ship": {"$ref": "#/$defs/ship"}}}}}
    order = tool("order", items={"type": "array", "items": item}, ship={"$ref": "#/$defs/ship"}, tags={"type": "array"})
    order["function"]["parameters"] |= defs
    arguments = {
        "items": [{"sku": "007", "n": 2}, {"sku": "", "n": -1}],
        "ship": {"fast": True, "ship": {"fast": False}},
        "tags": [],
    }
    parser = get_parser("minimax_m3")
    text = parser.render(tool_calls=[{"name": "order", "arguments": arguments}], tools=[order])
    assert f"{M3}<sku>007{M3}</sku>" in text
    assert calls(parser.parse(text, [order], strict=True)) == [("order", arguments)]
    untyped = {"items": [{"sku": "007", "n": "2"}], "ship": {"fast": "True"}, "-x": "y"}
    text = parser.render(tool_calls=[{"name": "order", "arguments": untyped}])
    assert calls(parser.parse(text)) == [("order", untyped)]


@pytest.mark.parametrize("inside", [f"{M3}<b>" * 300 + f"{M3}</b>" * 300, f"{M3}<b>1{M3}</c>", f"1{M3}</b>"])
def test_elements_that_are_not_nested_or_too_deep_are_no_argument(inside: str) -> None:
    found = get_parser("minimax_m3").parse(f'{M3}<invoke name="f">{M3}<a>{inside}{M3}</a>{M3}</invoke>')
    assert (found.tool_calls, statuses(found)) == ((), ["malformed"])


# -- writing -----------------------------------------------------------------------------------------------------------

_TEXT = st.text(st.sampled_from([*"ab \n<>/&=\"'{}[]é", "🌍"]), max_size=20)


@EVERY
@given(data=st.data())
def test_a_written_turn_is_read_back(tags: Spelling, data: st.DataObject) -> None:
    values = st.fixed_dictionaries(
        {"title": _TEXT},
        optional={"body": _TEXT, "count": st.integers(), "raw": st.booleans(), "scale": st.floats(-9, 9)},
    )
    written = data.draw(
        st.lists(st.tuples(st.just("note"), values) | st.just(("ping", {})), min_size=1, max_size=3), label="calls"
    )
    parser = get_parser(tags.parser)
    turn = [{"name": name, "arguments": arguments} for name, arguments in written]
    text = parser.render("Hm.", None, turn, TOOLS)
    found = parser.parse(text, TOOLS, strict=True)
    assert calls(found) == written
    assert found.content == "Hm."
    again = parser.render(found.content, None, found.tool_calls, TOOLS)
    assert again == text


def test_the_texts_of_templates() -> None:
    turn = [{"name": "f", "arguments": {"k": "v", "o": {"x": [1, None]}}}, {"name": "g", "arguments": {}}]
    o = json.dumps({"x": [1, None]})
    assert get_parser("qwen3_coder").render("CC", None, turn) == (
        "CC\n\n<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n<parameter=o>\n"
        f"{o}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
    )
    assert get_parser("glm45").render("CC", None, turn) == (
        "CC\n<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n"
        f"<arg_key>o</arg_key>\n<arg_value>{o}</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>"
    )
    assert get_parser("minimax_m2").render("CC", None, turn) == (
        'CC\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n'
        f'<parameter name="o">{o}</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>'
    )
    assert get_parser("deepseek_v32").render("", None, turn[1:]) == (
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )


# -- streams -----------------------------------------------------------------------------------------------------------


@EVERY
def test_long_strings_arrive_while_they_are_written(tags: Spelling) -> None:
    text = tags.whole("note", [("title", "word and\n" * 50)])
    stream = get_parser(tags.parser).stream(TOOLS)
    length = 0
    for character in text[: len(text) // 2]:
        length += sum(len(getattr(event, "fragment", "")) for event in stream.feed(character))
    assert length > len(text) // 4


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("glm45", "<tool_call>ping\n<tool_call>note\n<arg_key>title</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"),
        ("glm47", "<tool_call>ping<tool_call>note<arg_key>title</arg_key><arg_value>x</arg_value></tool_call>"),
        (
            "hy_v3",
            "<tool_calls>\n<tool_call>ping<tool_sep>\n<tool_call>note<tool_sep>\n<arg_key>title</arg_key>\n"
            "<arg_value>x</arg_value>\n</tool_call>\n</tool_calls>",
        ),
    ],
)
def test_a_name_alone_needs_no_end_tag_where_the_tool_needs_no_arguments(parser: str, text: str) -> None:
    tools = [tool("ping"), TOOLS[0] | {"function": TOOLS[0]["function"] | {"name": "note"}}]
    whole = get_parser(parser).parse(text, tools)
    assert [(call.status, call.name) for call in whole.attempts] == [
        (CallStatus.REPAIRED, "ping"),
        (CallStatus.OK, "note"),
    ]
    found, events = streamed(get_parser(parser), list(text), tools)
    assert facts(found) == facts(whole)
    assert event_problems(events, found) == []
    # A tool that needs arguments is not called without them.
    found = get_parser(parser).parse(text.replace("ping", "note"), tools)
    assert [call.arguments for call in found.tool_calls] == [{"title": "x"}]


def test_json_in_a_fence_where_a_format_writes_both() -> None:
    body = '```json\n{"name": "ping", "arguments": {}}\n```'
    found = get_parser("longcat").parse(f"<longcat_tool_call>\n{body}\n</longcat_tool_call>")
    assert [(call.name, call.arguments) for call in found.tool_calls] == [("ping", {})]
    assert found.content is None


def test_blanks_before_a_section_are_not_part_of_its_value() -> None:
    tags = next(tags for tags in SPELLINGS if tags.parser == "minicpm5")
    found = tags.parse(tags.bare("note", [("title", "\xa0<![CDATA[a & b]]>")]))
    assert calls(found) == [("note", {"title": "a & b"})]
