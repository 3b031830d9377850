"""JSON and Python literals as language models write them: read strictly, read tolerantly, never evaluated.

    read_json('{"a": [1, 2]} and more')          # Literal({'a': [1, 2]}, end=13, notes=())
    read_tolerant("{'a': True,}").notes          # ('single quotes', 'Python literal True', 'trailing comma')
    read_python_call("f(x='a', t=(1, -2.5))")    # PythonCall(name='f', arguments={'x': 'a', 't': [1, -2.5]}, ...)

Every function raises nothing but `LiteralError` (`repair_json`: nothing), takes time linear in what it reads, nests
no deeper than `MAX_DEPTH`, and returns values that `json.dumps(allow_nan=False)` takes and UTF-8 can encode.

A repair is made only where one meaning is left. An unescaped quote inside a string is the one that needs a second
reading, in which a quote ends its string only before what may follow a string in that place. It is given up where the
text could as well be an expression ('a' + 'b') or lack a comma, and has to lead to the end of what was given.
"""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import accumulate
from typing import Any, Final, NamedTuple, NoReturn

MAX_DEPTH: Final = 200
"""Brackets open at once; one more is an error."""

_MAX_DIGITS: Final = 4300  # of Python's default for int <-> str: what is longer cannot be written out again
_INT_BOUND: Final = 10**_MAX_DIGITS
_MAX_INNER_QUOTES: Final = 64  # in one string: bounds what a second reading costs a caller that tries many places
_INFINITE: Final = (float("inf"), float("-inf"))


_UNCLOSED = "missing closing bracket"


class LiteralError(ValueError):
    """No literal can be read.

    `position` is an index into the text, `reason` a sentence for people. `incomplete` is True when the text ended
    before the literal did, so that more text could have completed it, and False when it is wrong whatever follows.
    """

    def __init__(self, reason: str, position: int, incomplete: bool = False) -> None:
        super().__init__(reason, position, incomplete)
        self.reason = reason
        self.position = position
        self.incomplete = incomplete

    def __str__(self) -> str:
        return f"{self.reason} at {self.position}"


class Literal(NamedTuple):
    """A value that was read."""

    value: Any
    """None, bool, int, finite float, str, list or dict with str keys, nested."""
    end: int
    """The index behind the literal."""
    notes: tuple[str, ...] = ()
    """What is not in the dialect and was put right; () when well formed in it."""

    @property
    def unclosed(self) -> bool:
        """Whether closing brackets are missing at the end of the text, which a cut text lacks as well."""
        return any(_UNCLOSED in note for note in self.notes)


class Repaired(NamedTuple):
    """A whole text that was read as one value, and what had to be put right for it."""

    value: Any
    notes: tuple[str, ...]


class PythonCall(NamedTuple):
    """A call as Python writes it; all indices point into the text."""

    name: str
    positional: tuple[Any, ...]
    arguments: dict[str, Any]
    """The keyword arguments, in order."""
    start: int
    """Of the name."""
    end: int
    """Behind the closing parenthesis."""
    arguments_start: int
    """Behind the opening parenthesis."""
    arguments_end: int
    """Of the closing parenthesis."""
    notes: tuple[str, ...] = ()


# --- strict JSON ------------------------------------------------------------------------------------------------------

_OPENING: Final = ("{", "[")
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_BRACKETS: Final = re.compile(r'"[^"\\]*+(?>(?:\\.[^"\\]*+)*)(?:"|\Z)|([\[\]{}])', re.DOTALL)
_BRACKET_STEP: Final = {"": 0, "[": 1, "{": 1, "]": -1, "}": -1}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# All there is up to an escape of half a surrogate pair.
_NO_LONE_ESCAPE: Final = re.compile(
    r"[^\\]*+(?>(?:\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?!u[dD][89a-fA-F]).)[^\\]*+)*)",
    re.DOTALL,
)
_HIGH_ESCAPE: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW_CUT: Final = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z")
_JSON_CUT: Final = re.compile(r"(?:[ \t\r\n]*|-|t|tr|tru|f|fa|fal|fals|n|nu|nul)\Z")
_JSON_CUT_ESCAPE: Final = re.compile(r"\\u[0-9a-fA-F]{0,4}\Z")
_JSON_CUT_NUMBER: Final = re.compile(r"(?:(\.)|[eE][+-]?)\Z")


