"""Strict JSON."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import accumulate
from typing import Any, Final, NoReturn

from tool_call_parsers.literals.literal import (
    INFINITE,
    MAX_DEPTH,
    MAX_DIGITS,
    SPACE,
    Literal,
    LiteralError,
    surrogate_in,
)

_OPENING: Final = ("{", "[")
_BRACKETS: Final = re.compile(r'"[^"\\]*+(?>(?:\\.[^"\\]*+)*)(?:"|\Z)|([\[\]{}])', re.DOTALL)
_BRACKET_STEP: Final = {"": 0, "[": 1, "{": 1, "]": -1, "}": -1}
# The text up to an escape of a lone surrogate.
_NO_LONE_ESCAPE: Final = re.compile(
    r"[^\\]*+(?>(?:\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?!u[dD][89a-fA-F]).)[^\\]*+)*)",
    re.DOTALL,
)
_HIGH_ESCAPE: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW_CUT: Final = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z")
_JSON_CUT: Final = re.compile(r"(?:[ \t\r\n]*|-|t|tr|tru|f|fa|fal|fals|n|nu|nul)\Z")
_JSON_CUT_ESCAPE: Final = re.compile(r"\\u[0-9a-fA-F]{0,4}\Z")
_JSON_CUT_NUMBER: Final = re.compile(r"(?:(\.)|[eE][+-]?)\Z")


def json_constant(name: str) -> NoReturn:
    """For a decoder's `parse_constant`: rejects NaN and the infinities."""
    raise ValueError(f"{name} is not JSON")


def json_float(text: str) -> float:
    """For a decoder's `parse_float`: rejects numbers that overflow."""
    value = float(text)
    if value in INFINITE:
        raise ValueError("a number out of range")
    return value


def _json_int(text: str) -> int:
    if len(text) - (text[0] == "-") > MAX_DIGITS:
        raise ValueError("an integer of too many digits")
    return int(text)


class _RepeatedKey(Exception):
    """An object has a key twice."""


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(members)
    if len(value) != len(members):
        raise _RepeatedKey
    return value


_decoder: Final = partial(json.JSONDecoder, parse_constant=json_constant, parse_float=json_float, parse_int=_json_int)
_DECODE_UNIQUE: Final = _decoder(object_pairs_hook=_unique).raw_decode
_DECODE_LAST: Final = _decoder().raw_decode
REPEATED_KEY: Final = "a repeated key"
"""The note of an object that has a key twice."""
_NO_NOTES: Final[tuple[str, ...]] = ()


def read_json(text: str, start: int = 0) -> Literal:
    """The JSON value at `start`, blanks before it allowed, according to RFC 8259.

    Also rejects NaN and infinities, numbers out of range, integers of more than 4300 digits, nesting beyond
    `MAX_DEPTH`, and lone surrogates. Of equal keys the last counts, with a note.

    Raises `LiteralError`.
    """
    if text[start : start + 1] not in _OPENING:
        start = SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches everywhere
    try:
        try:
            (value, end), notes = _DECODE_UNIQUE(text, start), _NO_NOTES
        except _RepeatedKey:
            (value, end), notes = _DECODE_LAST(text, start), (REPEATED_KEY,)
    except json.JSONDecodeError as error:
        cut = _json_is_cut(text, error)
        if cut and _is_deep(text, start, len(text)):
            raise LiteralError("nested too deeply", start) from None
        if cut and (lone := _lone_surrogate(text, start, len(text))) is not None:
            raise LiteralError("a lone surrogate", lone) from None
        raise LiteralError(error.msg, error.pos, cut) from None
    except RecursionError:
        raise LiteralError("nested too deeply", start) from None
    except ValueError as error:
        raise LiteralError(str(error), start) from None
    if end - start > 2 * MAX_DEPTH and _is_deep(text, start, end):
        raise LiteralError("nested too deeply", start)
    if not text.isascii() and (raw := surrogate_in(text[start:end])) is not None:
        raise LiteralError("a lone surrogate", start + raw)
    if text.find("\\u", start, end) >= 0 and (lone := _lone_surrogate(text, start, end)) is not None:
        raise LiteralError("a lone surrogate", lone)
    return Literal(value, end, notes)


def read_whole_json(text: str) -> Literal | None:
    """The text as one JSON value; None if it is not exactly one."""
    try:
        literal = read_json(text)
    except LiteralError:
        return None
    return literal if literal.end == len(text) else None


def _is_deep(text: str, start: int, end: int) -> bool:
    """Whether `text[start:end]`, JSON that may be cut, nests beyond `MAX_DEPTH`."""
    if text.count("[", start, end) + text.count("{", start, end) <= MAX_DEPTH:
        return False
    steps = map(_BRACKET_STEP.__getitem__, _BRACKETS.findall(text, start, end))
    return max(accumulate(steps), default=0) > MAX_DEPTH


def _lone_surrogate(text: str, start: int, end: int) -> int | None:
    """Where JSON text escapes a lone surrogate. A high one at the very end may still be completed."""
    lone = _NO_LONE_ESCAPE.match(text, start, end).end()  # type: ignore[union-attr]  # it matches everywhere
    if end - lone < 2:
        return None
    high = _HIGH_ESCAPE.match(text, lone, end)
    if end - lone < 6 or (high and _LOW_CUT.match(text, high.end(), end)):
        return None
    return lone


def _json_is_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Whether decoding failed because the text ended."""
    position = error.pos
    if error.msg.startswith("Unterminated string"):
        return True
    if error.msg.startswith("Invalid \\u"):
        return _JSON_CUT_ESCAPE.search(text, max(position - 2, len(text) - 6)) is not None
    if _JSON_CUT.match(text, position):
        return True
    number = _JSON_CUT_NUMBER.match(text, position)
    if number is None or not text[position - 1 : position].isdecimal():
        return False
    before = text[max(0, position - MAX_DIGITS) : position].rstrip("0123456789")[-2:]
    return not (before[-1:] in ("e", "E", "+") or before in ("e-", "E-") or (number[1] and before[-1:] == "."))
