"""JSON objects that stand for calls: `{"name": ..., "arguments": {...}}`, read where they start in a longer text.

Ends are found by decoding, never by searching for a bracket or a tag, so whatever a string holds stays a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tool_call_parsers.types import CallStatus, ParsedToolCall, new_call_id

_BLANK = re.compile(r"\s*")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)


class NotJSON(ValueError):
    """No JSON value starts here. `position` is where decoding failed."""

    def __init__(self, reason: str, position: int) -> None:
        self.position = position
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Value:
    """A decoded value and the text it came from; `strict` is False when a string holds raw control characters."""

    value: Any
    text: str
    start: int
    end: int
    strict: bool = True


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_reject_constant)
_LENIENT = json.JSONDecoder(parse_constant=_reject_constant, strict=False)


def read_value(text: str, start: int) -> Value:
    """Decode the JSON value at `start`. Models put raw newlines into strings: those are taken, and flagged."""
    try:
        try:
            value, end = _STRICT.raw_decode(text, start)
            return Value(value, text, start, end)
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Invalid control character"):
                raise
        value, end = _LENIENT.raw_decode(text, start)
        return Value(value, text, start, end, strict=False)
    except json.JSONDecodeError as error:
        raise NotJSON(error.msg, error.pos) from None
    except RecursionError:
        raise NotJSON("nested too deeply", start) from None
    except ValueError as error:  # NaN, Infinity, integers beyond Python's digit limit
        raise NotJSON(str(error), start) from None


def is_cut(text: str, start: int) -> bool:
    """Whether the text ends inside the value that starts at `start`: in a string, or with brackets open."""
    depth = 0
    for token in _TOKENS.finditer(text, start):
        first = token[0]
        if first == '"':
            return True
        depth += (first in "{[") - (first in "}]")
        if depth <= 0:
            return False
    return True


def calls_of(value: Value, known: frozenset[str], raw: str, *, repaired: str | None = None) -> list[ParsedToolCall]:
    """The calls that a value stands for: one of an object, several of a list. Failures are among them, by status."""
    items = _items(value) if isinstance(value.value, list) else [value]
    return [_call(item, known, raw, repaired) for item in items]


def failed(status: CallStatus, error: str, raw: str, *, name: str = "", arguments_raw: str = "") -> ParsedToolCall:
    """An attempt that did not become a call."""
    return ParsedToolCall(new_call_id(), name, {}, arguments_raw, status, error, raw)


def _call(value: Value, known: frozenset[str], raw: str, repaired: str | None) -> ParsedToolCall:
    if not isinstance(value.value, dict):
        return failed(CallStatus.MALFORMED, "a call is a JSON object", raw)
    spans = _members(value)
    if "name" not in spans and "function" in spans and isinstance(value.value["function"], dict):
        value, repaired = spans["function"], "the call was wrapped in 'function'"
        spans = _members(value)
    name = value.value.get("name")
    if not isinstance(name, str) or not name.strip():
        return failed(CallStatus.MALFORMED, "the call has no name", raw)
    if name != name.strip():
        name, repaired = name.strip(), "blanks around the name"
    key = "arguments" if "arguments" in spans else "parameters"
    arguments = value.value.get(key)
    arguments_raw = value.text[spans[key].start : spans[key].end] if key in spans else ""
    if isinstance(arguments, str):
        text, repaired = arguments.strip(), "the arguments were JSON inside a string"
        try:
            arguments = read_value(text, 0).value if text else {}
        except NotJSON:
            arguments = text
    elif arguments is None:
        arguments, repaired = {}, "the call had no arguments"
    elif key == "parameters":
        repaired = "'parameters' instead of 'arguments'"
    if not isinstance(arguments, dict):
        reason = "the arguments are no JSON object"
        return failed(CallStatus.MALFORMED, reason, raw, name=name, arguments_raw=arguments_raw)
    if not value.strict:
        repaired = "raw control characters in a string"
    status, error = CallStatus.OK, None
    if repaired:
        status, error = CallStatus.REPAIRED, repaired
    if known and name not in known:
        status, error = CallStatus.UNKNOWN_TOOL, f"no tool {name!r} was offered"
    return ParsedToolCall(new_call_id(), name, arguments, arguments_raw, status, error, raw)


def skip_blanks(text: str, position: int) -> int:
    """The next position that is not white space."""
    return _BLANK.match(text, position).end()  # type: ignore[union-attr]  # it matches everywhere


def _members(value: Value) -> dict[str, Value]:
    """Where each member of a decoded object stands in its text; of equal keys the last, as JSON decoders do."""
    spans: dict[str, Value] = {}
    text, position = value.text, skip_blanks(value.text, value.start + 1)
    while text[position] == '"':
        key = read_value(text, position)
        member = read_value(text, skip_blanks(text, skip_blanks(text, key.end) + 1))
        spans[key.value] = member
        position = skip_blanks(text, member.end)
        if text[position] != ",":
            break
        position = skip_blanks(text, position + 1)
    return spans


def _items(value: Value) -> Iterator[Value]:
    """The items of a decoded list, each with its place in the text."""
    position = skip_blanks(value.text, value.start + 1)
    while value.text[position] != "]":
        item = read_value(value.text, position)
        yield item
        position = skip_blanks(value.text, item.end)
        if value.text[position] == ",":
            position = skip_blanks(value.text, position + 1)
