"""Parsers whose `parse(text)` returns `(content, tool_calls)`; `tool_call_parsers` itself tells more."""

from __future__ import annotations

from typing import Any

from tool_call_parsers import get_parser as _get_parser
from tool_call_parsers import list_parsers

__all__ = ["ToolCallParser", "get_parser", "list_parsers"]


class ToolCallParser:
    """A parser by its name, in the old form."""

    def __init__(self, name: str) -> None:
        self._parser = _get_parser(name)

    def parse(self, text: str) -> tuple[str | None, list[Any] | None]:
        """The text outside of calls, None where there is none; and the calls as objects of the openai package, which
        work as dicts too, or None."""
        from lachesis.inference.openai_types import tool_call

        parsed = self._parser.parse(text)
        calls = [tool_call(call.id, call.name, call.arguments_json) for call in parsed.tool_calls]
        return (parsed.content or "").strip() or None, calls or None


def get_parser(name: str) -> ToolCallParser:
    """Raises `UnknownParser`, which is a `KeyError`."""
    return ToolCallParser(name)
