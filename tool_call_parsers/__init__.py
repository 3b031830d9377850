"""Parse raw completion text into structured tool calls, and write it, in the wire formats of open models.

>>> completion = get_parser("hermes").parse(text, tools)
>>> completion.content, completion.tool_calls, completion.attempts
"""

from typing import TYPE_CHECKING

from tool_call_parsers.lazy import lazy_names

if TYPE_CHECKING:
    from tool_call_parsers.detect import Detection, detect_parser
    from tool_call_parsers.lookup import get_parser
    from tool_call_parsers.parser import Format, StreamingParser, ToolCallParser
    from tool_call_parsers.reasoning import ReasoningFormat, UnknownReasoning, get_reasoning, list_reasoning
    from tool_call_parsers.registry import UnknownParser, list_parsers, register_parser
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
else:  # who needs the types of results only loads nothing else
    __getattr__ = lazy_names(
        __name__,
        {
            "detect": "Detection detect_parser",
            "lookup": "get_parser",
            "parser": "Format StreamingParser ToolCallParser",
            "reasoning": "ReasoningFormat UnknownReasoning get_reasoning list_reasoning",
            "registry": "UnknownParser list_parsers register_parser",
            "types": "CALLABLE ArgumentsDelta CallEnd CallSpan CallStart CallStatus ContentDelta Event Finish "
            "ParsedCompletion ParsedToolCall ReasoningDelta ToolSchemas new_call_id",
        },
    )

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


def __dir__() -> list[str]:
    return sorted(__all__)
