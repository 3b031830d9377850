"""Checks of a format's row: the types of its fields, and the placeholders of its templates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class Syntax(StrEnum):
    """The spelling of a template's placeholders."""

    PERCENT = "%({})s"
    BRACES = "{{{}}}"


_hints = cache(get_type_hints)


def check_types(row: Any) -> None:
    """Raise TypeError for a field of the wrong type, and ValueError for a word that is not among a field's words."""
    hints = _hints(type(row))  # type: ignore[arg-type]  # a class is hashable
    for field in dataclasses.fields(row):
        value, hint = getattr(row, field.name), hints[field.name]
        if value is field.default:
            continue
        if not _fits(value, hint):
            raise TypeError(f"{type(row).__name__}: {field.name} must be {field.type}, not {value!r}")
        if get_origin(hint) is Literal and value not in get_args(hint):
            words = ", ".join(map(repr, get_args(hint)))
            raise ValueError(f"{type(row).__name__}: {field.name} must be one of {words}, not {value!r}")


def check_template(row: Any, field: str, syntax: Syntax, needed: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    """Raise ValueError if the template in `field` lacks a needed placeholder, or spells one in the other syntax.

    An empty template is none.
    """
    template: str = getattr(row, field)
    other = Syntax.BRACES if syntax is Syntax.PERCENT else Syntax.PERCENT
    for name in (*needed, *others) if template else ():
        here = f"{type(row).__name__}: {field} {template!r}"
        if other.format(name) in template:
            raise ValueError(f"{here}: write {syntax.format(name)}, not {other.format(name)}")
        if name in needed and syntax.format(name) not in template:
            raise ValueError(f"{here} lacks {syntax.format(name)}")


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        return isinstance(value, hint) and (hint is type or not isinstance(value, type))
    if origin is Literal:
        return isinstance(value, str)
    if origin is UnionType:
        return any(_fits(value, kind) for kind in inner)
    if origin is Callable:
        return callable(value)
    if not isinstance(value, origin):
        return False
    if origin is dict:
        return all(_fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items())
    if origin is tuple and inner[1:] != (...,):
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(item, inner[0]) for item in value)
