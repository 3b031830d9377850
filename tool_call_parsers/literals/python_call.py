"""A call as Python writes it, with literals for arguments."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from tool_call_parsers.literals.literal import LiteralError
from tool_call_parsers.literals.reader import CALL_NAME, CALL_TAIL, NAME, PLAIN_STRINGS, SEPARATOR, WORDS, LiteralReader
from tool_call_parsers.literals.tolerant import bound, read_twice

_CALL_HEAD: Final = re.compile(rf"[ \t\r\n]*+({CALL_NAME})[ \t]*+\(")
_CALL_HEAD_CUT: Final = re.compile(rf"[ \t\r\n]*+(?:{CALL_NAME}\.?[ \t]*+)?\Z")
_ARGUMENT: Final = re.compile(rf"[ \t\r\n]*+(?:(\))|({NAME})[ \t\r\n]*+=(?!=))")
_ARGUMENT_CUT: Final = re.compile(rf"[ \t\r\n]*+{NAME}[ \t\r\n]*+\Z")
_PLAIN_ARGUMENT: Final = re.compile(
    rf"[ \t\r\n]*+({NAME})[ \t\r\n]*+=[ \t\r\n]*+"
    rf"(?:{PLAIN_STRINGS}|(0|-?[1-9][0-9]{{0,17}})|(True|False|None|true|false|null))[ \t\r\n]*+([,)])"
)
_CALL_CLOSED: Final = re.compile(CALL_TAIL)


class PythonCall(NamedTuple):
    """A call as Python writes it."""

    name: str
    positional: tuple[Any, ...]
    arguments: dict[str, Any]
    """The keyword arguments, in order."""
    end: int
    """The index after the closing parenthesis."""
    notes: tuple[str, ...] = ()


def read_python_call(text: str, start: int = 0, end: int | None = None) -> PythonCall:
    """The call `name(a=.., b=..)` at `start`, blanks before it allowed, with Python literals for arguments.

    Names may contain dots and dashes, parameters may be reserved words. Positional arguments are kept apart, and must
    come first. Of a repeated parameter the last value counts, with a note. The text after the closing parenthesis is
    left to the caller.

    Literals are strings in all quotes, with Python's escapes, prefixes r and u, and joined when adjacent; ints, floats,
    signs; True/False/None and true/false/null; lists, tuples (read as lists), dicts (keys as `json.dumps` writes them).
    Raw newlines in any string, surrogate pairs as two escapes and JSON's words need no note. Noted are values out of
    range and lone surrogates, as by `read_tolerant`, and unescaped quotes. Sets, bytes, f-strings, names, calls,
    operators and everything else are errors: nothing is ever evaluated.

    Raises `LiteralError`.
    """
    stop = bound(text, end)
    return read_twice(lambda loose: _read_call(text, start, stop, loose), text, start)


def _read_call(text: str, start: int, end: int, loose: bool) -> PythonCall:
    head = _CALL_HEAD.match(text, start, end)
    if head is None:
        raise LiteralError("no call", start, _CALL_HEAD_CUT.match(text, start, end) is not None)
    reader = LiteralReader(text, end, python=True, loose=loose)
    positional: list[Any] = []
    arguments: dict[str, Any] = {}
    position = head.end()
    while True:
        plain = None if loose else _PLAIN_ARGUMENT.match(text, position, end)
        if plain is not None:
            name, value, single, digits, word, mark = plain.groups()
            if name in arguments:
                reader.notes[f"duplicate argument {name}"] = None
            if digits is not None:
                arguments[name] = int(digits)
            elif word is not None:
                arguments[name] = WORDS[word]
            else:
                arguments[name] = single if value is None else value
            position = plain.end()
            if mark == ")":
                break
            continue
        argument = _ARGUMENT.match(text, position, end)
        if argument is None:
            if arguments:
                cut = reader.is_blank(position) or _ARGUMENT_CUT.match(text, position, end) is not None
                raise LiteralError("no parameter name", position, cut)
            try:
                value, position = reader.value(position)
            except LiteralError as error:
                if _ARGUMENT_CUT.match(text, position, end):
                    raise LiteralError("no '=' after a parameter name", position, True) from error
                raise
            positional.append(value)
        elif argument[1]:
            position = argument.end()
            break
        else:
            name = argument[2]
            value, position = reader.value(argument.end())
            if name in arguments:
                reader.notes[f"duplicate argument {name}"] = None
            arguments[name] = value
        separator = SEPARATOR.match(text, position, end)
        if separator is None:
            raise LiteralError("neither ',' nor ')'", position, reader.is_blank(position))
        position = separator.end()
        if separator[1] == ")":
            break
        if separator[1] != ",":
            raise LiteralError(f"{separator[1]!r} inside a call", position - 1)
    if loose and _CALL_CLOSED.match(text, position, end) is None:
        raise LiteralError("a string followed by text that is not a literal", position)
    return PythonCall(head[1], tuple(positional), arguments, position, tuple(reader.notes))
