"""Tools that an agent gets where its toolsets name them, and that "all" does not mean. Each is imported when it is
first looked up."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from lachesis_tools.tool_registry import ToolReference, ToolRegistry

_TOOLS: Final = {
    "memory": "memory",
    "execute_code": "code_execution",
    "delegate_task": "delegation",
    "clarify": "clarify",
}
"""Toolsets, by tool; a module is called as its tool."""
ON_REQUEST = ToolRegistry(ToolReference(name, toolset, f"{__package__}.{name}") for name, toolset in _TOOLS.items())
NEEDS_USER: Final = "clarify needs a user: a `follow_up` of the environment, or a person"
"""What to do about a missing toolset `clarify`."""


def with_requested(tools: ToolRegistry, named: Collection[str] | None, *, user: bool) -> ToolRegistry:
    """`tools` with those of `ON_REQUEST` that are named, themselves or by their toolsets.

    Args:
        user: whether somebody answers the questions of an agent.
    """
    asked = [
        ON_REQUEST[name]
        for name, toolset in _TOOLS.items()
        if {name, toolset} & {*(named or ())} and name not in tools and (user or name != "clarify")
    ]
    if "browser" in (named or ()) and "browser_navigate" not in tools:
        from lachesis_tools.browser import BROWSER_TOOLS, check_browser_requirements

        asked += () if check_browser_requirements() else BROWSER_TOOLS
    return tools.extended(*asked) if asked else tools
