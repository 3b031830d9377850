"""The end of a task's browser, under its old name."""

from __future__ import annotations

from lachesis_compat.modules.tools.terminal_tool import cleanup_vm


def cleanup_browser(task_id: str) -> None:
    """Remove the browser of a task. It lives in the task's sandbox, which goes with it, as after `cleanup_vm`."""
    cleanup_vm(task_id)
