"""Formats that write calls as Python does, with literals for arguments."""

from __future__ import annotations

from dataclasses import replace

from tool_call_parsers.parser import Format
from tool_call_parsers.python_calls import PythonCalls

_NAMES = "parameters whose names are not identifiers"

_LFM2 = PythonCalls(
    openers=("<|tool_call_start|>",),
    closers=("<|tool_call_end|>",),
    json_containers=(dict, list, tuple),
    json_calls=True,
    frame=("<|tool_call_start|>[", "]<|tool_call_end|>"),
)

FORMATS = (
    Format(
        "pythonic",
        PythonCalls(openers=("<|python_tag|>", "[", "{"), separators=("\n",)),
        "Llama 3.2, ToolACE",
        aliases=("toolace",),
        lossy=f"content beside calls, unless it ends its line; {_NAMES}",
    ),
    Format(
        "llama4_pythonic",
        PythonCalls(
            openers=("<|python_start|>", "[", "{"),
            closers=("<|python_end|>",),
            frame=("<|python_start|>[", "]<|python_end|>"),
        ),
        "Llama 4",
        lossy=_NAMES,
    ),
    Format(
        "olmo3",
        PythonCalls(
            openers=("<function_calls>",),
            closers=("</function_calls>",),
            separators=("\n",),
            lines=True,
            json_strings=True,
            frame=("<function_calls>", "</function_calls>"),
        ),
        "Olmo 3",
        reasoning="olmo3",
        lossy=_NAMES,
    ),
    Format("lfm2", _LFM2, "LFM2, LFM2.5-VL", reasoning="lfm2", lossy=_NAMES),
    Format("lfm2_5", replace(_LFM2, json_containers=(dict,)), "LFM2.5", reasoning="lfm2", lossy=_NAMES),
)
