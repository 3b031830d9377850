"""The tags of elements, and the texts of attributes and values."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from tool_call_parsers.channels.messages import HEADER_WIDTH
from tool_call_parsers.engine import Needles, Run, Step

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
TAGS = Needles(OPEN, CLOSE)
CONTROL = Needles(OPEN, CLOSE, SEP)
_ATTRIBUTE = re.compile(r"""([\w\-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")
_ATTRIBUTES = re.compile(r"""(?>(?:\s++[\w\-]++\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s"']++))*)\s*+""")
_USUAL = re.compile(
    rf'(?:({re.escape(OPEN)})|{re.escape(CLOSE)})([\w\-]++)((?>(?: [\w\-]++="[^"<&]*+")*)){re.escape(SEP)}'
)
"""A tag as the model's template writes it, without escapes."""
_USUAL_ATTRIBUTE = re.compile(r' ([\w\-]++)="([^"]*+)"')
_WORD = re.compile(r"\s*([\w\-]*)")


def closing(name: str) -> str:
    return f"{CLOSE}{name}{SEP}"


class Tag(NamedTuple):
    """An opening or closing tag: `text[start:end]`."""

    start: int
    end: int
    name: str
    closing: bool
    attributes: dict[str, str]


def read_tag(run: Run, start: int) -> Step[Tag | None]:
    """The tag that begins at `start`."""
    usual = _USUAL.match(run.text, start, start + HEADER_WIDTH)
    if usual is not None:
        opens, name, attributes = usual.groups()
        return Tag(start, usual.end(), name, not opens, dict(_USUAL_ATTRIBUTE.findall(attributes)))
    token = yield from run.starts(start, TAGS)
    if token is None:
        return None
    body = start + len(token)
    while (stop := CONTROL.pattern.search(run.text, body, body + HEADER_WIDTH)) is None:
        if run.final or len(run.text) >= body + HEADER_WIDTH:
            return None
        yield
    if stop.group() != SEP:
        return None
    word = _WORD.match(run.text, body, stop.start())
    assert word is not None
    if _ATTRIBUTES.fullmatch(run.text, word.end(), stop.start()) is None:
        return None
    unescaped = {
        match[1]: unescape(match[2] or match[3] or match[4] or "")
        for match in _ATTRIBUTE.finditer(run.text, word.end(), stop.start())
    }
    return Tag(start, stop.end(), word[1], token == CLOSE, unescaped)


def escape(text: str) -> str:
    """Text for an attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def unescape(text: str) -> str:
    """The text of an attribute."""
    return text.replace("&quot;", '"').replace("&amp;", "&")


def type_of(value: object) -> str:
    """The `type` of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list | tuple) else "object"


def written(value: object) -> str:
    """A value as the format writes it: strings verbatim, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
