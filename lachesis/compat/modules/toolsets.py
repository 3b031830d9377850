"""Toolsets by name, as lists and dicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lachesis.compat.in_run import registry_in_use
from lachesis.tools.toolsets import ALL
from lachesis.tools.toolsets import TOOLSETS as _OURS
from lachesis.tools.toolsets import resolve_toolset as _resolve

TOOLSETS: dict[str, dict[str, Any]] = {
    name: {"description": toolset.description, "tools": list(toolset.tools), "includes": list(toolset.includes)}
    for name, toolset in _OURS.items()
}


def get_all_toolsets() -> dict[str, dict[str, Any]]:
    """Name -> `{description, tools, includes}`, with the toolsets that only tools of the open run name."""
    found = {name: {**toolset, "tools": list(toolset["tools"])} for name, toolset in TOOLSETS.items()}
    for name, tool in registry_in_use().items():
        of_tool = found.setdefault(tool.toolset, {"description": "", "tools": [], "includes": []})
        if name not in of_tool["tools"]:
            of_tool["tools"].append(name)
    return found


def get_toolset(name: str) -> dict[str, Any] | None:
    return get_all_toolsets().get(name)


def get_toolset_names() -> list[str]:
    return list(get_all_toolsets())


def validate_toolset(name: str) -> bool:
    return name in ALL or name in get_all_toolsets()


def resolve_toolset(name: str, visited: set[str] | None = None) -> list[str]:
    """The tools of a toolset, sorted; none for a name that does not exist."""
    if name in ALL:
        return sorted(registry_in_use())
    if name in _OURS:
        return sorted({*_resolve(name), *get_all_toolsets()[name]["tools"]})
    return sorted((get_toolset(name) or {"tools": []})["tools"])


def resolve_multiple_toolsets(toolset_names: Iterable[str]) -> list[str]:
    return sorted({tool for name in toolset_names for tool in resolve_toolset(name)})


def get_toolset_info(name: str) -> dict[str, Any] | None:
    toolset = get_toolset(name)
    if toolset is None:
        return None
    tools = resolve_toolset(name)
    return {
        "name": name,
        "description": toolset["description"],
        "direct_tools": toolset["tools"],
        "includes": toolset["includes"],
        "resolved_tools": tools,
        "tool_count": len(tools),
        "is_composite": bool(toolset["includes"]),
    }
