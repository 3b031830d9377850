"""The tools of files, by task id. Their results are JSON."""

from __future__ import annotations

from typing import Any

from lachesis_compat.in_run import missing
from lachesis_compat.modules.model_tools import handle_function_call


def check_file_requirements() -> bool:
    """Whether the tools of files work on this machine."""
    return not missing("file")


def read_file_tool(path: str, offset: int = 1, limit: int = 500, task_id: str | None = None) -> str:
    return handle_function_call("read_file", {"path": path, "offset": offset, "limit": limit}, task_id=task_id)


def write_file_tool(path: str, content: str, task_id: str | None = None) -> str:
    return handle_function_call("write_file", {"path": path, "content": content}, task_id=task_id)


def patch_tool(task_id: str | None = None, **arguments: Any) -> str:
    return handle_function_call("patch", arguments, task_id=task_id)


def search_tool(pattern: str, task_id: str | None = None, **arguments: Any) -> str:
    return handle_function_call("search_files", {"pattern": pattern, **arguments}, task_id=task_id)
