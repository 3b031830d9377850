"""What the offered tools say of their parameters, and the values that argument texts stand for under it.

XML-like formats write every argument as bare text: only the tool's schema tells the string "5" from the number 5.

A schema is reduced to the kinds of values it allows. `$ref` and the members of `allOf` narrow them, the members of
`anyOf` and `oneOf` widen them, `enum` and `const` allow what they list, `nullable` adds null. Where two statements
exclude each other the first counts, in the order type, enum, const, $ref, allOf, anyOf, oneOf. What is no schema, an
unknown type, and a reference that leads nowhere say nothing; a schema that says nothing leaves the text as it is.

The first kind that is allowed and reads the text gives the value: null, integer, number, boolean, object, array, and
else the text itself, unchanged, whether the schema allows a string or not.

* Strings are never stripped, unquoted or unescaped. A text that `enum` or `const` lists as a string is that string.
* White space around a value of another kind is ignored.
* null: `null` or `None`. Booleans: `true` or `false` in any case; `1` or `0` where neither numbers nor free strings
  are allowed.
* Numbers are ASCII decimals, integers exact up to `MAX_DIGITS` digits. Where any string is allowed too, only JSON's
  own spelling is read, so that "007" and "+1" keep their text; elsewhere a sign, leading zeros and a bare decimal
  point are taken. `5.0` is an integer only where neither numbers nor free strings are allowed; an exponent never makes
  one. What overflows stays text.
* Objects and arrays: JSON, in which control characters inside strings are taken; where no free string is allowed, also
  what `repair_json` makes of the text. Values inside keep the types that the text gives them.

Every value is JSON serialisable, at most `MAX_DEPTH` deep, and UTF-8 encodable if the text is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from tool_call_parsers.literals import repair_json
from tool_call_parsers.types import Tools

MAX_DEPTH = 200
"""Nesting of values and of schemas. A deeper value stays text, a deeper schema says nothing."""
MAX_DIGITS = 4300
"""Digits of an integer: Python's own default limit, kept even where the process has lifted it."""

_NULL, _INTEGER, _NUMBER, _BOOLEAN, _OBJECT, _ARRAY = 1, 2, 4, 8, 16, 32
_LISTED = 64  # strings that enum or const list
_STRING = 128  # any string
_ANY = 256  # nothing said

_NUMERIC = _INTEGER | _NUMBER
_CONTAINER = _OBJECT | _ARRAY
_TYPED = _NULL | _NUMERIC | _BOOLEAN | _CONTAINER

# Beside JSON Schema's names those of Python, protobuf and OpenAPI that stand in tool schemas as found; in any case.
_TYPES = {
    **dict.fromkeys(("null", "none"), _NULL),
    **dict.fromkeys(("integer", "int", "int32", "int64", "long"), _INTEGER),
    **dict.fromkeys(("number", "float", "double"), _NUMERIC),
    **dict.fromkeys(("boolean", "bool"), _BOOLEAN),
    **dict.fromkeys(("object", "dict", "map"), _OBJECT),
    **dict.fromkeys(("array", "list", "tuple"), _ARRAY),
    **dict.fromkeys(("string", "str"), _STRING | _LISTED),
}
_KINDS = {
    type(None): _NULL,
    bool: _BOOLEAN,
    int: _INTEGER,
    float: _NUMBER,
    str: _LISTED,
    dict: _OBJECT,
    list: _ARRAY,
}

_COMPOSED = frozenset({"enum", "const", "$ref", "allOf", "anyOf", "oneOf", "nullable"})

_BLANKS = " \t\n\r"
_JSON_NUMBER = re.compile(r"(-?+(?:0|[1-9][0-9]*+))(?>(\.[0-9]++)?)(?>([eE][+-]?+[0-9]++)?)")
_LOOSE_NUMBER = re.compile(r"(?=[+-]?\.?[0-9])([+-]?+[0-9]*+)(?>(\.[0-9]*+)?)(?>([eE][+-]?+[0-9]++)?)")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
_PERCENT_ENCODED = re.compile(r"(?>(?:%[0-9A-Fa-f]{2})+)")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise ValueError("not a finite number")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant, strict=False).decode


# How the texts of one parameter are read: the kinds that are allowed, the strings that are listed.
_Reading: TypeAlias = tuple[int, frozenset[str]]
_NOTHING_LISTED: frozenset[str] = frozenset()


