"""Parse raw completion text into structured tool calls, and write it, in the wire formats of open models.

>>> completion = get_parser("hermes").parse(text, tools)
>>> completion.content, completion.tool_calls, completion.attempts
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tool_call_parsers.registry import UnknownParser, get_parser, list_parsers, register_parser
from tool_call_parsers.types import (
    CALLABLE,
    ArgumentsDelta,
    CallEnd,
    CallSpan,
    CallStart,
    CallStatus,
    ContentDelta,
    Event,
    Finish,
    ParsedCompletion,
    ParsedToolCall,
    ReasoningDelta,
    ToolSchemas,
    new_call_id,
)

if TYPE_CHECKING:
    from tool_call_parsers.detect import Detection, detect_parser
    from tool_call_parsers.parser import Format, StreamingParser, ToolCallParser
    from tool_call_parsers.reasoning import ReasoningFormat, UnknownReasoning, get_reasoning, list_reasoning

# Loaded on first use, so that importing the package costs no more than importing its result types.
_LATER = {
    **dict.fromkeys(("Detection", "detect_parser"), "detect"),
    **dict.fromkeys(("Format", "StreamingParser", "ToolCallParser"), "parser"),
    **dict.fromkeys(("ReasoningFormat", "UnknownReasoning", "get_reasoning", "list_reasoning"), "reasoning"),
}

__all__ = [
    "CALLABLE",
    "ArgumentsDelta",
    "CallEnd",
    "CallSpan",
    "CallStart",
    "CallStatus",
    "ContentDelta",
    "Detection",
    "Event",
    "Finish",
    "Format",
    "ParsedCompletion",
    "ParsedToolCall",
    "ReasoningDelta",
    "ReasoningFormat",
    "StreamingParser",
    "ToolCallParser",
    "ToolSchemas",
    "UnknownParser",
    "UnknownReasoning",
    "detect_parser",
    "get_parser",
    "get_reasoning",
    "list_parsers",
    "list_reasoning",
    "new_call_id",
    "register_parser",
]


def __getattr__(name: str) -> Any:
    if (module := _LATER.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
