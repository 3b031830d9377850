"""The built-in tools, in the order in which models see them. Each is imported when it is first looked up."""

from __future__ import annotations

from typing import Final

from lachesis_tools.tool_registry import ToolReference, ToolRegistry

_TOOLS: Final = (
    ("terminal", "terminal", "terminal"),
    ("process", "terminal", "background"),
    ("read_file", "file", "files"),
    ("write_file", "file", "files"),
    ("patch", "file", "patch"),
    ("search_files", "file", "search"),
    ("python", "python", "python"),
    ("todo", "todo", "todo"),
)
"""Name, toolset and module."""
BUILTIN_TOOLS = ToolRegistry(
    ToolReference(name, toolset, f"{__package__}.{module}") for name, toolset, module in _TOOLS
)
"""Immutable: `BUILTIN_TOOLS.extended(my_tool)` returns a new registry."""
