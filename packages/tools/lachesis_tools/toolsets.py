"""Toolsets: named sets of tools, which may include each other, and the tool definitions for a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from backends.errors import ExitCode, LachesisError
from lachesis_tools.builtin import BUILTIN_TOOLS
from lachesis_tools.text import did_you_mean
from lachesis_tools.tool_registry import ToolRegistry, ToolUnavailable

ALL = ("all", "*")
"""Names for all tools."""


class ToolsetError(LachesisError, ValueError):
    """A toolset is unknown, includes itself, or cannot be created."""

    exit_code = ExitCode.SETTINGS


@dataclass(frozen=True, slots=True)
class Toolset:
    """A named set: its own tools first, then those of the included toolsets."""

    description: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: ToolsetLike) -> Toolset:
        """A toolset, or one as a dict with the same keys, each of which may be missing."""
        if isinstance(given, Toolset):
            return given
        parts = (tuple(given.get(key) or ()) for key in ("tools", "includes"))
        return cls(str(given.get("description") or ""), *parts)


ToolsetLike: TypeAlias = Toolset | Mapping[str, Any]

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


PROVIDED_TOOLSETS: Mapping[str, Toolset] = MappingProxyType(
    {
        "web": Toolset("Search the web and read pages.", ("web_search", "web_extract")),
        "search": Toolset("Search the web.", ("web_search",)),
        "vision": Toolset("Look at images.", ("vision_analyze",)),
        "browser": Toolset("Use web pages in a browser.", ("browser_navigate", "browser_snapshot")),
        "mcp": Toolset("The tools of MCP servers."),
    }
)
"""Toolsets that exist where a registry has their tools, of which these are some. Those of MCP servers are known when a
run has begun."""
PROVIDED_TOOLS = frozenset(tool for toolset in PROVIDED_TOOLSETS.values() for tool in toolset.tools)


def how_to_provide(name: str) -> str:
    """What to do about a missing one of `PROVIDED_TOOLSETS`, or a tool of it."""
    if name.startswith("browser"):
        from lachesis_tools.browser.program import check_browser_requirements

        return f"the browser {check_browser_requirements() or 'is there where --env.enabled_toolsets names it'}"
    if name.startswith("vision"):
        return "vision needs a model that reads images: --env.vision policy, or MODEL@URL (docs/tools.md)"
    if name == "mcp":
        return "name servers with --env.mcp (docs/tools.md)"
    return "web tools need a provider of pages: --env.web, for example corpus:pages.jsonl (docs/tools.md)"


REMOVED_TOOLSETS = frozenset(
    {
        *("clarify", "code_execution", "computer_use", "cronjob", "delegation", "homeassistant"),
        *("image_gen", "kanban", "memory", "messaging", "moa", "rl", "session_search", "skills", "tts"),
        *("video", "video_gen"),
    }
)
"""Toolsets of the removed Hermes stack without tools here, unless an environment's registry has some of that name."""


def resolve_toolset(name: str, toolsets: Mapping[str, ToolsetLike] = TOOLSETS) -> list[str]:
    """The tools of a toolset, each once, in the order of first occurrence. `all` and `*` mean every toolset.

    Included ones of `PROVIDED_TOOLSETS` and `REMOVED_TOOLSETS` that are not among the toolsets are left out.

    Raises:
        ToolsetError: the name, or another one that it includes, is unknown, or a toolset includes itself.
    """
    names = toolsets if _means_all(name, toolsets) else [name]
    return list(dict.fromkeys(tool for each in names for tool in _tools_of(each, toolsets, ())))


def _tools_of(name: str, toolsets: Mapping[str, ToolsetLike], path: tuple[str, ...]) -> Iterator[str]:
    """The tools of a toolset, which the toolsets of `path` include in turn. A tool may come more than once."""
    if name in path:
        raise ToolsetError(f"toolsets include each other: {' -> '.join([*path[path.index(name) :], name])}")
    if name not in toolsets:
        if path and (name in PROVIDED_TOOLSETS or name in REMOVED_TOOLSETS):
            return
        origin = f", which {path[-1]!r} includes" if path else ""
        raise ToolsetError(f"unknown toolset {name!r}{origin}{_known(name, toolsets)}")
    toolset = Toolset.of(toolsets[name])
    yield from toolset.tools
    for included in toolset.includes:
        yield from _tools_of(included, toolsets, (*path, name))


def _known(name: str, names: Collection[str]) -> str:
    return f"{did_you_mean(name, names) or ';'} known are: {', '.join(names)}".replace("? known", "? Known")


def validate_toolset(name: str, toolsets: Mapping[str, ToolsetLike] = TOOLSETS) -> bool:
    """Whether the name can be resolved: it and its included toolsets are known and have no cycle."""
    try:
        resolve_toolset(name, toolsets)
    except ToolsetError:
        return False
    return True


def has_toolset(
    name: str, *, registry: ToolRegistry = BUILTIN_TOOLS, toolsets: Mapping[str, ToolsetLike] = TOOLSETS
) -> bool:
    """Whether there is a toolset of this name, or a tool of the registry names it as its own."""
    return name in _with_registry(registry, toolsets)