def coerce(text: str, schema: object, root: object = None) -> Any:
    """The value that `text` stands for under `schema`; `root` is what its `$ref`s point into, by default itself."""
    reading = _reading(schema, root)
    return text if reading is None else _value(text, *reading)


def member(schema: object, key: str | None, root: object) -> object:
    """The schema of a member of the objects under `schema`, of the items of its arrays for None; None if unknown."""
    pending: list[object] = [schema]
    seen: set[int] = set()
    while pending and len(seen) < MAX_DEPTH:
        schema = pending.pop()
        if not _is_mapping(schema) or id(schema) in seen:
            continue
        seen.add(id(schema))
        found = schema.get("items")
        if key is not None:
            properties = schema.get("properties")
            found = properties.get(key) if _is_mapping(properties) else None
            found = schema.get("additionalProperties") if found is None else found
        if _is_mapping(found):
            return found
        for keyword in ("oneOf", "anyOf", "allOf"):
            pending.extend(reversed(_items(schema.get(keyword))))
        if "$ref" in schema:
            pending.append(_resolve(schema["$ref"], (root,)))
    return None


class ToolIndex:
    """The offered tools by name; of tools that share one, the last.

    A tool is OpenAI's `{"type": "function", "function": {...}}` or flat; its parameters stand under `parameters`,
    `input_schema` or `inputSchema`. Tolerates anything in the schemas. Raises `TypeError` where `tools` is neither
    None nor a sequence of mappings.
    """

    __slots__ = ("_signatures", "_tools")

    def __init__(self, tools: Tools | None) -> None:
        self._tools: dict[str, Mapping[Any, Any]] = {}
        self._signatures: dict[str, _Signature] = {}
        if tools is None:
            return
        given: object = tools
        if isinstance(given, (str, bytes, bytearray)) or not isinstance(given, Sequence):
            raise TypeError(f"tools must be a sequence of mappings, not {type(given).__name__}")
        for tool in given:
            if not _is_mapping(tool):
                raise TypeError(f"tools must be a sequence of mappings, and one of its items is {type(tool).__name__}")
            function = tool.get("function")
            if not _is_mapping(function):
                function = tool
            name = function.get("name")
            if isinstance(name, str):
                self._tools[name] = function

    def offered(self, name: str) -> bool:
        """Whether a tool of that name was offered; True where none is known to compare with."""
        return name in self._tools or not self._tools

    def names(self) -> Collection[str]:
        """The names of the offered tools, in order."""
        return self._tools.keys()

    def order(self, name: str) -> tuple[str, ...]:
        """The parameters in the order of the schema, () where it is unknown."""
        return tuple(self._signature(name).properties)

    def required(self, name: str) -> frozenset[str]:
        """The parameters that a call cannot leave out."""
        return self._signature(name).required

    def declares(self, name: str, parameter: str) -> bool | None:
        """Whether the tool has that parameter; None where the tool or its parameters are unknown."""
        signature = self._signature(name)
        return parameter in signature.properties if signature.known else None

    def is_string(self, name: str, parameter: str) -> bool:
        """Whether every text of this parameter stands for itself, so that it need not be complete to be handed out."""
        return self._signature(name).reading(parameter) is None

    def coerce(self, name: str, parameter: str, text: str) -> Any:
        """The value that `text` stands for as this argument; the text itself where nothing is known of it."""
        signature = self._signatures.get(name) or self._signature(name)
        reading = signature.reading(parameter)
        return text if reading is None else _value(text, *reading)

    def schema(self, name: str, parameter: str) -> tuple[object, object]:
        """A parameter's schema, None where nothing is known of it, and what its `$ref`s point into."""
        signature = self._signature(name)
        return signature.properties.get(parameter), signature.root

    def infer(self, parameters: Collection[str]) -> str | None:
        """The one tool that can be called with exactly these parameters; None where none or several can."""
        given = frozenset(parameters)
        found = None
        for name in self._tools:
            signature = self._signature(name)
            if signature.required <= given <= signature.properties.keys():
                if found is not None:
                    return None
                found = name
        return found

    def _signature(self, name: str) -> _Signature:
        signature = self._signatures.get(name)
        if signature is None:
            tool = self._tools.get(name)
            if tool is None:
                return _UNKNOWN  # not kept: names that models make up have no end
            root = tool.get("parameters")
            if root is None:
                root = tool.get("input_schema", tool.get("inputSchema"))
            signature = self._signatures[name] = _Signature(root)
        return signature


