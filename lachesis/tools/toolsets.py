"""Toolsets: named sets of tools that may include each other, and the tool definitions that a model gets from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lachesis.errors import LachesisError
from lachesis.tools.builtin import BUILTIN_TOOLS
from lachesis.tools.text import did_you_mean
from lachesis.tools.tool_registry import ToolRegistry, ToolUnavailable

ALL = ("all", "*")
"""Names that stand for every tool."""


class ToolsetError(LachesisError, ValueError):
    """A toolset is unknown, includes itself, or cannot be made."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Toolset:
    """Its own tools first, then those of the toolsets that it includes."""

    description: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()


TOOLSETS: Mapping[str, Toolset] = MappingProxyType(
    {
        "terminal": Toolset("Run commands and follow background processes.", ("terminal", "process")),
        "file": Toolset("Read, write, edit and search files.", ("read_file", "write_file", "patch", "search_files")),
        "python": Toolset("Run Python in an interpreter that keeps its variables.", ("python",)),
        "todo": Toolset("Keep a list of what is left to do.", ("todo",)),
        "coding": Toolset("Everything for work on a code base.", includes=("terminal", "file", "todo")),
        "debugging": Toolset("Find out why something fails.", includes=("terminal", "file", "python")),
        "data": Toolset("Compute with Python on files.", includes=("python", "file")),
        "safe": Toolset("Nothing that runs commands.", includes=("file", "todo")),
    }
)


def resolve_toolset(name: str, toolsets: Mapping[str, Toolset] = TOOLSETS) -> list[str]:
    """The tools of a toolset, each once, in the order in which they are first named. `all` and `*` mean every toolset.

    Raises:
        ToolsetError: the name, or one that it includes, is unknown, or a toolset includes itself.
    """
    if name in ALL and name not in toolsets:
        return resolve_multiple_toolsets(toolsets, toolsets)
    found: dict[str, None] = {}
    _collect(name, toolsets, (), set(), found)
    return list(found)


def _collect(
    name: str, toolsets: Mapping[str, Toolset], path: tuple[str, ...], done: set[str], found: dict[str, None]
) -> None:
    if name in path:
        raise ToolsetError(f"toolsets include each other: {' -> '.join([*path[path.index(name) :], name])}")
    if name in done:
        return
    if name not in toolsets:
        origin = f", which {path[-1]!r} includes," if path else ""
        raise ToolsetError(f"unknown toolset {name!r}{origin}{_known(name, toolsets)}")
    found.update(dict.fromkeys(toolsets[name].tools))
    for included in toolsets[name].includes:
        _collect(included, toolsets, (*path, name), done, found)
    done.add(name)


def _known(name: str, names: Collection[str]) -> str:
    return f"{did_you_mean(name, names) or ';'} known are: {', '.join(names)}".replace("? known", "? Known")


def resolve_multiple_toolsets(names: Iterable[str], toolsets: Mapping[str, Toolset] = TOOLSETS) -> list[str]:
    """The tools of several toolsets, each once. Raises `ToolsetError` as `resolve_toolset` does."""
    return list(dict.fromkeys(tool for name in names for tool in resolve_toolset(name, toolsets)))


def validate_toolset(name: str, toolsets: Mapping[str, Toolset] = TOOLSETS) -> bool:
    """Whether the name can be resolved: it and all that it includes are known and free of cycles."""
    try:
        resolve_toolset(name, toolsets)
    except ToolsetError:
        return False
    return True


def get_toolset_names(toolsets: Mapping[str, Toolset] = TOOLSETS) -> list[str]:
    return list(toolsets)


def get_toolset_info(name: str, toolsets: Mapping[str, Toolset] = TOOLSETS) -> dict[str, Any]:
    """`name`, `description`, `tools` and `includes` as declared, and `resolved_tools`. Raises `ToolsetError`."""
    resolved = resolve_toolset(name, toolsets)
    declared = toolsets.get(name, Toolset("Every tool.", includes=tuple(toolsets)))
    return {
        "name": name,
        "description": declared.description,
        "tools": list(declared.tools),
        "includes": list(declared.includes),
        "resolved_tools": resolved,
    }


