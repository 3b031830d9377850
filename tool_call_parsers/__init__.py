"""Raw completion text to structured tool calls, one parser per wire format.

    parsed = get_parser("hermes").parse(text, tools)
    parsed.content, parsed.reasoning, parsed.tool_calls, parsed.attempts

A parser never raises on what a model wrote, and loses none of it.
"""

from tool_call_parsers import bare_json, hermes
from tool_call_parsers.registry import UnknownParser, get_parser, list_parsers, register_parser
from tool_call_parsers.types import (
    CALLABLE,
    CallStatus,
    ParsedCompletion,
    ParsedToolCall,
    ToolCallParser,
    Tools,
    new_call_id,
)

__all__ = [
    "CALLABLE",
    "CallStatus",
    "ParsedCompletion",
    "ParsedToolCall",
    "ToolCallParser",
    "Tools",
    "UnknownParser",
    "bare_json",
    "get_parser",
    "hermes",
    "list_parsers",
    "new_call_id",
    "register_parser",
]