class _Signature:
    """The parameters of one tool, those of its schema's `$ref` and `allOf` included."""

    __slots__ = ("_readings", "known", "properties", "required", "root")

    def __init__(self, root: object) -> None:
        self.root = root
        self._readings: dict[str, _Reading | None] = {}
        self.known = False
        self.properties: dict[str, object] = {}
        self.required: frozenset[str] = frozenset()
        seen: set[int] = set()
        pending = [root]
        while pending:
            schema = pending.pop()
            if not _is_mapping(schema) or id(schema) in seen:
                continue
            seen.add(id(schema))
            properties = schema.get("properties")
            if _is_mapping(properties):
                self.known = True
                for name, value in properties.items():
                    if isinstance(name, str) and name not in self.properties:
                        self.properties[name] = value
            required = _items(schema.get("required"))
            if required:
                self.required |= {name for name in required if isinstance(name, str)}
            if "allOf" in schema:
                pending += reversed(_items(schema["allOf"]))
            if "$ref" in schema:
                pending.append(_resolve(schema["$ref"], (root,)))

    def reading(self, parameter: str) -> _Reading | None:
        """How a parameter's texts are read, None where they stand for themselves."""
        try:
            return self._readings[parameter]
        except KeyError:
            if parameter not in self.properties:
                return None  # not kept, as above
        reading = self._readings[parameter] = _reading(self.properties[parameter], self.root)
        return reading


def _is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return type(value) is dict or isinstance(value, Mapping)  # the abstract class is slow to ask


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _reading(schema: object, root: object) -> _Reading | None:
    """How texts are read under a schema, None where all of them stand for themselves."""
    if not _is_mapping(schema):
        return None
    stated = schema.get("type")
    if type(stated) is str and stated in _TYPES and _COMPOSED.isdisjoint(schema):
        kinds = _TYPES[stated]
        return (kinds, _NOTHING_LISTED) if kinds & _TYPED else None
    # A reference into the parameter's own schema is wrong, and what generators write that paste schemas together.
    reducer = _Reducer((schema,) if root is None or root is schema else (root, schema))
    try:
        kinds = reducer.kinds(schema, 0)
    except RecursionError:  # the caller's stack was nearly used up
        return None
    if kinds & _ANY and kinds != _ANY:
        kinds |= _STRING  # one alternative says nothing: it takes any text
    if not kinds & _TYPED:
        return None
    return kinds & ~_ANY, frozenset(reducer.listed) if kinds & _LISTED else _NOTHING_LISTED


