"""`tool_choice` without a grammar: the prompt ends with the opening of the call, and the model writes the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.errors import LachesisError
from tool_call_parsers import ToolCallParser

_NAME = "placeholder_name"
_KEY = "placeholder_key"


class ToolChoiceError(LachesisError, ValueError):
    """`tool_choice` cannot be fulfilled."""


def forced_opening(
    parser: ToolCallParser,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    *,
    reasoning_is_open: bool = False,
) -> str:
    """The text that a completion must begin with, "" for none.

    The parser renders a call, which is cut before its name if any tool will do, or after the name of a required tool.
    A reasoning block that the prompt opened is closed first.

    Raises:
        ToolChoiceError: no tools, an unknown one, or a format whose calls have no fixed opening.
    """
    if tool_choice is None or tool_choice in ("auto", "none"):
        return ""
    names = [tool["function"]["name"] for tool in tools or ()]
    wanted = _wanted(tool_choice, names)
    # A registered parser needs no more than `parse`.
    written = _call(parser, _NAME) if isinstance(parser, ToolCallParser) else ""
    opening, found, _ = written.partition(_KEY if wanted is not None else _NAME)
    if wanted is not None:
        # Cut after the name: the beginning of the arguments depends on their number and types.
        before, found, _ = opening.rpartition(_NAME)
        opening = (before + _NAME).replace(_NAME, _as_written(parser, written, wanted)) if found else ""
    if not found:
        raise ToolChoiceError(
            f"tool_choice {tool_choice!r}: calls of the format {_format(parser)!r} have no fixed opening; "
            'use "auto" and let the agent loop sample again'
        )
    closing = parser.reasoning.closes[0] + "\n\n" if reasoning_is_open and parser.reasoning is not None else ""
    return closing + opening


def _format(parser: ToolCallParser) -> str:
    return getattr(parser, "name", type(parser).__name__)


def _call(parser: ToolCallParser, name: str) -> str:
    sample = {"id": "call_00001", "function": {"name": name, "arguments": {_KEY: "placeholder"}}}
    return parser.render(None, None, [sample])


def _as_written(parser: ToolCallParser, placeholder: str, name: str) -> str:
    """The name in a call, with escapes: what stands for that of `placeholder`. Raises `ToolChoiceError`."""
    try:
        written = _call(parser, name)
        calls = [call.name for call in parser.parse(written, [{"function": {"name": name}}]).tool_calls]
    except ValueError:
        written, calls = "", []
    around = placeholder.split(_NAME)
    length = (len(written) - sum(map(len, around))) // (len(around) - 1)
    found = written[len(around[0]) :][: max(0, length)]
    if found.join(around) != written or calls != [name]:
        raise ToolChoiceError(
            f"tool_choice names {name!r}, which calls of the format {parser.name!r} cannot begin with"
        )
    return found


def _wanted(tool_choice: str | Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The named tool, None if any will do."""
    if not names:
        raise ToolChoiceError(f"tool_choice {tool_choice!r} without tools; pass tools= or leave tool_choice out")
    if tool_choice == "required":
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ToolChoiceError(
            f'tool_choice {tool_choice!r} is not one of "auto", "none", "required" and '
            '{"type": "function", "function": {"name": ...}}'
        )
    if name not in names:
        raise ToolChoiceError(f"tool_choice names {name!r}, which is not offered; there are: {', '.join(names)}")
    return name
