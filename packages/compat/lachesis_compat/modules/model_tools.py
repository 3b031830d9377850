"""Definitions and calls of tools by name, for code that has a task id and no session."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from backends import BackendError
from lachesis.loop.open_runs import note_failure, open_run
from lachesis_compat.in_run import registry_in_use, waited
from lachesis_compat.toolset_dicts import get_all_toolsets
from lachesis_tools import BUILTIN_TOOLS, call_tool
from lachesis_tools import get_tool_definitions as definitions
from lachesis_tools.json_results import as_json
from lachesis_tools.toolsets import PROVIDED_TOOLSETS, REMOVED_TOOLSETS, has_toolset

log = logging.getLogger(__name__)

TOOL_TO_TOOLSET_MAP = BUILTIN_TOOLS.toolsets()
"""Of the built-in tools."""


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
