"""One reading of a text: values in the dialect of JSON or Python, and a note of each repair."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from tool_call_parsers.literals.escapes import (
    DECODE_STRING,
    BadEscape,
    join_surrogates,
    replace_json_escapes,
    unescape_python,
)
from tool_call_parsers.literals.literal import (
    INFINITE,
    MAX_DEPTH,
    MAX_DIGITS,
    SPACE,
    UNCLOSED,
    LiteralError,
    surrogate_in,
)
from tool_call_parsers.literals.strict import REPEATED_KEY

_INT_BOUND: Final = 10**MAX_DIGITS
_MAX_INNER_QUOTES: Final = 64  # in one string: bounds the cost of a second reading for callers that try many places
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_STRING_END: Final = {
    quote: re.compile(pattern, re.DOTALL)
    for quote, pattern in {
        '"': r'[^"\\]*+(?>(?:\\.[^"\\]*+)*)"',
        "'": r"[^'\\]*+(?>(?:\\.[^'\\]*+)*)'",
        '"""': r'[^"\\]*+(?>(?:(?:\\.|"(?!""))[^"\\]*+)*)"""',
        "'''": r"[^'\\]*+(?>(?:(?:\\.|'(?!''))[^'\\]*+)*)'''",
    }.items()
}
_STRING_FOLLOWS: Final = re.compile(r"""[ \t\r\n]*([A-Za-z]{0,2}["'])""")


