"""Toolsets by name, as lists and dicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lachesis_compat.in_run import registry_in_use
from lachesis_compat.toolset_dicts import TOOLSETS as TOOLSETS
from lachesis_compat.toolset_dicts import get_all_toolsets
from lachesis_tools.toolsets import ALL
from lachesis_tools.toolsets import resolve_toolset as _resolve
from lachesis_tools.toolsets import validate_toolset as _validate


def get_toolset(name: str) -> dict[str, Any] | None:
    return get_all_toolsets().get(name)


def get_toolset_names() -> list[str]:
    return list(get_all_toolsets())


def validate_toolset(name: str) -> bool:
    """Whether it can be resolved: it and what it includes exist, and none includes itself."""
    return name in ALL or _validate(name, get_all_toolsets())


def resolve_toolset(name: str, visited: set[str] | None = None) -> list[str]:
    """The tools of a toolset and of those that it includes, sorted; none for a name that does not exist.

    Raises:
        ToolsetError: a toolset that it includes does not exist, or includes it.
    """
    if name in ALL:
        return sorted(registry_in_use())
    known = get_all_toolsets()
    return sorted(_resolve(name, known)) if name in known else []


def resolve_multiple_toolsets(toolset_names: Iterable[str]) -> list[str]:
    return sorted({tool for name in toolset_names for tool in resolve_toolset(name)})


def create_custom_toolset(name: str, description: str, tools: Iterable[str] = (), includes: Iterable[str] = ()) -> None:
    """Add a toolset to `TOOLSETS`, or replace one."""
    TOOLSETS[name] = {"description": description, "tools": list(tools), "includes": list(includes)}


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
