"""What a parser returns, and what a parser is."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool schemas as they travel in a chat request: `[{"type": "function", "function": {"name": ...}}, ...]`."""


class CallStatus(StrEnum):
    """What became of one attempt to call a tool."""

    OK = "ok"
    """Well formed, and the tool was offered (or no tools were given to compare with)."""
    REPAIRED = "repaired"
    """Its meaning is plain, its form was not: `error` says what was put right."""
    UNKNOWN_TOOL = "unknown_tool"
    """Well formed, but no such tool was offered. Still a call: whoever runs it tells the model so."""
    INVALID_JSON = "invalid_json"
    """The block is closed and is not JSON. Not a call."""
    INCOMPLETE = "incomplete"
    """The text ended inside the block. Not a call: half of a command is a different command."""
    MALFORMED = "malformed"
    """JSON, but not that of a call: no name, or arguments that are no object."""


CALLABLE = frozenset({CallStatus.OK, CallStatus.REPAIRED, CallStatus.UNKNOWN_TOOL})


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One attempt at a call; `status` tells whether it became one."""

    id: str
    name: str
    arguments: dict[str, Any]
    arguments_raw: str
    """The arguments as the model wrote them, "" where it wrote none."""
    status: CallStatus
    error: str | None = None
    """Why it is no call, or what was repaired."""
    raw: str = ""
    """The whole block, markup included."""

    @property
    def arguments_json(self) -> str:
        """The arguments as the text of a JSON object: the model's own words unless they had to be repaired."""
        try:
            if isinstance(json.loads(self.arguments_raw), dict):
                return self.arguments_raw
        except (ValueError, RecursionError):
            pass
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion taken apart. All of it is in `content`, `reasoning` or a call's `raw`, but the reasoning tags."""

    content: str | None
    """Everything that is neither reasoning nor a call; text of failed attempts stays here. None when blank."""
    reasoning: str | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()
    """The calls, in order."""
    attempts: tuple[ParsedToolCall, ...] = ()
    """`tool_calls` and the attempts that failed, in order."""


class ToolCallParser(Protocol):
    """One wire format. Stateless: one instance serves any number of rollouts at once."""

    def parse(self, text: str, tools: Tools | None = None) -> ParsedCompletion:
        """Take a whole completion apart. Never raises, whatever the text."""
        ...


def new_call_id() -> str:
    """A fresh `call_<24 hex digits>`, for formats whose calls carry none."""
    return f"call_{secrets.token_hex(12)}"


def tool_names(tools: Tools | None) -> frozenset[str]:
    """Names of the offered tools, OpenAI's nesting or flat."""
    names = set()
    for tool in tools or ():
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
        if isinstance(name, str):
            names.add(name)
    return frozenset(names)