def _json_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _json_float(text: str) -> float:
    value = float(text)
    if value in _INFINITE:
        raise ValueError("a number out of range")
    return value


def _json_int(text: str) -> int:
    if len(text) - (text[0] == "-") > _MAX_DIGITS:
        raise ValueError("an integer of too many digits")
    return int(text)


_DECODE_STRICT: Final = json.JSONDecoder(
    parse_constant=_json_constant, parse_float=_json_float, parse_int=_json_int
).raw_decode
_DECODE_STRING: Final = json.JSONDecoder(strict=False).raw_decode


def read_json(text: str, start: int = 0) -> Literal:
    """The JSON value at `start`, blanks before it allowed, as RFC 8259 has it.

    Refused as well: NaN and infinities, numbers out of range, integers of more than 4300 digits, nesting beyond
    `MAX_DEPTH`, lone surrogates. Of equal keys the last counts.

    Raises `LiteralError`.
    """
    if text[start : start + 1] not in _OPENING:
        start = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches everywhere
    try:
        value, end = _DECODE_STRICT(text, start)
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
    if not text.isascii() and (raw := _SURROGATE.search(text, start, end)):
        raise LiteralError("a lone surrogate", raw.start())
    if text.find("\\u", start, end) >= 0 and (lone := _lone_surrogate(text, start, end)) is not None:
        raise LiteralError("a lone surrogate", lone)
    return Literal(value, end)


def _is_deep(text: str, start: int, end: int) -> bool:
    """Whether `text[start:end]`, JSON that may be cut, nests beyond `MAX_DEPTH`."""
    if text.count("[", start, end) + text.count("{", start, end) <= MAX_DEPTH:
        return False
    steps = map(_BRACKET_STEP.__getitem__, _BRACKETS.findall(text, start, end))
    return max(accumulate(steps), default=0) > MAX_DEPTH


def _lone_surrogate(text: str, start: int, end: int) -> int | None:
    """Where JSON text escapes half a surrogate pair. Half of one at the very end may yet be completed."""
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
    before = text[max(0, position - _MAX_DIGITS) : position].rstrip("0123456789")[-2:]
    return not (before[-1:] in ("e", "E", "+") or before in ("e-", "E-") or (number[1] and before[-1:] == "."))


# --- strings ----------------------------------------------------------------------------------------------------------

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
_JSON_ESCAPE: Final = re.compile(r"""\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt'])|)""")
_JSON_ESCAPES: Final = dict(zip("\"\\/'bfnrt", "\"\\/'\b\f\n\r\t", strict=True))
_PYTHON_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|N\{([^{}\\]{1,100})\}|(.))", re.DOTALL
)
_PYTHON_ESCAPES: Final[dict[str, str]] = dict(
    zip("\\'\"\nabfnrtv", ["\\", "'", '"', "", *"\a\b\f\n\r\t\v"], strict=True)
)


class _BadEscape(ValueError):
    pass


def _json_escape(match: re.Match[str]) -> str:
    if match[1]:
        return chr(int(match[1], 16))
    if match[2]:
        return _JSON_ESCAPES[match[2]]
    raise _BadEscape


def _python_escape(match: re.Match[str]) -> str:
    kind = match.lastindex
    if kind is None:
        raise _BadEscape
    content: str = match[kind]
    if kind == 6:
        if content in "xuUN":
            raise _BadEscape
        return _PYTHON_ESCAPES.get(content, f"\\{content}")
    if kind == 5:
        try:
            return unicodedata.lookup(content)
        except KeyError:
            raise _BadEscape from None
    code = int(content, 8 if kind == 4 else 16)
    if code > 0x10FFFF:
        raise _BadEscape
    return chr(code)


def _unescape_python(body: str) -> str:
    if "\0" not in body:  # which then can stand for an escaped backslash, and all common escapes go at C speed
        plain = body.replace("\\\\", "\0").replace("\\n", "\n").replace("\\'", "'").replace('\\"', '"')
        if "\\" in plain:
            plain = plain.replace("\\t", "\t").replace("\\r", "\r")
        if "\\" not in plain:
            return plain.replace("\0", "\\")
    return _PYTHON_ESCAPE.sub(_python_escape, body)


