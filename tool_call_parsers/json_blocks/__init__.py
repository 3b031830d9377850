"""JSON between markers: calls as objects (`{"name": ..., "arguments": {...}}`), alone or in a list, and calls with
the name in a header before the object of arguments.
"""

from tool_call_parsers.json_blocks.blocks import JsonBlocks
from tool_call_parsers.json_blocks.named import CallHeader, NamedJson

__all__ = ["CallHeader", "JsonBlocks", "NamedJson"]
