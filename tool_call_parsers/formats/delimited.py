"""Formats that write strings between delimiters, unescaped."""

from __future__ import annotations

from tool_call_parsers.delimited import Delimited
from tool_call_parsers.parser import Format

_LOSSY = "strings that hold a delimiter before one of `,}])` or at an end"

FORMATS = (
    Format(
        "gemma4",
        Delimited(openers=("<|tool_call>",), closers=("<tool_call|>",), delimiter='<|"|>', calls_first=True),
        "Gemma 4",
        reasoning="gemma4",
        ends=("<turn|>", "<|tool_response>"),
        lossy=_LOSSY,
    ),
    Format(
        "functiongemma",
        Delimited(openers=("<start_function_call>",), closers=("<end_function_call>",), delimiter="<escape>"),
        "FunctionGemma",
        ends=("<end_of_turn>", "<start_function_response>"),
        lossy=_LOSSY,
    ),
)
