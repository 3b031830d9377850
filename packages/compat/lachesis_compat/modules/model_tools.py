"""Definitions and calls of tools by name, for code that has a task id and no session."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from backends import BackendError
from lachesis.loop.open_runs import note_failure, open_run
from lachesis_compat.in_run import registry_in_use, waited
from lachesis_compat.removed_names import refuse
from lachesis_compat.toolset_dicts import get_all_toolsets
from lachesis_tools import BUILTIN_TOOLS, call_tool
from lachesis_tools import get_tool_definitions as definitions
from lachesis_tools.json_results import as_json
from lachesis_tools.toolsets import PROVIDED_TOOLSETS, REMOVED_TOOLSETS, has_toolset

log = logging.getLogger(__name__)

TOOL_TO_TOOLSET_MAP = BUILTIN_TOOLS.toolsets()
"""Of the built-in tools."""


def __getattr__(name: str) -> Any:
    refuse("model_tools", name)


def get_all_tool_names() -> list[str]:
    return [*registry_in_use()]


def get_toolset_for_tool(tool_name: str) -> str | None:
    return registry_in_use().toolsets().get(tool_name)


def get_available_toolsets() -> dict[str, dict[str, Any]]:
    """Toolset -> `{available, description, tools, requirements}`: what its tools lack here. One without a tool that
    works is not available."""
    registry = registry_in_use()
    lacking = registry.unavailable()
    working = set(registry) - lacking.keys()
    return {
        name: {
            "available": not working.isdisjoint(toolset["tools"]),
            "description": toolset["description"],
            "tools": toolset["tools"],
            "requirements": sorted({lacking[tool] for tool in toolset["tools"] if tool in lacking}),
        }
        for name, toolset in get_all_toolsets().items()
        if toolset["tools"]
    }


def check_toolset_requirements() -> dict[str, bool]:
    """Toolset -> whether it is available."""
    return {name: toolset["available"] for name, toolset in get_available_toolsets().items()}


def check_tool_availability(quiet: bool = False) -> tuple[list[str], list[dict[str, Any]]]:
    """The available toolsets, and the others as `{name, env_vars, tools}`: under the old key, what they lack. `quiet`
    has no effect."""
    found = get_available_toolsets()
    others = [
        {"name": name, "env_vars": toolset["requirements"], "tools": toolset["tools"]}
        for name, toolset in found.items()
        if not toolset["available"]
    ]
    return [name for name, toolset in found.items() if toolset["available"]], others


def get_tool_definitions(
    enabled_toolsets: Iterable[str] | None = None,
    disabled_toolsets: Iterable[str] | None = None,
    quiet_mode: bool = False,
) -> list[dict[str, Any]]:
    """OpenAI definitions of the tools of these toolsets; None is all.

    Toolsets of the removed stack without tools here are left out, also where one of these toolsets includes them, with
    a warning unless `quiet_mode`.

    Raises:
        ToolsetError: a name that neither stack has.
    """
    registry, toolsets = registry_in_use(), get_all_toolsets()

    def is_missing(name: str) -> bool:
        if name not in REMOVED_TOOLSETS and name not in PROVIDED_TOOLSETS:
            return False
        own = toolsets.get(name, {}).get("tools", ())
        without_tools = bool(own) and not any(tool in registry for tool in own)
        return without_tools or not has_toolset(name, registry=registry, toolsets=toolsets)

    def existing(names: Iterable[str] | None) -> list[str] | None:
        if names is None:
            return None
        names = list(names)
        reached = list(dict.fromkeys(names))
        for name in reached:  # grows by what each one includes
            included = toolsets.get(name, {}).get("includes", ())
            reached += [each for each in dict.fromkeys(included) if each not in reached]
        missing = [name for name in reached if is_missing(name)]
        if missing and not quiet_mode:
            log.warning("toolsets without tools here are left out: %s", ", ".join(missing))
        return [name for name in names if name not in missing]

    return definitions(existing(enabled_toolsets), existing(disabled_toolsets), registry=registry, toolsets=toolsets)


def handle_function_call(
    function_name: str, function_args: Mapping[str, Any] | str | None, task_id: str | None = None, **_: Any
) -> str:
    """The result of this call in the sandbox of the task, as JSON. Blocks, so not on the event loop.

    Raises:
        NoOpenRun: no run is open.
        BackendError: the sandbox failed.
        ToolCrashed: the tool raised what it does not declare.
    """
    task = task_id or "default"
    run = open_run(task)

    async def call() -> str:
        session = run.session(task)
        try:
            result = await call_tool(function_name, function_args, session, registry=run.registry)
            return as_json(function_name, result.content)
        except BackendError as error:
            if not session.closed:  # by `cleanup_vm` under the call
                note_failure(task, error)
            raise

    return waited(run, call(), "handle_function_call")
