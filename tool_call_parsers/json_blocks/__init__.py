"""JSON between markers: calls as objects (`{"name": ..., "arguments": {...}}`), alone or in a list, and calls with
the name in a header before the object of arguments.
"""

from tool_call_parsers.json_blocks.after_text import JsonAfterText
from tool_call_parsers.json_blocks.blocks import JsonBlocks
from tool_call_parsers.json_blocks.named import CallHeader, Given, NamedJson, Words, read_name
from tool_call_parsers.json_blocks.stray import (
    MANY_OPENERS,
    STRAYS,
    Stray,
    StrayNeedles,
    find_stray,
    may_stray,
    named_attempt,
    record_stray,
    skip_repeated,
    stray,
    too_much,
    with_stray,
)

__all__ = [
    "MANY_OPENERS",
    "STRAYS",
    "CallHeader",
    "Given",
    "JsonAfterText",
    "JsonBlocks",
    "NamedJson",
    "Stray",
    "StrayNeedles",
    "Words",
    "find_stray",
    "may_stray",
    "named_attempt",
    "read_name",
    "record_stray",
    "skip_repeated",
    "stray",
    "too_much",
    "with_stray",
]
