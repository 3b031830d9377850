"""Escapes in the strings of JSON and of Python."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Final

DECODE_STRING: Final = json.JSONDecoder(strict=False).raw_decode
_JSON_ESCAPE: Final = re.compile(r"""\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt'])|)""")
_JSON_ESCAPES: Final = dict(zip("\"\\/'bfnrt", "\"\\/'\b\f\n\r\t", strict=True))
_PYTHON_ESCAPE: Final = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|N\{([^{}\\]{1,100})\}|(.))", re.DOTALL
)
_PYTHON_ESCAPES: Final[dict[str, str]] = dict(
    zip("\\'\"\nabfnrtv", ["\\", "'", '"', "", *"\a\b\f\n\r\t\v"], strict=True)
)


class BadEscape(ValueError):
    """A string has an escape that its language does not know."""


def _json_escape(match: re.Match[str]) -> str:
    if match[1]:
        return chr(int(match[1], 16))
    return _JSON_ESCAPES[match[2]] if match[2] else "\\"


def _python_escape(match: re.Match[str]) -> str:
    kind = match.lastindex
    if kind is None:
        raise BadEscape
    content: str = match[kind]
    if kind == 6:
        if content in "xuUN":
            raise BadEscape
        return _PYTHON_ESCAPES.get(content, f"\\{content}")
    if kind == 5:
        try:
            return unicodedata.lookup(content)
        except KeyError:
            raise BadEscape from None
    code = int(content, 8 if kind == 4 else 16)
    if code > 0x10FFFF:
        raise BadEscape
    return chr(code)


def replace_json_escapes(body: str) -> tuple[str, bool]:
    """A string's body with JSON's escapes, and `\\'`, decoded, and whether it has others.

    The backslash of another escape stays: a regular expression or a path (`\\d`, `C:\\p`) was not escaped.
    """
    value = _JSON_ESCAPE.sub(_json_escape, body)
    return value, any(not match[1] and not match[2] for match in _JSON_ESCAPE.finditer(body))


def unescape_python(body: str) -> str:
    """A string's body with Python's escapes decoded. Raises `BadEscape` for others."""
    if "\0" not in body:  # so "\0" can mark an escaped backslash, and common escapes are replaced at C speed
        plain = body.replace("\\\\", "\0").replace("\\n", "\n").replace("\\'", "'").replace('\\"', '"')
        if "\\" in plain:
            plain = plain.replace("\\t", "\t").replace("\\r", "\r")
        if "\\" not in plain:
            return plain.replace("\0", "\\")
    return _PYTHON_ESCAPE.sub(_python_escape, body)


def join_surrogates(value: str) -> tuple[str, bool]:
    """`value` with surrogate pairs joined and lone ones as U+FFFD, and whether it had lone ones."""
    joined = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return joined, joined.count("\ufffd") > value.count("\ufffd")
