"""The result types of parsers: calls with a status, and the completion around them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

ToolSchemas: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool schemas as a chat request carries them: `[{"type": "function", "function": {"name": ...}}, ...]`."""


class CallStatus(StrEnum):
    """The outcome of one attempt to call a tool."""

    OK = "ok"
    """In the form that the model's chat template writes, and the tool was offered (or no tools were given to compare
    with)."""
    REPAIRED = "repaired"
    """In another form, of which one reading is left. `error` names each repair."""
    INCOMPLETE = "incomplete"
    """The text ended inside the arguments. Not a call: half a command is a different command."""
    INVALID_JSON = "invalid_json"
    """The arguments are complete and cannot be read as the format's values. Not a call."""
    NOT_AN_OBJECT = "not_an_object"
    """The arguments are a list, a number or a text. Not a call."""
    MISSING_NAME = "missing_name"
    """The attempt names no tool. Not a call."""
    UNKNOWN_TOOL = "unknown_tool"
    """A call of a tool that was not offered. Still a call: the agent loop answers it with an error."""
    MALFORMED = "malformed"
    """The tags of a call around text that is not a call, or a call in markup that the format does not read."""
    IN_REASONING = "in_reasoning"
    """Drafted inside a closed reasoning block. Not a call."""


CALLABLE = frozenset({CallStatus.OK, CallStatus.REPAIRED, CallStatus.UNKNOWN_TOOL})
"""The statuses of `tool_calls` in lenient mode; strict mode leaves `REPAIRED` out."""


class Finish(StrEnum):
    """Where the text ended. The values are OpenAI's finish reasons where one exists."""

    STOP = "stop"
    """In content, or empty."""
    TOOL_CALLS = "tool_calls"
    """After at least one usable call, with nothing left open."""
    INCOMPLETE = "incomplete"
    """Inside reasoning or inside a call."""


class CallSpan(NamedTuple):
    """A half-open range of the completion, in characters and, if token ids were given, in tokens."""

    start: int
    end: int
    token_start: int | None = None
    token_end: int | None = None


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One attempt at a call. `status` says whether it is a call."""

    id: str = field(compare=False)
    """The id that the model wrote, else a fresh `call_<24 hex digits>`. Unique in a completion."""
    name: str
    arguments: dict[str, Any]
    arguments_raw: str
    """The arguments as the model wrote them, "" if it wrote none. JSON only in formats that write JSON."""
    status: CallStatus
    error: str | None = None
    """Why it is not a call, or what was repaired."""
    raw: str = ""
    """The text of the whole attempt, tags included."""
    span: CallSpan = field(default_factory=lambda: CallSpan(0, 0))

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text: the model's text if it is the same object."""
        if self.arguments_raw.startswith("{") and self.status is not CallStatus.REPAIRED:
            try:
                if json.loads(self.arguments_raw) == self.arguments:
                    return self.arguments_raw
            except (ValueError, RecursionError):
                pass
        return json.dumps(self.arguments, ensure_ascii=False)

    def to_openai(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in an OpenAI message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments_json},
        }


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A parsed completion. All text except tags is in `content`, `reasoning` or the `raw` of a call."""

    content: str | None
    """The text that is neither reasoning nor a call, with the text of failed attempts. None if blank."""
    reasoning: str | None = None
    """The text of the reasoning, with drafted calls. None if blank or not read."""
    reasoning_complete: bool = True
    """False if the text ended inside reasoning."""
    tool_calls: tuple[ParsedToolCall, ...] = ()
    """The usable calls, in order."""
    attempts: tuple[ParsedToolCall, ...] = ()
    """`tool_calls` and all failed attempts, in order."""
    finish: Finish = Finish.STOP


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of `content`."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of `reasoning`."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. `index` is its place in `attempts`; `name` is complete."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments' JSON text. The fragments of a call that ends `ok` make one JSON object; those of a
    repaired call may be the model's text before the repair."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ended. `call` is the entry of `attempts`, and takes precedence over the fragments."""

    index: int
    call: ParsedToolCall

    @property
    def status(self) -> CallStatus:
        """The outcome of the call."""
        return self.call.status


Event: TypeAlias = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


class MinimalParser(Protocol):
    """The interface that a registered parser must have."""

    def parse(self, text: str, tools: ToolSchemas | None = None) -> ParsedCompletion:
        """Parse a whole completion. Never raises on any text."""
        ...


def new_call_id() -> str:
    """A fresh `call_<24 hex digits>`, for formats without call ids."""
    return f"call_{os.urandom(12).hex()}"
