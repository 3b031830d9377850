"""What a parser returns: calls with a status, and the completion around them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

ToolSchemas: TypeAlias = Sequence[Mapping[str, Any]]
"""Tool schemas as they travel in a chat request: `[{"type": "function", "function": {"name": ...}}, ...]`."""


class CallStatus(StrEnum):
    """What became of one attempt to call a tool."""

    OK = "ok"
    """Well formed, and the tool was offered (or no tools were given to compare with)."""
    REPAIRED = "repaired"
    """Its meaning is plain, its form was not: `error` says what was put right."""
    INCOMPLETE = "incomplete"
    """The text ended inside the arguments. Not a call: half of a command is a different command."""
    INVALID_JSON = "invalid_json"
    """The arguments are closed and cannot be read as the values that the format prescribes. Not a call."""
    NOT_AN_OBJECT = "not_an_object"
    """The arguments were read, and are a list, a number or a text. Not a call."""
    MISSING_NAME = "missing_name"
    """No tool is named. Not a call."""
    UNKNOWN_TOOL = "unknown_tool"
    """Well formed, but no such tool was offered. Still a call: whoever runs it tells the model so."""
    MALFORMED = "malformed"
    """The markup of a call around something that is none."""
    IN_REASONING = "in_reasoning"
    """Drafted inside a closed reasoning block. Not a call: the model only thought of it."""


CALLABLE = frozenset({CallStatus.OK, CallStatus.REPAIRED, CallStatus.UNKNOWN_TOOL})
"""The statuses of `tool_calls` in lenient mode; strict mode leaves `REPAIRED` out."""


class Finish(StrEnum):
    """Where the text ended. The values are OpenAI's finish reasons where there is one."""

    STOP = "stop"
    """In content, or empty."""
    TOOL_CALLS = "tool_calls"
    """After at least one usable call, with nothing left open."""
    INCOMPLETE = "incomplete"
    """Inside reasoning or inside a call: what was open is cut off."""


class CallSpan(NamedTuple):
    """Where a call stands in the completion: half-open, in characters and, when token ids were given, in tokens."""

    start: int
    end: int
    token_start: int | None = None
    token_end: int | None = None


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One attempt at a call; `status` tells whether it became one."""

    id: str = field(compare=False)
    """The format's own where it writes one, else a fresh `call_<24 hex digits>`: unique in a completion either way."""
    name: str
    arguments: dict[str, Any]
    arguments_raw: str
    """The arguments as the model wrote them, "" where it wrote none: JSON only in formats that write JSON."""
    status: CallStatus
    error: str | None = None
    """Why it is no call, or what was repaired."""
    raw: str = ""
    """The whole attempt, markup included."""
    span: CallSpan = field(default_factory=lambda: CallSpan(0, 0))

    @property
    def arguments_json(self) -> str:
        """The arguments as the text of a JSON object: the model's own words where those are one."""
        if self.arguments_raw.startswith("{") and self.status is not CallStatus.REPAIRED:
            try:
                if json.loads(self.arguments_raw) == self.arguments:
                    return self.arguments_raw
            except (ValueError, RecursionError):
                pass
        return json.dumps(self.arguments, ensure_ascii=False)

    def to_openai(self) -> dict[str, Any]:
        """The call as it stands in an OpenAI message's `tool_calls`."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments_json},
        }


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion taken apart. All of its text is in `content`, `reasoning` or a call's `raw`, but for markup."""

    content: str | None
    """What is neither reasoning nor a call, the text of failed attempts included. None when blank."""
    reasoning: str | None = None
    """The text of the reasoning, drafted calls included. None when blank, or when reasoning is not read."""
    reasoning_complete: bool = True
    """False when the text ended inside reasoning."""
    tool_calls: tuple[ParsedToolCall, ...] = ()
    """The usable calls, in order."""
    attempts: tuple[ParsedToolCall, ...] = ()
    """`tool_calls` and every attempt that failed, in order."""
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
    """A call begins; `index` is its place in `attempts`, `name` is whole."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments' JSON text. For a call that ends `ok` the fragments make one JSON object; of one that had
    to be repaired they may be the model's own words."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ended: `call` is what `attempts` will hold, and what counts where it is not `ok`."""

    index: int
    call: ParsedToolCall

    @property
    def status(self) -> CallStatus:
        """What became of the call."""
        return self.call.status


Event: TypeAlias = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta | CallEnd


def new_call_id() -> str:
    """A fresh `call_<24 hex digits>`, for formats whose calls carry none."""
    return f"call_{os.urandom(12).hex()}"