@dataclass(slots=True)
class LiteralReader:
    """One reading of a text up to `end`, with its dialect, its rule for quotes, and its repairs."""

    text: str
    end: int
    python: bool
    """Python's dialect, for the arguments of a call. Otherwise JSON's, with repairs."""
    loose: bool = False
    """The second reading: quotes inside strings may be unescaped."""
    notes: dict[str, None] = field(default_factory=dict)
    """An ordered set."""

    def string(self, start: int, quote_at: int, context: str) -> tuple[str, int]:
        """The string whose prefix starts at `start` and whose quote is at `quote_at`, and its end."""
        text = self.text
        prefix = text[start:quote_at].lower()
        if prefix not in ("", "r", "u"):
            raise LiteralError(f"a string with prefix {prefix!r} is not a literal here", start)
        quote = text[quote_at]
        if text.startswith(quote * 3, quote_at) and quote_at + 3 <= self.end and not self.loose:
            quote *= 3
        body_at = quote_at + len(quote)
        if self.loose:
            end = self.loose_end(body_at, quote, context)
        else:
            match = _STRING_END[quote].match(text, body_at, self.end)
            if match is None:
                raise LiteralError("a string without its end", start, True)
            end = match.end()
        body = text[body_at : end - len(quote)]
        json_rules = not self.python and quote == '"' and not prefix
        if not self.python:
            if prefix:
                self.notes["Python string prefix"] = None
            if len(quote) == 3:
                self.notes["triple quotes"] = None
            elif quote == "'":
                self.notes["single quotes"] = None
            if control := _CONTROL.search(body):
                kind = "newline" if control[0] in "\r\n" else "control character"
                self.notes[f"raw {kind} in a string"] = None
        value = body
        if "\\" in body and prefix != "r":
            try:
                value = self.unescape_json(body, quote_at, end) if json_rules else unescape_python(body)
            except BadEscape:
                raise LiteralError("a string with an invalid escape", start) from None
        if not value.isascii() and surrogate_in(value) is not None:
            value, lone = join_surrogates(value)
            if lone:
                self.notes["lone surrogate"] = None
        return value, end

    def unescape_json(self, body: str, quote_at: int, end: int) -> str:
        if not self.loose:
            try:
                return str(DECODE_STRING(self.text, quote_at)[0])
            except ValueError:
                pass
        value, unknown = replace_json_escapes(body)
        self.notes |= {"an invalid escape": None} if unknown else {}
        if "\\'" in body.replace("\\\\", ""):
            self.notes["escaped apostrophe"] = None
        return value

    def loose_end(self, body_at: int, quote: str, context: str) -> int:
        """The end of a string in the second reading: the first quote before text that may follow in `context`."""
        ends = _LOOSE_END[context].match
        inner = 0
        for match in _QUOTE_OR_ESCAPE[quote].finditer(self.text, body_at, self.end):
            if match[1] is None:
                continue
            end = match.end()
            if ends(self.text, end, self.end):
                if inner:
                    self.notes["unescaped quotes"] = None
                return end
            if (
                context == ":"  # a key holds no quotes
                or inner == _MAX_INNER_QUOTES
                or _OPERATION.match(self.text, end, self.end)
                or (_LOOSE_DOUBT_CALL if context == "f(" else _LOOSE_DOUBT).match(self.text, end, self.end)
                or (not inner and _QUOTE_FOLLOWS.match(self.text, end, self.end))
            ):
                raise LiteralError("a string followed by text that is not a literal", end)
            inner += 1
        raise LiteralError("a string without its end", body_at - 1, True)

    def number(self, start: int) -> tuple[Any, int]:
        """A number that is not plain JSON: Python's spellings, and the infinities."""
        text = self.text
        if text.startswith("-Infinity", start) and start + 9 <= self.end:
            self.notes["-Infinity as text"] = None
            return "-Infinity", start + 9
        match = _PYTHON_NUMBER.match(text, start, self.end)
        if match is None:
            cut = _NEGATIVE_CUT.match(text, start, self.end) is not None
            raise LiteralError("a sign without its number", start, cut)
        end = match.end()
        try:
            value = self.number_value(match[2], match[1] == "-")
            if not self.python and end == self.end and match[2].endswith("."):
                raise LiteralError("half a number", start, True)
        except ValueError as error:
            if isinstance(error, LiteralError):
                raise
            cut = end == self.end and _is_python_number(match[2] + "0")
            raise LiteralError("not a number", start, cut) from None
        if not self.python:
            self.notes["Python number"] = None
        return value, end

    def number_value(self, digits: str, negative: bool) -> Any:
        """The number that `digits` spells, or its text if that is out of range. Raises ValueError if none."""
        text = "-" + digits if negative else digits
        if len(digits) > MAX_DIGITS and digits.replace("_", "").isdecimal():  # does not depend on the process's limit
            self.notes["number out of range as text"] = None
            return text
        value = _python_number(digits)
        if value in INFINITE or (type(value) is int and value >= _INT_BOUND):
            self.notes["number out of range as text"] = None
            return text
        return -value if negative else value

    def word(self, word: str, start: int, end: int) -> Any:
        """The value of a bare word."""
        if word in WORDS:
            value = WORDS[word]
            if type(value) is str:
                self.notes[f"{word} as text"] = None
            elif not self.python and word[0] in "TFN":
                self.notes[f"Python literal {word}"] = None
            return value
        cut = end == self.end and (word in _STRING_PREFIXES or any(known.startswith(word) for known in WORDS))
        raise LiteralError(f"{word[:40]!r} is not a literal", start, cut)

    def key(self, value: Any, position: int) -> str:
        """A key in the spelling of `json.dumps`."""
        if type(value) is str:
            return value
        if isinstance(value, (list, dict)):
            raise LiteralError("a key that is not a string", position)
        if not self.python:
            self.notes["a key that is not a string"] = None
        return json.dumps(value)

    def is_blank(self, position: int) -> bool:
        """Whether only blanks follow."""
        return SPACE.match(self.text, position, self.end).end() == self.end  # type: ignore[union-attr]

    def value(self, position: int) -> tuple[Any, int]:
        """The value at `position`, blanks before it allowed, and the index after it."""
        text, end, python, loose = self.text, self.end, self.python, self.loose
        read_token = (_LOOSE_TOKEN if loose else _TOKEN).match
        stack: list[tuple[Any, str, str | None]] = []
        container: Any = None
        bracket = ""  # the opening bracket of `container`
        key: str | None = None  # the key of the current member
        value: Any
        while True:
            if bracket == "{" and key is None and not loose:
                member = _MEMBER.match(text, position, end)
                if member is not None:
                    key = member[1]
                    if key is None:
                        key = member[2]
                        if not python:
                            self.notes["single quotes"] = None
                    position = member.end()
            token = read_token(text, position, end)
            if token is None:
                raise LiteralError("no value", position, self.is_blank(position))
            kind = token.lastindex
            position = token.end()
            if kind in _PLAIN:
                value = token[kind]
                if kind == _PLAIN_SINGLE and not python:
                    self.notes["single quotes"] = None
                if python and text[position : position + 1] not in _AFTER_STRING:
                    value, position = self.joined(value, position)
            elif kind == _STRING:
                context = bracket
                if bracket == "{" and key is None:
                    context = ":"
                elif not bracket and python:
                    context = "f("
                value, position = self.string(token.start(kind), position - 1, context)
                if python and not loose:
                    value, position = self.joined(value, position)
            elif kind in _NUMBERS:
                digits = token[kind]
                if kind == _INT and len(digits) < 19:
                    value = int(digits)
                else:
                    negative = digits[0] == "-"
                    value = self.number_value(digits[1:] if negative else digits, negative)
            elif kind == _OPEN:
                if len(stack) >= MAX_DEPTH:
                    raise LiteralError("nested too deeply", position - 1)
                stack.append((container, bracket, key))
                bracket, key = token[kind], None
                container = {} if bracket == "{" else []
                continue
            elif kind == _CLOSE:
                if not bracket or token[kind] != _CLOSING[bracket] or key is not None:
                    raise LiteralError(f"{token[kind]!r} where a value is expected", position - 1)
                if container and not python:
                    self.notes["trailing comma"] = None
                if bracket == "(" and not python:
                    self.notes["Python tuple"] = None
                value = container
                container, bracket, key = stack.pop()
            elif kind == _WORD:
                value = self.word(token[kind], token.start(kind), position)
            else:
                value, position = self.number(position - 1)

            while True:
                if not bracket:
                    return value, position
                if bracket == "{" and key is None:
                    key = self.key(value, position)
                    colon = _COLON.match(text, position, end)
                    if colon is None:
                        raise LiteralError("no ':' after a key", position, self.is_blank(position))
                    position = colon.end()
                    break
                if bracket == "{":
                    if key in container:
                        self.notes[REPEATED_KEY] = None
                    container[key] = value
                    key = None
                else:
                    container.append(value)
                separator = SEPARATOR.match(text, position, end)
                if separator is None:
                    if not self.is_blank(position):
                        raise LiteralError("neither ',' nor a closing bracket", position)
                    if python or loose:
                        raise LiteralError(f"no {_CLOSING[bracket]!r}", end, True)
                    return self.closed(container, bracket, key, stack), end
                position = separator.end()
                mark = separator[1]
                if mark == ",":
                    break
                if mark != _CLOSING[bracket]:
                    raise LiteralError(f"{mark!r} closes {bracket!r}", position - 1)
                value = container
                if bracket == "(":
                    if len(container) == 1:  # parentheses around a value, not a tuple
                        value = container[0]
                    if not python:
                        self.notes["Python tuple" if len(container) > 1 else "parentheses"] = None
                container, bracket, key = stack.pop()

    def joined(self, value: str, position: int) -> tuple[str, int]:
        """`value` joined with the strings that follow it without a comma, as in Python."""
        parts = [value]
        while following := _STRING_FOLLOWS.match(self.text, position, self.end):
            part, position = self.string(following.start(1), following.end() - 1, "")
            parts.append(part)
        return "".join(parts) if len(parts) > 1 else value, position

    def closed(self, container: Any, bracket: str, key: str | None, stack: list[tuple[Any, str, str | None]]) -> Any:
        """The outermost container, with the missing brackets, of a text that ended after a whole value."""
        count = 0
        while True:
            count += 1
            if bracket == "(":
                raise LiteralError("no ')'", self.end, True)
            value = container
            container, bracket, key = stack.pop()
            if not bracket:
                break
            if bracket == "{":
                if key is None:
                    raise LiteralError("a key that is not a string", self.end)
                container[key] = value
            else:
                container.append(value)
        self.notes[UNCLOSED if count == 1 else f"{UNCLOSED} ({count} times)"] = None
        return value


