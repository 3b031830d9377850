"""The parsers by name, spelled as vLLM spells them where vLLM has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tool_call_parsers.types import ToolCallParser

P = TypeVar("P", bound=type[ToolCallParser])

_PARSERS: dict[str, type[ToolCallParser]] = {}


class UnknownParser(ValueError):
    """No parser of that name."""


def register_parser(*names: str) -> Callable[[P], P]:
    """Class decorator: offer a parser (a class made without arguments) under these names."""

    def register(parser: P) -> P:
        for name in names:
            if _PARSERS.setdefault(name, parser) is not parser:
                raise ValueError(f"tool-call parser {name!r} is already registered by {_PARSERS[name].__qualname__}")
        return parser

    return register


def get_parser(name: str) -> ToolCallParser:
    """A parser by name; `UnknownParser` lists the names there are."""
    try:
        return _PARSERS[name]()
    except KeyError:
        raise UnknownParser(f"tool-call parser {name!r} is unknown; there are: {', '.join(list_parsers())}") from None


def list_parsers() -> list[str]:
    """All names, sorted."""
    return sorted(_PARSERS)