def create_custom_toolset(
    name: str,
    description: str,
    tools: Iterable[str] = (),
    includes: Iterable[str] = (),
    *,
    toolsets: Mapping[str, Toolset] = TOOLSETS,
) -> Mapping[str, Toolset]:
    """A new mapping: `toolsets` and one more. Nothing is changed in place.

    Raises:
        ToolsetError: the name is taken, or what it includes cannot be resolved.
    """
    if name in toolsets or name in ALL:
        raise ToolsetError(f"there is a toolset {name!r} already; choose another name")
    extended = MappingProxyType({**toolsets, name: Toolset(description, tuple(tools), tuple(includes))})
    resolve_toolset(name, extended)
    return extended


def resolve_tools(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] | None = None,
    *,
    registry: ToolRegistry = BUILTIN_TOOLS,
    toolsets: Mapping[str, Toolset] = TOOLSETS,
) -> list[str]:
    """Names of the tools that a rollout gets, in the order of the registry.

    Args:
        enabled: Toolsets or single tools; None means all. A toolset that only the registry's tools name counts, too.
        disabled: Toolsets or single tools to take away again.
        registry: The tools there are.
        toolsets: The toolsets there are.

    Raises:
        ToolsetError: a name is neither toolset nor tool, or stands for a tool that the registry does not have.
        ToolUnavailable: a tool was asked for, by its name or its toolset's, that is not available here. Tools that
            nobody asked for by name (`enabled` is None or `all`) are left out; `registry.unavailable()` says why.
    """
    if isinstance(enabled, str) or isinstance(disabled, str):
        raise TypeError("enabled and disabled are lists of names, not one string")
    known = _with_registry(registry, toolsets)
    excluded = set(_expand(disabled or (), registry, known))
    names = [*enabled] if enabled is not None else ["all"]
    asked = set(_expand((name for name in names if not _means_all(name, known)), registry, known)) - excluded
    if strangers := sorted(asked - set(registry)):
        raise ToolsetError(f"tools {strangers} are not in this registry, which has: {', '.join(registry)}")
    missing = registry.unavailable()
    if refused := {name: missing[name] for name in registry if name in asked and name in missing}:
        raise ToolUnavailable(refused)
    everything = any(_means_all(name, known) for name in names)
    return [name for name in registry if name not in excluded and name not in missing and (everything or name in asked)]


def get_tool_definitions(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] | None = None,
    *,
    registry: ToolRegistry = BUILTIN_TOOLS,
    toolsets: Mapping[str, Toolset] = TOOLSETS,
) -> list[dict[str, Any]]:
    """OpenAI tool definitions for `tools=`, of the tools that `resolve_tools` names. Raises as it does."""
    names = resolve_tools(enabled, disabled, registry=registry, toolsets=toolsets)
    return [registry[name].definition() for name in names]


def _means_all(name: str, toolsets: Mapping[str, Toolset]) -> bool:
    return name in ALL and name not in toolsets


def _with_registry(registry: ToolRegistry, toolsets: Mapping[str, Toolset]) -> Mapping[str, Toolset]:
    """`toolsets`, with each of the registry's tools in the toolset that it declares itself."""
    merged = dict(toolsets)
    for tool in registry.values():
        base = merged.get(tool.toolset, Toolset(f"The tools of {tool.toolset!r}."))
        if tool.name not in base.tools:
            merged[tool.toolset] = Toolset(base.description, (*base.tools, tool.name), base.includes)
    return merged


def _expand(names: Iterable[str], registry: ToolRegistry, toolsets: Mapping[str, Toolset]) -> list[str]:
    """Tools of toolsets and single tools. A name that is both (`terminal`) means the toolset."""
    found: dict[str, None] = {}
    for name in names:
        if name in toolsets:
            found.update(dict.fromkeys(resolve_toolset(name, toolsets)))
        elif name in registry:
            found[name] = None
        elif name in ALL:
            found.update(dict.fromkeys(registry))
        else:
            raise ToolsetError(f"unknown toolset or tool {name!r}{_known(name, dict.fromkeys([*toolsets, *registry]))}")
    return list(found)