class _Reducer:
    """Reduces schemas to the kinds they allow, each once, and collects the strings that they list."""

    __slots__ = ("_bases", "_done", "listed")

    def __init__(self, bases: tuple[object, ...]) -> None:
        self._bases = bases
        self._done: dict[int, int] = {}
        self.listed: set[str] = set()

    def kinds(self, schema: object, depth: int) -> int:
        """The kinds that a schema allows: `_ANY` where it says nothing, 0 where it is being reduced already."""
        if depth > MAX_DEPTH or not _is_mapping(schema):
            return _ANY
        done = self._done.get(id(schema))
        if done is not None:
            return done
        self._done[id(schema)] = 0  # met again below, it adds nothing
        kinds = _types(schema.get("type"))
        if "enum" in schema:
            kinds = _narrow(kinds, self._members(_items(schema["enum"])))
        if "const" in schema:
            kinds = _narrow(kinds, self._members((schema["const"],)))
        if "$ref" in schema:
            kinds = _narrow(kinds, self.kinds(_resolve(schema["$ref"], self._bases), depth + 1))
        for member in _items(schema.get("allOf")):
            kinds = _narrow(kinds, self.kinds(member, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            union = 0
            for member in _items(schema.get(keyword)):
                union |= self.kinds(member, depth + 1)
            kinds = _narrow(kinds, union)
        if kinds == _ANY:
            if _is_mapping(schema.get("properties")):
                kinds = _OBJECT
            elif _is_mapping(schema.get("items")):
                kinds = _ARRAY
        elif schema.get("nullable") is True:
            kinds |= _NULL
        self._done[id(schema)] = kinds
        return kinds

    def _members(self, members: Sequence[Any]) -> int:
        kinds = 0
        for member in members:
            kinds |= _KINDS.get(type(member), 0)
            if type(member) is str:
                self.listed.add(member)
            elif type(member) is float and member.is_integer():
                kinds |= _INTEGER
        return kinds


def _types(stated: object) -> int:
    """The kinds that `type` names, `_ANY` where it names none."""
    if isinstance(stated, str):
        return _TYPES.get(stated) or _TYPES.get(stated.lower(), _ANY)
    kinds = 0
    for name in _items(stated):
        if isinstance(name, str):
            kinds |= _TYPES.get(name.lower(), 0)
    return kinds or _ANY


def _narrow(kinds: int, other: int) -> int:
    """The kinds that both statements allow; the first where the other excludes all of them."""
    if kinds & _ANY:
        return (kinds | other if other & _ANY else other) or kinds
    return kinds if other & _ANY else kinds & other or kinds


def _resolve(reference: object, bases: tuple[object, ...]) -> object:
    """What a local reference, `#` and a JSON pointer, leads to in the first of `bases` that has it; else None."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    if "%" in reference:
        reference = _PERCENT_ENCODED.sub(
            lambda run: bytes.fromhex(run[0].replace("%", "")).decode("utf-8", "replace"), reference
        )
    path = [part.replace("~1", "/").replace("~0", "~") for part in reference.split("/")[1:]]
    for base in bases:
        found: object = base
        for part in path:
            if _is_mapping(found):
                found = found.get(part)
            elif isinstance(found, (list, tuple)) and part.isdecimal() and len(part) < 8 and int(part) < len(found):
                found = found[int(part)]
            else:
                found = None
            if found is None:
                break
        if found is not None:
            return found
    return None


def _value(text: str, kinds: int, listed: frozenset[str]) -> Any:
    if listed and text in listed:
        return text
    # Blanks around a scalar mean nothing, unless the value may be a string: "null " is one.
    bare = text if kinds & _STRING else text.strip(_BLANKS)
    if kinds & _NULL and (bare == "null" or bare == "None"):
        return None
    if kinds & _NUMERIC:
        number = _number(bare, kinds)
        if number is not None:
            return number
    if kinds & _BOOLEAN and len(bare) < 6:
        word = bare.lower()
        if word == "true" or (word == "1" and not kinds & (_NUMERIC | _STRING)):
            return True
        if word == "false" or (word == "0" and not kinds & (_NUMERIC | _STRING)):
            return False
    if kinds & _CONTAINER and (bare := text.strip(_BLANKS)):
        return _container(text, bare, kinds)
    return text


def _number(bare: str, kinds: int) -> int | float | None:
    match = (_JSON_NUMBER if kinds & _STRING else _LOOSE_NUMBER).fullmatch(bare)
    if match is None:
        return None
    whole, fraction, exponent = match.groups()
    if fraction is not None or exponent is not None:
        if kinds & _NUMBER:
            number = float(bare)
            return number if number - number == 0.0 else None
        if kinds & _STRING or exponent is not None or fraction.strip("0") != ".":
            return None
    if len(whole) > MAX_DIGITS + 1:
        return None
    try:
        return int(whole)
    except ValueError:  # the process has lowered the limit, or there is no digit before the decimal point
        return None


def _container(text: str, bare: str, kinds: int) -> Any:
    """The object or array that `bare` stands for, else `text`."""
    try:
        first = bare[0]
        if kinds & (_OBJECT if first == "{" else _ARRAY if first == "[" else 0):
            try:
                return _sound(_decode(bare), bare)
            except ValueError:
                pass
        if kinds & _STRING:
            return text
        repaired = repair_json(bare)
        if repaired is None:
            return text
        value = repaired.value
        if kinds & (_OBJECT if type(value) is dict else _ARRAY if type(value) is list else 0):
            return _sound(value, bare)
    except (RecursionError, _TooDeep):
        pass
    return text


class _TooDeep(Exception):
    """A value is nested deeper than `MAX_DEPTH`."""


def _sound(value: Any, source: str) -> Any:
    """A decoded value without lone surrogates; raises `_TooDeep`. Looks for them only if `source` can hold them."""
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
        if _SURROGATE.search(written):
            return json.loads(_SURROGATE.sub("\ufffd", written))
    return value


_UNKNOWN = _Signature(None)
