"""JSON and Python literals with repairs where one meaning remains. A text is read twice if necessary."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from tool_call_parsers.literals.escapes import DECODE_STRING
from tool_call_parsers.literals.literal import SPACE, Literal, LiteralError
from tool_call_parsers.literals.reader import Reader
from tool_call_parsers.literals.strict import read_json

_SURPLUS: Final = re.compile(r"[\s\]}]*+\Z")
_ESCAPED_ONCE: Final = re.compile(r'[\[{\s]*+\\"')


class Repaired(NamedTuple):
    """A whole text read as one value, and the repairs."""

    value: Any
    notes: tuple[str, ...]


def bound(text: str, end: int | None) -> int:
    """The end of the text to read, by default the end of `text`."""
    return len(text) if end is None else min(end, len(text))


def _read(text: str, start: int, end: int, python: bool) -> Literal:
    reader = Reader(text, end, python=python)
    try:
        value, stop = reader.value(start)
    except LiteralError as first:
        if not is_worth_a_second_reading(text, start, first):
            raise
        reader = Reader(text, end, python=python, loose=True)
        try:
            value, stop = reader.value(start)
        except LiteralError as second:
            raise LiteralError(first.reason, first.position, second.incomplete) from None
        if _SURPLUS.match(text, stop, end) is None:
            raise
    return Literal(value, stop, tuple(reader.notes))


def is_worth_a_second_reading(text: str, start: int, first: LiteralError) -> bool:
    """Whether a quote may have ended its string too early. A string without any end is cut."""
    if first.incomplete:
        return False
    return text.find('"', start, first.position) >= 0 or text.find("'", start, first.position) >= 0


def read_tolerant(text: str, start: int = 0, end: int | None = None) -> Literal:
    """The JSON or Python literal at `start`, repaired if its meaning is clear. `notes` name the repairs.

    * Python's strings, numbers, words, tuples; trailing commas; raw control characters in strings; `\\'` in "..".
    * NaN, infinities, numbers out of range and integers of more than 4300 digits become their own text, lone
      surrogates U+FFFD, keys that are numbers or words their JSON text.
    * Brackets missing at `end` are closed, if the text ends after a whole value: `text[start:end]` must be a text
      that was closed, not cut. A string, a key, a comma or half a number at the end is never completed.
    * Unescaped quotes inside strings, if one reading remains and only closing brackets follow it.

    Bare words, expressions, comments, mismatched brackets and escapes unknown to JSON are errors. The text after the
    literal is left to the caller.

    Raises `LiteralError`.
    """
    return _read(text, start, bound(text, end), python=False)


def read_python(text: str, start: int = 0, end: int | None = None) -> Literal:
    """The Python literal at `start`, as pythonic formats write it.

    Strings in all quotes, with Python's escapes, prefixes r and u, and joined when adjacent; ints, floats, signs;
    True/False/None and true/false/null; lists, tuples (read as lists), dicts (keys as `json.dumps` writes them).
    Raw newlines in any string, surrogate pairs as two escapes and JSON's words need no note. Noted are values out of
    range and lone surrogates, as by `read_tolerant`, and unescaped quotes. Sets, bytes, f-strings, names, calls,
    operators and everything else are errors: nothing is ever evaluated.

    Raises `LiteralError`.
    """
    return _read(text, start, bound(text, end), python=True)


def repair_json(text: str) -> Repaired | None:
    """The whole text, blanks around it ignored, as one literal; None if its meaning is not clear.

    Beyond `read_tolerant`, surplus closing brackets at the end are dropped, and a text that was escaped as a whole
    (`{\\"a\\": 1}`) is unescaped once, if that makes it JSON. The text must be one that was closed, not cut.
    """
    try:
        literal = read_tolerant(text)
    except LiteralError:
        return _repair_escaped(text)
    if _SURPLUS.match(text, literal.end) is None:
        return None
    surplus = sum(map(text[literal.end :].count, "]}"))
    if not surplus:
        return Repaired(literal.value, literal.notes)
    note = "surplus closing bracket" if surplus == 1 else f"{surplus} surplus closing brackets"
    return Repaired(literal.value, (*literal.notes, note))


def _repair_escaped(text: str) -> Repaired | None:
    if not _ESCAPED_ONCE.match(text):
        return None
    quoted = f'"{text.strip()}"'
    try:
        unescaped, end = DECODE_STRING(quoted)
        literal = read_json(unescaped)
    except ValueError:
        return None
    if end != len(quoted) or SPACE.fullmatch(unescaped, literal.end) is None:
        return None
    return Repaired(literal.value, ("escaped as a whole",))
