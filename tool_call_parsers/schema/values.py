"""The value of a text under a schema that allows some kinds of values.

The first kind that is allowed and fits the text gives the value: null, integer, number, boolean, object, array, or
else the text itself, unchanged, whether the schema allows a string or not.

* Strings are never stripped, unquoted or unescaped. A text that `enum` or `const` lists as a string is that string.
* White space around a value of another kind is ignored.
* null: `null` or `None`. Booleans: `true` or `false` in any case; `1` or `0` where neither numbers nor free strings
  are allowed.
* Numbers are ASCII decimals, integers exact up to `MAX_DIGITS` digits. If any string is allowed too, only JSON's
    spelling is read, so that "007" and "+1" stay text; otherwise a sign, leading zeros and a bare decimal point are
    accepted. `5.0` is an integer only if neither numbers nor free strings are allowed; an exponent never makes an
    integer. A number that overflows stays text.
* Objects and arrays are JSON, with control characters inside strings accepted; if no free string is allowed, also
    a text that `repair_json` can repair. Values inside keep the types that the text gives them.

Every value can be serialised as JSON, is at most `MAX_DEPTH` deep, and can be encoded as UTF-8 if the text can.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tool_call_parsers.literals.literal import MAX_DIGITS, SURROGATE
from tool_call_parsers.literals.strict import json_constant, json_float
from tool_call_parsers.literals.tolerant import repair_json
from tool_call_parsers.schema.kinds import (
    ARRAY,
    BOOLEAN,
    CONTAINER,
    MAX_DEPTH,
    NULL,
    NUMBER,
    NUMERIC,
    OBJECT,
    STRING,
    value_rule,
)

_BLANKS = " \t\n\r"
_JSON_NUMBER = re.compile(r"(-?+(?:0|[1-9][0-9]*+))(?>(\.[0-9]++)?)(?>([eE][+-]?+[0-9]++)?)")
_LOOSE_NUMBER = re.compile(r"(?=[+-]?\.?[0-9])([+-]?+[0-9]*+)(?>(\.[0-9]*+)?)(?>([eE][+-]?+[0-9]++)?)")
_SURROGATE_ESCAPE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
_decode = json.JSONDecoder(parse_float=json_float, parse_constant=json_constant, strict=False).decode


def coerce(text: str, schema: object, root: object = None) -> Any:
    """The value of `text` under `schema`. `root` is the root of its `$ref`s, by default the schema."""
    rule = value_rule(schema, root)
    return text if rule is None else value_of(text, *rule)


def value_of(text: str, kinds: int, listed: frozenset[str]) -> Any:
    """The value of `text` if `kinds` are allowed, and the strings that are `listed`."""
    if listed and text in listed:
        return text
    # Blanks around a scalar are ignored, unless the value may be a string: "null " is one.
    bare = text if kinds & STRING else text.strip(_BLANKS)
    if kinds & NULL and (bare == "null" or bare == "None"):
        return None
    if kinds & NUMERIC:
        number = _number(bare, kinds)
        if number is not None:
            return number
    if kinds & BOOLEAN and len(bare) < 6:
        word = bare.lower()
        if word == "true" or (word == "1" and not kinds & (NUMERIC | STRING)):
            return True
        if word == "false" or (word == "0" and not kinds & (NUMERIC | STRING)):
            return False
    if kinds & CONTAINER and (bare := text.strip(_BLANKS)):
        return _container(text, bare, kinds)
    return text


def _number(bare: str, kinds: int) -> int | float | None:
    match = (_JSON_NUMBER if kinds & STRING else _LOOSE_NUMBER).fullmatch(bare)
    if match is None:
        return None
    whole, fraction, exponent = match.groups()
    if fraction is not None or exponent is not None:
        if kinds & NUMBER:
            number = float(bare)
            return number if number - number == 0.0 else None
        if kinds & STRING or exponent is not None or fraction.strip("0") != ".":
            return None
    if len(whole) > MAX_DIGITS + 1:
        return None
    try:
        return int(whole)
    except ValueError:  # the process has lowered the limit, or no digit precedes the decimal point
        return None


def _container(text: str, bare: str, kinds: int) -> Any:
    """The object or array in `bare`, else `text`."""
    try:
        first = bare[0]
        if kinds & (OBJECT if first == "{" else ARRAY if first == "[" else 0):
            try:
                return _sound(_decode(bare), bare)
            except ValueError:
                pass
        if kinds & STRING:
            return text
        repaired = repair_json(bare)
        if repaired is None:
            return text
        value = repaired.value
        if kinds & (OBJECT if type(value) is dict else ARRAY if type(value) is list else 0):
            return _sound(value, bare)
    except (RecursionError, _TooDeep):
        pass
    return text


class _TooDeep(Exception):
    """A value is nested deeper than `MAX_DEPTH`."""


def _sound(value: Any, source: str) -> Any:
    """A decoded value without lone surrogates. Raises `_TooDeep`. Checks only what `source` can contain."""
    if source.count("[") + source.count("{") + source.count("(") > MAX_DEPTH:
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [
                inner
                for outer in level
                for inner in (outer.values() if type(outer) is dict else outer)
                if type(inner) is dict or type(inner) is list
            ]
            if not level:
                break
        else:
            raise _TooDeep
    if _SURROGATE_ESCAPE.search(source):
        written = json.dumps(value, ensure_ascii=False)
        if SURROGATE.search(written):
            return json.loads(SURROGATE.sub("\ufffd", written))
    return value
