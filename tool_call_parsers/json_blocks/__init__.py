"""JSON between markers: calls as objects (`{"name": ..., "arguments": {...}}`), alone or in a list, and calls with
the name in a header before the object of arguments.
"""

from typing import TYPE_CHECKING

from tool_call_parsers.lazy import lazy_names

if TYPE_CHECKING:
    from tool_call_parsers.json_blocks.after_text import JsonAfterText
    from tool_call_parsers.json_blocks.blocks import JsonBlocks
    from tool_call_parsers.json_blocks.named import CallHeader, Given, NamedJson, Words, read_name
else:
    __getattr__ = lazy_names(
        __name__,
        {"after_text": "JsonAfterText", "blocks": "JsonBlocks", "named": "CallHeader Given NamedJson Words read_name"},
    )

__all__ = ["CallHeader", "Given", "JsonAfterText", "JsonBlocks", "NamedJson", "Words", "read_name"]