def resolve_tools(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] | None = None,
    *,
    registry: ToolRegistry = BUILTIN_TOOLS,
    toolsets: Mapping[str, ToolsetLike] = TOOLSETS,
) -> list[str]:
    """The names of the tools of a rollout, in the order of the registry.

    Args:
        enabled: Toolsets or single tools; None means all. A toolset that only a tool of the registry names is valid.
        disabled: Toolsets or single tools to remove.
        registry: The known tools.
        toolsets: The known toolsets.

    Raises:
        ToolsetError: a name is neither a toolset nor a tool, or its tool is not in the registry.
        ToolUnavailable: a tool that is enabled by its name is not available here, or no tool of an enabled toolset is.
            Other unavailable tools, such as those of an included `web`, are left out; `left_out_tools` names them.
    """
    return _resolved(enabled, disabled, registry, toolsets)[0]


def left_out_tools(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] | None = None,
    *,
    registry: ToolRegistry = BUILTIN_TOOLS,
    toolsets: Mapping[str, ToolsetLike] = TOOLSETS,
) -> dict[str, str]:
    """The tools that `resolve_tools` leaves out because they are not available here, and why. Raises the same."""
    return _resolved(enabled, disabled, registry, toolsets)[1]


def _resolved(
    enabled: Iterable[str] | None,
    disabled: Iterable[str] | None,
    registry: ToolRegistry,
    toolsets: Mapping[str, ToolsetLike],
) -> tuple[list[str], dict[str, str]]:
    if isinstance(enabled, str) or isinstance(disabled, str):
        raise TypeError("enabled and disabled are lists of names, not one string")
    known = _with_registry(registry, toolsets)
    excluded = _expand(disabled or (), registry, known)
    names = [*enabled] if enabled is not None else ["all"]
    wanted = _expand((name for name in names if not _means_all(name, known)), registry, known) - excluded
    absent = wanted - set(registry)
    listed = {tool for name in names if name in known for tool in known[name].tools}
    if strangers := sorted(absent - (PROVIDED_TOOLS - listed)):
        raise ToolsetError(f"tools {strangers} are not in this registry, which has: {', '.join(registry)}")
    everything = any(_means_all(name, known) for name in names)
    chosen = [name for name in registry if name not in excluded and (everything or name in wanted)]
    missing = {name: why for name, why in registry.unavailable().items() if name in chosen}
    missing |= {name: how_to_provide(name) for name in sorted(absent)}
    lacking: set[str] = set()
    for name in names:
        own = _expand([name], registry, known) - excluded if not _means_all(name, known) else set()
        if own <= missing.keys():  # a tool by its name, or a toolset of which nothing is left
            lacking |= own
    if lacking:
        raise ToolUnavailable({name: why for name, why in missing.items() if name in lacking})
    return [name for name in chosen if name not in missing], missing


def get_tool_definitions(
    enabled: Iterable[str] | None = None,
    disabled: Iterable[str] | None = None,
    *,
    registry: ToolRegistry = BUILTIN_TOOLS,
    toolsets: Mapping[str, ToolsetLike] = TOOLSETS,
) -> list[dict[str, Any]]:
    """OpenAI definitions, for `tools=`, of the tools that `resolve_tools` returns. Raises the same errors."""
    names = resolve_tools(enabled, disabled, registry=registry, toolsets=toolsets)
    return registry.definitions(names)


def _means_all(name: str, toolsets: Mapping[str, ToolsetLike]) -> bool:
    return name in ALL and name not in toolsets


def _with_registry(registry: ToolRegistry, toolsets: Mapping[str, ToolsetLike]) -> Mapping[str, Toolset]:
    """`toolsets`, with each tool of the registry in the toolset that it declares."""
    merged = {name: Toolset.of(toolset) for name, toolset in toolsets.items()}
    for name, toolset in registry.toolsets().items():
        base = merged.get(toolset, Toolset(f"The tools of {toolset!r}."))
        if name not in base.tools:
            merged[toolset] = Toolset(base.description, (*base.tools, name), base.includes)
    for name, provided in PROVIDED_TOOLSETS.items():
        if all(tool in registry for tool in provided.tools):
            merged.setdefault(name, provided)
    return merged


def _expand(names: Iterable[str], registry: ToolRegistry, toolsets: Mapping[str, Toolset]) -> set[str]:
    """The tools of toolsets and single tools. A name that is both (`terminal`) means the toolset."""
    found: set[str] = set()
    for name in names:
        if name in toolsets:
            found.update(resolve_toolset(name, {**PROVIDED_TOOLSETS, **toolsets}))
        elif name in registry:
            found.add(name)
        elif name in ALL:
            found.update(registry)
        elif name in PROVIDED_TOOLSETS or name in PROVIDED_TOOLS:
            raise ToolsetError(f"{name!r} has no tools here: {how_to_provide(name)}")
        else:
            raise ToolsetError(f"unknown toolset or tool {name!r}{_known(name, dict.fromkeys([*toolsets, *registry]))}")
    return found
