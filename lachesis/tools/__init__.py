"""What an agent can call: tools with schemas, toolsets of them, and one session of them for each rollout."""

from lachesis.tools.builtin import BUILTIN_TOOLS
from lachesis.tools.dispatch import ToolResult, call_tool, call_tools, handle_function_call
from lachesis.tools.tool_registry import Tool, ToolFailure, ToolRegistry, ToolUnavailable, tool
from lachesis.tools.tool_session import SessionClosed, ToolSession, ToolSessions
from lachesis.tools.toolsets import (
    TOOLSETS,
    Toolset,
    ToolsetError,
    create_custom_toolset,
    get_tool_definitions,
    get_toolset_info,
    get_toolset_names,
    resolve_multiple_toolsets,
    resolve_tools,
    resolve_toolset,
    validate_toolset,
)

__all__ = [
    "BUILTIN_TOOLS",
    "TOOLSETS",
    "SessionClosed",
    "Tool",
    "ToolFailure",
    "ToolRegistry",
    "ToolResult",
    "ToolSession",
    "ToolSessions",
    "ToolUnavailable",
    "Toolset",
    "ToolsetError",
    "call_tool",
    "call_tools",
    "create_custom_toolset",
    "get_tool_definitions",
    "get_toolset_info",
    "get_toolset_names",
    "handle_function_call",
    "resolve_multiple_toolsets",
    "resolve_tools",
    "resolve_toolset",
    "tool",
    "validate_toolset",
]
