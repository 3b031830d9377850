"""The tags of elements, and the texts of attributes and values."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tool_call_parsers.channels.messages import HEADER_WIDTH
from tool_call_parsers.engine import Needles, Run, Step

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
TAGS = Needles(OPEN, CLOSE)
CONTROL = Needles(OPEN, CLOSE, SEP)
_ATTRIBUTE = re.compile(r"""([\w\-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")
_ATTRIBUTES = re.compile(r"""(?>(?:\s++[\w\-]++\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s"']++))*)\s*+""")
_WORD = re.compile(r"\s*([\w\-]*)")


def closing(name: str) -> str:
    return f"{CLOSE}{name}{SEP}"


@dataclass(frozen=True, slots=True)
class Tag:
    """An opening or closing tag: `text[start:end]`."""

    start: int
    end: int
    name: str
    closing: bool
    attributes: dict[str, str]


def read_tag(run: Run, start: int) -> Step[Tag | None]:
    """The tag that begins at `start`."""
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
    attributes = {
        match[1]: unescape(match[2] or match[3] or match[4] or "")
        for match in _ATTRIBUTE.finditer(run.text, word.end(), stop.start())
    }
    return Tag(start, stop.end(), word[1], token == CLOSE, attributes)


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
