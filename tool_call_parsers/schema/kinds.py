"""The kinds of values that a schema allows, and navigation in schemas.

`$ref` and the members of `allOf` narrow the kinds, the members of `anyOf` and `oneOf` widen them, `enum` and `const`
allow the values they list, `nullable` adds null. If two statements exclude each other the first counts, in the
order type, enum, const, $ref, allOf, anyOf, oneOf. Values that are not schemas, unknown types and broken references
say nothing. A schema that says nothing leaves the text as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeGuard

MAX_DEPTH = 200
"""The maximum nesting of values and of schemas. A deeper value stays text, a deeper schema says nothing."""
_PERCENT_ENCODED = re.compile(r"(?>(?:%[0-9A-Fa-f]{2})+)")

NULL, INTEGER, NUMBER, BOOLEAN, OBJECT, ARRAY = 1, 2, 4, 8, 16, 32
LISTED = 64  # strings that enum or const list
STRING = 128  # any string
ANY = 256  # nothing said

NUMERIC = INTEGER | NUMBER
CONTAINER = OBJECT | ARRAY
TYPED = NULL | NUMERIC | BOOLEAN | CONTAINER

# JSON Schema's names and those of Python, protobuf and OpenAPI that occur in tool schemas, in any case.
_TYPES = {
    **dict.fromkeys(("null", "none"), NULL),
    **dict.fromkeys(("integer", "int", "int32", "int64", "long"), INTEGER),
    **dict.fromkeys(("number", "float", "double"), NUMERIC),
    **dict.fromkeys(("boolean", "bool"), BOOLEAN),
    **dict.fromkeys(("object", "dict", "map"), OBJECT),
    **dict.fromkeys(("array", "list", "tuple"), ARRAY),
    **dict.fromkeys(("string", "str"), STRING | LISTED),
}
_KINDS = {
    type(None): NULL,
    bool: BOOLEAN,
    int: INTEGER,
    float: NUMBER,
    str: LISTED,
    dict: OBJECT,
    list: ARRAY,
}

_COMPOSED = frozenset({"enum", "const", "$ref", "allOf", "anyOf", "oneOf", "nullable"})

# The rule for the texts of one parameter: the kinds that are allowed, and the strings that are listed.
ValueRule: TypeAlias = tuple[int, frozenset[str]]
_NOTHING_LISTED: frozenset[str] = frozenset()


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether the value can be a schema with statements."""
    return type(value) is dict or isinstance(value, Mapping)  # the check by the abstract class is slow


def items_of(value: object) -> Sequence[Any]:
    """The items of a list; none for another value."""
    return value if isinstance(value, (list, tuple)) else ()


def resolve(reference: object, bases: tuple[object, ...]) -> object:
    """The target of a local reference (`#` and a JSON pointer) in the first of `bases` that has it, else None."""
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
            if is_mapping(found):
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


def related(schema: object, root: object, keywords: tuple[str, ...]) -> Iterator[Mapping[Any, Any]]:
    """The schema and those that its `$ref` and `keywords` add to it, each once, the nearest first."""
    pending: list[object] = [schema]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if not is_mapping(part) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for keyword in keywords:
            pending.extend(reversed(items_of(part.get(keyword))))
        if "$ref" in part:
            pending.append(resolve(part["$ref"], (root,)))


def member(schema: object, key: str | None, root: object) -> object:
    """The schema of a member of the objects under `schema`, or of the items of its arrays for None; None if unknown."""
    for part in islice(related(schema, root, ("oneOf", "anyOf", "allOf")), MAX_DEPTH):
        found = part.get("items")
        if key is not None:
            properties = part.get("properties")
            found = properties.get(key) if is_mapping(properties) else None
            found = part.get("additionalProperties") if found is None else found
        if is_mapping(found):
            return found
    return None


def value_rule(schema: object, root: object) -> ValueRule | None:
    """The rule for texts under a schema; None if every text is its own value."""
    if not is_mapping(schema):
        return None
    stated = schema.get("type")
    if type(stated) is str and stated in _TYPES and _COMPOSED.isdisjoint(schema):
        kinds = _TYPES[stated]
        return (kinds, _NOTHING_LISTED) if kinds & TYPED else None
    # A reference into the parameter's own schema is wrong, but generators that combine schemas write it.
    reducer = _Reducer((schema,) if root is None or root is schema else (root, schema))
    try:
        kinds = reducer.kinds(schema, 0)
    except RecursionError:  # the caller's stack was nearly exhausted
        return None
    if kinds & ANY and kinds != ANY:
        kinds |= STRING  # an alternative without a statement accepts any text
    if not kinds & TYPED:
        return None
    return kinds & ~ANY, frozenset(reducer.listed) if kinds & LISTED else _NOTHING_LISTED


class _Reducer:
    """Reduces schemas to the kinds they allow, each once, and collects the strings they list."""

    __slots__ = ("_bases", "_done", "listed")

    def __init__(self, bases: tuple[object, ...]) -> None:
        self._bases = bases
        self._done: dict[int, int] = {}
        self.listed: set[str] = set()

    def kinds(self, schema: object, depth: int) -> int:
        """The kinds that a schema allows: `ANY` if it says nothing, 0 while it is being reduced."""
        if depth > MAX_DEPTH or not is_mapping(schema):
            return ANY
        done = self._done.get(id(schema))
        if done is not None:
            return done
        self._done[id(schema)] = 0  # a cycle adds nothing
        kinds = _types(schema.get("type"))
        if "enum" in schema:
            kinds = _narrow(kinds, self._members(items_of(schema["enum"])))
        if "const" in schema:
            kinds = _narrow(kinds, self._members((schema["const"],)))
        if "$ref" in schema:
            kinds = _narrow(kinds, self.kinds(resolve(schema["$ref"], self._bases), depth + 1))
        for member in items_of(schema.get("allOf")):
            kinds = _narrow(kinds, self.kinds(member, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            union = 0
            for member in items_of(schema.get(keyword)):
                union |= self.kinds(member, depth + 1)
            kinds = _narrow(kinds, union)
        if kinds == ANY:
            if is_mapping(schema.get("properties")):
                kinds = OBJECT
            elif is_mapping(schema.get("items")):
                kinds = ARRAY
        elif schema.get("nullable") is True:
            kinds |= NULL
        self._done[id(schema)] = kinds
        return kinds

    def _members(self, members: Sequence[Any]) -> int:
        kinds = 0
        for member in members:
            kinds |= _KINDS.get(type(member), 0)
            if type(member) is str:
                self.listed.add(member)
            elif type(member) is float and member.is_integer():
                kinds |= INTEGER
        return kinds


def _types(stated: object) -> int:
    """The kinds that `type` names, `ANY` if it names none."""
    if isinstance(stated, str):
        return _TYPES.get(stated) or _TYPES.get(stated.lower(), ANY)
    kinds = 0
    for name in items_of(stated):
        if isinstance(name, str):
            kinds |= _TYPES.get(name.lower(), 0)
    return kinds or ANY


def _narrow(kinds: int, other: int) -> int:
    """The kinds that both statements allow; the first if the other excludes all of them."""
    if kinds & ANY:
        return (kinds | other if other & ANY else other) or kinds
    return kinds if other & ANY else kinds & other or kinds