def _join_surrogates(value: str) -> tuple[str, bool]:
    """`value` with surrogate pairs as characters and U+FFFD for halves, and whether there were halves."""
    joined = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined, joined.count("\ufffd") > value.count("\ufffd")


class _Reader:
    """One reading of a text up to `end`: its dialect, how it takes quotes, and what it had to put right."""

    __slots__ = ("end", "in_call", "loose", "notes", "python", "text")

    def __init__(self, text: str, end: int, *, python: bool, loose: bool = False, in_call: bool = False) -> None:
        self.text = text
        self.end = end
        self.python = python
        self.loose = loose
        """The second reading: quotes inside strings may be unescaped."""
        self.in_call = in_call
        self.notes: dict[str, None] = {}
        """A set that keeps its order."""

    def string(self, start: int, quote_at: int, context: str) -> tuple[str, int]:
        """The string whose prefix starts at `start` and whose quote stands at `quote_at`; also where it ends."""
        text = self.text
        prefix = text[start:quote_at].lower()
        if prefix not in ("", "r", "u"):
            raise LiteralError(f"a string with prefix {prefix!r} is no literal here", start)
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
                value = self.unescape_json(body, quote_at, end) if json_rules else _unescape_python(body)
            except _BadEscape:
                raise LiteralError("a string with an invalid escape", start) from None
        if not value.isascii() and _SURROGATE.search(value):
            value, lone = _join_surrogates(value)
            if lone:
                self.notes["lone surrogate"] = None
        return value, end

    def unescape_json(self, body: str, quote_at: int, end: int) -> str:
        if not self.loose:
            try:
                return str(_DECODE_STRING(self.text, quote_at)[0])
            except ValueError:
                pass
        value = _JSON_ESCAPE.sub(_json_escape, body)
        if "\\'" in body.replace("\\\\", ""):
            self.notes["escaped apostrophe"] = None
        return value

    def loose_end(self, body_at: int, quote: str, context: str) -> int:
        """The second reading's end of a string: the first quote before what may follow a string in `context`."""
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
                raise LiteralError("a string followed by what is no literal", end)
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
            raise LiteralError("what starts like a number is none", start, cut) from None
        if not self.python:
            self.notes["Python number"] = None
        return value, end

    def number_value(self, digits: str, negative: bool) -> Any:
        """The number that `digits` spells, or its text where that is out of range. ValueError where it is none."""
        text = "-" + digits if negative else digits
        if len(digits) > _MAX_DIGITS and digits.replace("_", "").isdecimal():  # not left to an adjustable limit
            self.notes["number out of range as text"] = None
            return text
        value = _python_number(digits)
        if value in _INFINITE or (type(value) is int and value >= _INT_BOUND):
            self.notes["number out of range as text"] = None
            return text
        return -value if negative else value

    def word(self, word: str, start: int, end: int) -> Any:
        """The value of a bare word."""
        if word in _WORDS:
            value = _WORDS[word]
            if type(value) is str:
                self.notes[f"{word} as text"] = None
            elif not self.python and word[0] in "TFN":
                self.notes[f"Python literal {word}"] = None
            return value
        cut = end == self.end and (word in _STRING_PREFIXES or any(known.startswith(word) for known in _WORDS))
        raise LiteralError(f"{word[:40]!r} is no literal", start, cut)

    def key(self, value: Any, position: int) -> str:
        """A key as `json.dumps` writes it."""
        if type(value) is str:
            return value
        if isinstance(value, (list, dict)):
            raise LiteralError("a key that is no text", position)
        if not self.python:
            self.notes["a key that is no text"] = None
        return json.dumps(value)

    def is_blank(self, position: int) -> bool:
        """Whether nothing but blanks follows."""
        return _SPACE.match(self.text, position, self.end).end() == self.end  # type: ignore[union-attr]

    def value(self, position: int) -> tuple[Any, int]:
        """The value at `position`, blanks before it allowed, and the index behind it."""
        text, end, python, loose = self.text, self.end, self.python, self.loose
        read_token = (_LOOSE_TOKEN if loose else _TOKEN).match
        stack: list[tuple[Any, str, str | None]] = []
        container: Any = None
        bracket = ""  # that opened `container`
        key: str | None = None  # of the member that is being read
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
                if python and text[position : position + 1] not in _BEHIND_A_STRING:
                    value, position = self.joined(value, position)
            elif kind == _STRING:
                context = bracket
                if bracket == "{" and key is None:
                    context = ":"
                elif not bracket and self.in_call:
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
                        raise LiteralError("no ':' behind a key", position, self.is_blank(position))
                    position = colon.end()
                    break
                if bracket == "{":
                    container[key] = value
                    key = None
                else:
                    container.append(value)
                separator = _SEPARATOR.match(text, position, end)
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
                    if len(container) == 1:  # parentheses around a value, no tuple
                        value = container[0]
                    if not python:
                        self.notes["Python tuple" if len(container) > 1 else "parentheses"] = None
                container, bracket, key = stack.pop()

    def joined(self, value: str, position: int) -> tuple[str, int]:
        """`value` and the strings that follow it without a comma, which Python takes as one."""
        parts = [value]
        while following := _STRING_FOLLOWS.match(self.text, position, self.end):
            part, position = self.string(following.start(1), following.end() - 1, "")
            parts.append(part)
        return "".join(parts) if len(parts) > 1 else value, position

    def closed(self, container: Any, bracket: str, key: str | None, stack: list[tuple[Any, str, str | None]]) -> Any:
        """The outermost container when the text ended behind a whole value, with the brackets that are missing."""
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
                    raise LiteralError("a key that is no text", self.end)
                container[key] = value
            else:
                container.append(value)
        self.notes[_UNCLOSED if count == 1 else f"{_UNCLOSED} ({count} times)"] = None
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
# Plain strings hold nothing that a JSON string may not hold: the rest is looked at more closely.
_PLAIN_STRINGS: Final = r"""(?:"([^"\\\x00-\x1f\ud800-\udfff]*+)"(?!")|'([^'\\\x00-\x1f\ud800-\udfff]*+)'(?!'))"""
_TOKEN: Final = re.compile(r"[ \t\r\n]*+(?:" + _PLAIN_STRINGS + _TOKEN_TAIL, re.VERBOSE)
_MEMBER: Final = re.compile(rf"[ \t\r\n]*+{_PLAIN_STRINGS}[ \t\r\n]*+:")
_LOOSE_TOKEN: Final = re.compile(r"[ \t\r\n]*+(?:((?!))|((?!))" + _TOKEN_TAIL, re.VERBOSE)
_COLON: Final = re.compile(r"[ \t\r\n]*:")
_SEPARATOR: Final = re.compile(r"[ \t\r\n]*([,\]})])")
_CLOSING: Final = {"[": "]", "{": "}", "(": ")"}
_BEHIND_A_STRING: Final = ",)]}:"
_WORDS: Final[dict[str, Any]] = {
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

_NAME: Final = r"[^\W\d][\w-]*+"
_QUOTE_OR_ESCAPE: Final = {q: re.compile(rf"\\.|({q})", re.DOTALL) for q in "\"'"}
_CLOSED: Final = r"[\s}\])]*+(?:,|<|\Z)"  # what may stand behind the bracket that closes an inner container
_ITEM: Final = r"""["'\[{(\]})\d+.-]|true\b|false\b|null\b|True\b|False\b|None\b|NaN\b|Infinity\b"""
_CALL_TAIL: Final = (
    rf"\s*+(?:\Z|\]\s*+(?:\Z|<)|<\||</[\w:]*calls?>|,\s*+{_NAME}(?>(?:\.[\w-]++)*)\(\s*+{_NAME}\s*+=(?!=))"
)
# By context: a member's key, a member's value, an item of a list or a tuple, an argument, alone.
_LOOSE_END: Final = {
    context: re.compile(r"\s*+(?:" + pattern + ")")
    for context, pattern in {
        ":": r":",
        "{": rf"""\}}{_CLOSED}|,\s*+["'}}]""",
        "[": rf"\]{_CLOSED}|,\s*+(?:{_ITEM})",
        "(": rf"\){_CLOSED}|,\s*+(?:{_ITEM})",
        "f(": rf"\){_CALL_TAIL}|,\s*+{_NAME}\s*+=(?!=)",
        "": r"\Z",
    }.items()
}
# Behind a quote that does not end its string: signs that it may, and that the next item, member or argument would be
# swallowed. Two strings with nothing to speak of between them may be one with quotes or two without a comma.
_LOOSE_DOUBT: Final = re.compile(r"\s*+[,:}\])]")
_LOOSE_DOUBT_CALL: Final = re.compile(rf"""[^\w"'\\]*+{_NAME}\s*+=\s*+["']""")
_QUOTE_FOLLOWS: Final = re.compile(r"""[^\w"'\\]*+["']""")
# What makes an expression of the string before it. The text of a string may look like that too: then nobody can tell.
_OPERATION: Final = re.compile(
    r"""\s*+(?:[+%*]\s*+[\w"'(]|\.\s*+\w++\s*+\(|\[[-\d:\s]*+\]|[=!]=|(?:if|for|in|is|and|or|not)\s)"""
)


def _python_number(digits: str) -> int | float:
    """The number that Python reads, without a sign. ValueError where it reads none."""
    try:
        return int(digits, 0)
    except ValueError:
        if digits.replace("_", "").isdecimal() and len(digits) <= _MAX_DIGITS:  # 007, 1__0
            raise
        return float(digits)


def _is_python_number(digits: str) -> bool:
    try:
        _python_number(digits)
    except ValueError:
        return False
    return True


# --- readers ----------------------------------------------------------------------------------------------------------


def _bound(text: str, end: int | None) -> int:
    return len(text) if end is None else min(end, len(text))


def _read(text: str, start: int, end: int, python: bool) -> Literal:
    reader = _Reader(text, end, python=python)
    try:
        value, stop = reader.value(start)
    except LiteralError as first:
        if not _is_worth_a_second_reading(text, start, first):
            raise
        reader = _Reader(text, end, python=python, loose=True)
        try:
            value, stop = reader.value(start)
        except LiteralError as second:
            raise LiteralError(first.reason, first.position, second.incomplete) from None
        if _SURPLUS.match(text, stop, end) is None:
            raise
    return Literal(value, stop, tuple(reader.notes))


_SURPLUS: Final = re.compile(r"[\s\]}]*+\Z")


def _is_worth_a_second_reading(text: str, start: int, first: LiteralError) -> bool:
    """Whether a quote may have been taken for the end of its string. A string without any end is just cut."""
    if first.incomplete:
        return False
    return text.find('"', start, first.position) >= 0 or text.find("'", start, first.position) >= 0


def read_tolerant(text: str, start: int = 0, end: int | None = None) -> Literal:
    """The JSON or Python literal at `start`, put right where its meaning is plain; `notes` tell what was.

    * Python's strings, numbers, words, tuples; trailing commas; raw control characters in strings; `\\'` in "..".
    * NaN, infinities, numbers out of range and integers of more than 4300 digits become their own text, lone
      surrogates U+FFFD, keys that are numbers or words their JSON text.
    * Brackets missing at `end` are closed, if the text ends behind a whole value: `text[start:end]` has to be a text
      that was closed, not cut. A string, a key, a comma or half a number at the end is never completed.
    * Unescaped quotes inside strings, where one reading is left and nothing but closing brackets follows it.

    Bare words, expressions, comments, mismatched brackets and escapes that JSON does not know are errors. What follows
    the literal is the caller's.

    Raises `LiteralError`.
    """
    return _read(text, start, _bound(text, end), python=False)


def read_python(text: str, start: int = 0, end: int | None = None) -> Literal:
    """The Python literal at `start`, as pythonic formats write it.

    Strings in all quotes, with Python's escapes, prefixes r and u, and joined when adjacent; ints, floats, signs;
    True/False/None and true/false/null; lists, tuples (read as lists), dicts (keys as `json.dumps` writes them).
    Raw newlines in any string, surrogate pairs as two escapes and JSON's words need no note. Noted are values out of
    range and lone surrogates, as by `read_tolerant`, and unescaped quotes. Sets, bytes, f-strings, names, calls,
    operators and everything else are errors: nothing is ever evaluated.

    Raises `LiteralError`.
    """
    return _read(text, start, _bound(text, end), python=True)


_CALL_HEAD: Final = re.compile(rf"[ \t\r\n]*+({_NAME}(?>(?:\.[\w-]++)*))[ \t]*+\(")
_CALL_HEAD_CUT: Final = re.compile(rf"[ \t\r\n]*+(?:{_NAME}(?>(?:\.[\w-]++)*)\.?[ \t]*+)?\Z")
_ARGUMENT: Final = re.compile(rf"[ \t\r\n]*+(?:(\))|({_NAME})[ \t\r\n]*+=(?!=))")
_ARGUMENT_CUT: Final = re.compile(rf"[ \t\r\n]*+{_NAME}[ \t\r\n]*+\Z")
_PLAIN_ARGUMENT: Final = re.compile(
    rf"[ \t\r\n]*+({_NAME})[ \t\r\n]*+=[ \t\r\n]*+"
    rf"(?:{_PLAIN_STRINGS}|(0|-?[1-9][0-9]{{0,17}})|(True|False|None|true|false|null))[ \t\r\n]*+([,)])"
)
_CALL_CLOSED: Final = re.compile(_CALL_TAIL)


def read_python_call(text: str, start: int = 0, end: int | None = None) -> PythonCall:
    """The call `name(a=.., b=..)` at `start`, blanks before it allowed, its arguments as `read_python` reads them.

    Names may hold dots and dashes, parameters may be reserved words. Positional arguments are kept apart, and have to
    come first. Of a parameter that is given twice the last value counts, with a note. Whatever follows the closing
    parenthesis is the caller's.

    Raises `LiteralError`.
    """
    end = _bound(text, end)
    try:
        return _read_call(text, start, end, loose=False)
    except LiteralError as first:
        if not _is_worth_a_second_reading(text, start, first):
            raise
        try:
            return _read_call(text, start, end, loose=True)
        except LiteralError as second:
            raise LiteralError(first.reason, first.position, second.incomplete) from None


def _read_call(text: str, start: int, end: int, loose: bool) -> PythonCall:
    head = _CALL_HEAD.match(text, start, end)
    if head is None:
        raise LiteralError("no call", start, _CALL_HEAD_CUT.match(text, start, end) is not None)
    reader = _Reader(text, end, python=True, loose=loose, in_call=True)
    positional: list[Any] = []
    arguments: dict[str, Any] = {}
    position = arguments_start = head.end()
    while True:
        plain = None if loose else _PLAIN_ARGUMENT.match(text, position, end)
        if plain is not None:
            name, value, single, digits, word, mark = plain.groups()
            if name in arguments:
                reader.notes[f"duplicate argument {name}"] = None
            if digits is not None:
                arguments[name] = int(digits)
            elif word is not None:
                arguments[name] = _WORDS[word]
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
                    raise LiteralError("no '=' behind a parameter name", position, True) from error
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
        separator = _SEPARATOR.match(text, position, end)
        if separator is None:
            raise LiteralError("neither ',' nor ')'", position, reader.is_blank(position))
        position = separator.end()
        if separator[1] == ")":
            break
        if separator[1] != ",":
            raise LiteralError(f"{separator[1]!r} inside a call", position - 1)
    if loose and _CALL_CLOSED.match(text, position, end) is None:
        raise LiteralError("a string followed by what is no literal", position)
    return PythonCall(
        head[1],
        tuple(positional),
        arguments,
        head.start(1),
        position,
        arguments_start,
        position - 1,
        tuple(reader.notes),
    )


_ESCAPED_ONCE: Final = re.compile(r'[\[{\s]*+\\"')


def repair_json(text: str) -> Repaired | None:
    """The whole text, blanks around it ignored, as one literal; None when its meaning is not plain.

    On top of `read_tolerant`: closing brackets too many at the end are dropped, and a text that was escaped as a whole
    (`{\\"a\\": 1}`) is unescaped once, if that makes it JSON. The text has to be one that was closed, not cut.
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
        unescaped, end = _DECODE_STRING(quoted)
        literal = read_json(unescaped)
    except ValueError:
        return None
    if end != len(quoted) or _SPACE.fullmatch(unescaped, literal.end) is None:
        return None
    return Repaired(literal.value, ("escaped as a whole",))
