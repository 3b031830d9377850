"""JSON and Python literals with repairs where one meaning remains. A text is read twice if necessary."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeVar

from tool_call_parsers.literals.escapes import DECODE_STRING
from tool_call_parsers.literals.literal import SPACE, Literal, LiteralError
from tool_call_parsers.literals.reader import LiteralReader
from tool_call_parsers.literals.strict import read_json

_SURPLUS: Final = re.compile(r"[\s\]}]*+\Z")
_COMMENT: Final = re.compile(r"[\s,]*+(?://|/\*|#)")
_COMMENTS: Final = re.compile(
    r""""[^"\\]*+(?>(?:\\.[^"\\]*+)*)"|'[^'\\\n]*+(?>(?:\\.[^'\\\n]*+)*)'|(//[^\n]*+|/\*.*?\*/|\#[^\n]*+)""", re.DOTALL
)
T = TypeVar("T")
_ESCAPED_ONCE: Final = re.compile(r'[\[{\s]*+\\"')


def bound(text: str, end: int | None) -> int:
    """The end of the text to read, by default the end of `text`."""
    return len(text) if end is None else min(end, len(text))


def read_twice(read: Callable[[bool], T], text: str, start: int) -> T:
    """The result of `read(False)`, or of `read(True)`, the loose reading, if a quote may have ended its string too
    early. Raises the error of the first reading."""
    try:
        return read(False)
    except LiteralError as first:
        # A string without any end is cut.
        if first.incomplete or not any(text.find(quote, start, first.position) >= 0 for quote in "\"'"):
            raise
        try:
            return read(True)
        except LiteralError as second:
            raise LiteralError(first.reason, first.position, second.incomplete) from None


def read_tolerant(text: str, start: int = 0, end: int | None = None) -> Literal:
    """The JSON or Python literal at `start`, repaired if its meaning is clear. `notes` name the repairs.

    * Python's strings, numbers, words, tuples; trailing commas; raw control characters in strings; `\\'` in "..".
    * NaN, infinities, numbers out of range and integers of more than 4300 digits become their own text, lone
      surrogates U+FFFD, keys that are numbers or words their JSON text.
    * A backslash that begins no escape of JSON (`\\d`, `C:\\p`) stays. Comments are ignored.
    * Of equal keys the last counts.
    * Brackets missing at `end` are closed, if the text ends after a whole value: `text[start:end]` must be a text
      that was closed, not cut. A string, a key, a comma or half a number at the end is never completed.
    * Unescaped quotes inside strings, if one reading remains and only closing brackets follow it.

    Bare words, expressions and mismatched brackets are errors. The text after the literal is left to the caller.

    Raises `LiteralError`.
    """
    stop = bound(text, end)

    def read(loose: bool) -> Literal:
        reader = LiteralReader(text, stop, python=False, loose=loose)
        value, after = reader.value(start)
        if loose and _SURPLUS.match(text, after, stop) is None:
            raise LiteralError("more text", after)
        return Literal(value, after, tuple(reader.notes))

    try:
        return read_twice(read, text, start)
    except LiteralError as error:
        if _COMMENT.match(text, error.position, stop) is None:
            raise
    text = text[:start] + _COMMENTS.sub(_blank, text[start:stop])
    literal = read_twice(read, text, start)
    return literal._replace(notes=(*literal.notes, "comments"))


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0]) if match[1] else match[0]


def repair_json(text: str) -> Literal | None:
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
        return literal
    note = "surplus closing bracket" if surplus == 1 else f"{surplus} surplus closing brackets"
    return literal._replace(notes=(*literal.notes, note))


def _repair_escaped(text: str) -> Literal | None:
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
    return literal._replace(notes=("escaped as a whole",))