_PLAIN_DOUBLE, _PLAIN_SINGLE, _STRING, _INT, _FLOAT, _OPEN, _CLOSE, _WORD = range(1, 9)
_PLAIN: Final = (_PLAIN_DOUBLE, _PLAIN_SINGLE)
_NUMBERS: Final = (_INT, _FLOAT)
_TOKEN_TAIL: Final = r"""
      | ([A-Za-z]{0,2}["'])
      | (-?(?:0|[1-9][0-9]*+))(?![\w.])
      | (-?(?:0|[1-9][0-9]*+)(?>(?:\.[0-9]++)?)(?>(?:[eE][+-]?[0-9]++)?))(?![\w.])
      | ([\[{(])
      | ([\]})])
      | ([^\W\d]\w*+)
      | ([-+.0-9])
    )"""
# Plain strings contain only characters that JSON strings may contain. Others are examined more closely.
PLAIN_STRINGS: Final = r"""(?:"([^"\\\x00-\x1f\ud800-\udfff]*+)"(?!")|'([^'\\\x00-\x1f\ud800-\udfff]*+)'(?!'))"""
_TOKEN: Final = re.compile(r"[ \t\r\n]*+(?:" + PLAIN_STRINGS + _TOKEN_TAIL, re.VERBOSE)
_MEMBER: Final = re.compile(rf"[ \t\r\n]*+{PLAIN_STRINGS}[ \t\r\n]*+:")
_LOOSE_TOKEN: Final = re.compile(r"[ \t\r\n]*+(?:((?!))|((?!))" + _TOKEN_TAIL, re.VERBOSE)
_COLON: Final = re.compile(r"[ \t\r\n]*:")
SEPARATOR: Final = re.compile(r"[ \t\r\n]*([,\]})])")
_CLOSING: Final = {"[": "]", "{": "}", "(": ")"}
_AFTER_STRING: Final = ",)]}:"
WORDS: Final[dict[str, Any]] = {
    "true": True,
    "True": True,
    "false": False,
    "False": False,
    "null": None,
    "None": None,
    "NaN": "NaN",
    "Infinity": "Infinity",
}
_STRING_PREFIXES: Final = ("r", "R", "u", "U")
_PYTHON_NUMBER: Final = re.compile(r"([+-]?)[ \t]*+([0-9.][0-9A-Za-z_.]*+(?:(?<=[eE])[+-][0-9_]*+)?)")
_NEGATIVE_CUT: Final = re.compile(r"(?:[+-][ \t]*|-I(?:n(?:f(?:i(?:n(?:it?)?)?)?)?)?)\Z")

