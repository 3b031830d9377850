"""The toolsets of the old paths, as dicts that anybody may add to. Here, since a module of an old path may be loaded
under two names, and the table is one."""

from __future__ import annotations

from typing import Any

from lachesis_compat.in_run import registry_in_use
from lachesis_tools.toolsets import TOOLSETS as _OURS

TOOLSETS: dict[str, dict[str, Any]] = {
    name: {"description": toolset.description, "tools": list(toolset.tools), "includes": list(toolset.includes)}
    for name, toolset in _OURS.items()
}
"""What is added here is a toolset for all functions of the old paths; each key of its dict may be missing."""


def get_all_toolsets() -> dict[str, dict[str, Any]]:
    """Name -> `{description, tools, includes}`, with the toolsets that only tools of the open run name."""
    empty = {"description": "", "tools": (), "includes": ()}
    found = {name: {**empty, **toolset} for name, toolset in TOOLSETS.items()}
    for toolset in found.values():
        toolset.update(tools=list(toolset["tools"]), includes=list(toolset["includes"]))
    for name, tool in registry_in_use().items():
        of_tool = found.setdefault(tool.toolset, {"description": "", "tools": [], "includes": []})
        if name not in of_tool["tools"]:
            of_tool["tools"].append(name)
    return found
