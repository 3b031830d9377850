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
_ON_REQUEST: Final = (
    ("memory", "memory", "memory"),
    ("execute_code", "code_execution", "execute_code"),
    ("delegate_task", "delegation", "delegate_task"),
    ("clarify", "clarify", "clarify"),
)
ON_REQUEST = ToolRegistry(
    ToolReference(name, toolset, f"{__package__}.{module}") for name, toolset, module in _ON_REQUEST
)
"""Tools that an agent gets where its toolsets name them, and that "all" does not mean."""