NAME: Final = r"[^\W\d][\w-]*+"
CALL_NAME: Final = rf"{NAME}(?>(?:\.[\w-]++)*)"
"""A pattern of the name of a call, which may contain dots and dashes."""
_QUOTE_OR_ESCAPE: Final = {q: re.compile(rf"\\.|({q})", re.DOTALL) for q in "\"'"}
_CLOSED: Final = r"[\s}\])]*+(?:,|<|\Z)"  # what may follow the bracket that closes an inner container
_ITEM: Final = r"""["'\[{(\]})\d+.-]|true\b|false\b|null\b|True\b|False\b|None\b|NaN\b|Infinity\b"""
CALL_TAIL: Final = rf"\s*+(?:\Z|\]\s*+(?:\Z|<)|<\||</[\w:]*calls?>|,\s*+{CALL_NAME}\(\s*+{NAME}\s*+=(?!=))"
# By context: a member's key, a member's value, an item of a list or a tuple, an argument, alone.
_LOOSE_END: Final = {
    context: re.compile(r"\s*+(?:" + pattern + ")")
    for context, pattern in {
        ":": r":",
        "{": rf"""\}}{_CLOSED}|,\s*+["'}}]""",
        "[": rf"\]{_CLOSED}|,\s*+(?:{_ITEM})",
        "(": rf"\){_CLOSED}|,\s*+(?:{_ITEM})",
        "f(": rf"\){CALL_TAIL}|,\s*+{NAME}\s*+=(?!=)",
        "": r"\Z",
    }.items()
}
# After a quote that does not end its string: signs that it may end it, and that the next item, member or argument
# would be swallowed. Two strings with little between them may be one with quotes, or two without a comma.
_LOOSE_DOUBT: Final = re.compile(r"\s*+[,:}\])]")
_LOOSE_DOUBT_CALL: Final = re.compile(rf"""[^\w"'\\]*+{NAME}\s*+=\s*+["']""")
_QUOTE_FOLLOWS: Final = re.compile(r"""[^\w"'\\]*+["']""")
# Text that makes an expression of the string before it. A string may contain such text, so the case is undecidable.
_OPERATION: Final = re.compile(
    r"""\s*+(?:[+%*]\s*+[\w"'(]|\.\s*+\w++\s*+\(|\[[-\d:\s]*+\]|[=!]=|(?:if|for|in|is|and|or|not)\s)"""
)


def _python_number(digits: str) -> int | float:
    """The number that Python reads, without a sign. Raises ValueError if there is none."""
    try:
        return int(digits, 0)
    except ValueError:
        if digits.replace("_", "").isdecimal() and len(digits) <= MAX_DIGITS:  # 007, 1__0
            raise
        return float(digits)


def _is_python_number(digits: str) -> bool:
    try:
        _python_number(digits)
    except ValueError:
        return False
    return True
