"""`tool_choice` without a grammar: the opening of the call is part of the prompt, the rest the model writes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tool_call_parsers import ToolCallParser

_NAME = "stand_in_name"
_KEY = "stand_in_key"


class ToolChoiceError(ValueError):
    """`tool_choice` asks for something that cannot be done."""


def forced_opening(
    parser: ToolCallParser,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    *,
    reasoning_is_open: bool = False,
) -> str:
    """The text that a completion has to begin with, "" for none.

    Every format is asked for it by writing a call and cutting it: before the name where any tool will do, before the
    arguments where one is named. A reasoning block that the prompt opened is closed first.

    Raises:
        ToolChoiceError: no tools, an unknown one, or a format whose calls cannot be begun without knowing their end.
    """
    if tool_choice is None or tool_choice in ("auto", "none"):
        return ""
    names = [tool["function"]["name"] for tool in tools or ()]
    wanted = _wanted(tool_choice, names)
    sample = {"id": "call_00001", "function": {"name": wanted or _NAME, "arguments": {_KEY: "stand-in"}}}
    written = parser.render(None, None, [sample])
    opening, found, _ = written.partition(_KEY if wanted else _NAME)
    if not found:
        raise ToolChoiceError(
            f"tool_choice {tool_choice!r}: calls of the format {parser.name!r} cannot be begun for the model; "
            'use "auto" and let the agent loop sample again'
        )
    if wanted:
        # Up to the name and no further: how the arguments begin differs with their number and types.
        opening = opening[: opening.rindex(wanted) + len(wanted)]
    closing = parser.reasoning.closes[0] + "\n\n" if reasoning_is_open and parser.reasoning is not None else ""
    return closing + opening


def _wanted(tool_choice: str | Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The tool that is named, None where any will do."""
    if not names:
        raise ToolChoiceError(f"tool_choice {tool_choice!r} without tools; pass tools= or leave tool_choice out")
    if tool_choice == "required":
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ToolChoiceError(
            f'tool_choice {tool_choice!r} is none of "auto", "none", "required" and '
            '{"type": "function", "function": {"name": ...}}'
        )
    if name not in names:
        raise ToolChoiceError(f"tool_choice names {name!r}, which is not offered; there are: {', '.join(names)}")
    return name
