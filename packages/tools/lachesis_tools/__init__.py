"""The tools of agents: functions with schemas, toolsets, and one session for each rollout."""

from lachesis_tools.builtin import BUILTIN_TOOLS
from lachesis_tools.dispatch import ToolResult, call_tool, call_tools, handle_function_call
from lachesis_tools.tool_registry import Tool, ToolCrashed, ToolFailure, ToolRegistry, ToolUnavailable, tool
from lachesis_tools.tool_session import SessionClosed, ToolSession, ToolSessions
from lachesis_tools.toolsets import (
    TOOLSETS,
    Toolset,
    ToolsetError,
    get_tool_definitions,
    resolve_toolset,
    validate_toolset,
)

__all__ = [
    "BUILTIN_TOOLS",
    "TOOLSETS",
    "SessionClosed",
    "Tool",
    "ToolCrashed",
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
    "get_tool_definitions",
    "handle_function_call",
    "resolve_toolset",
    "tool",
    "validate_toolset",
]
