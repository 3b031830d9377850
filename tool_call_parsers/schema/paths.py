"""Navigation in schemas: references and members. Broken references and values that are not schemas give None."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

MAX_DEPTH = 200
"""The maximum nesting of values and of schemas. A deeper value stays text, a deeper schema says nothing."""
_PERCENT_ENCODED = re.compile(r"(?>(?:%[0-9A-Fa-f]{2})+)")


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


def member(schema: object, key: str | None, root: object) -> object:
    """The schema of a member of the objects under `schema`, or of the items of its arrays for None; None if unknown."""
    pending: list[object] = [schema]
    seen: set[int] = set()
    while pending and len(seen) < MAX_DEPTH:
        schema = pending.pop()
        if not is_mapping(schema) or id(schema) in seen:
            continue
        seen.add(id(schema))
        found = schema.get("items")
        if key is not None:
            properties = schema.get("properties")
            found = properties.get(key) if is_mapping(properties) else None
            found = schema.get("additionalProperties") if found is None else found
        if is_mapping(found):
            return found
        for keyword in ("oneOf", "anyOf", "allOf"):
            pending.extend(reversed(items_of(schema.get(keyword))))
        if "$ref" in schema:
            pending.append(resolve(schema["$ref"], (root,)))
    return None
