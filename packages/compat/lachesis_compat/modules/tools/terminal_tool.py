"""Sandboxes by task id: another image or folder for one task, and its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lachesis.loop.open_runs import open_run
from lachesis_compat.in_run import begun, missing, run_if_open
from lachesis_compat.modules.model_tools import handle_function_call
from lachesis_tools import ToolSession

log = logging.getLogger(__name__)


def check_terminal_requirements() -> bool:
    """Whether the tools of the terminal work on this machine."""
    return not missing("terminal")


def register_task_env_overrides(task_id: str, overrides: Mapping[str, Any]) -> None:
    """Give the sandbox of a task another image (`docker_image`, ...: that of the run's backend counts) or `cwd`.

    What the backend has no use for is named in the log.

    Raises:
        NoOpenRun: no run is open.
        RuntimeError: the task has a sandbox already.
        ValueError: `cwd` is no absolute path.
    """
    run = open_run(task_id)
    if task_id in run.sessions:
        raise RuntimeError(f"task {task_id!r} has its sandbox already: register overrides before its first tool call")
    own = f"{run.backend}_image"
    images = {name: value for name, value in overrides.items() if name.endswith("_image") and value}
    changed: dict[str, object] = {}
    if own in images and run.takes_images:
        changed["image"] = images[own]
    elif images:
        run.note_once(
            f"images of single tasks have no effect with the sandboxes of backend {run.backend!r}, which has no image "
            f"in {', '.join(images)}; the first is {next(iter(images.values()))!r}"
        )
    if overrides.get("cwd"):
        changed["workdir"] = overrides["cwd"]
    if unknown := sorted(set(overrides) - set(images) - {"cwd"} - {name for name in overrides if not overrides[name]}):
        log.warning("register_task_env_overrides: %s is not known and has no effect", ", ".join(unknown))
    run.overrides[task_id] = changed
    run.spec(task_id)  # a value that no sandbox can have is an error here


def clear_task_env_overrides(task_id: str) -> None:
    """Forget the overrides of a task."""
    open_run(task_id).overrides.pop(task_id, None)


def get_active_env(task_id: str) -> ToolSession | None:
    """The session of a task that has a sandbox."""
    run = open_run(task_id)
    session = run.sessions.get(task_id) if task_id in run.sessions else None
    return session if session is not None and session.started else None


def cleanup_vm(task_id: str) -> None:
    """Remove the sandbox of a task, if it has one. On the event loop it is removed soon after; the end of the run waits
    for it."""
    run = run_if_open(task_id)
    if run is not None and task_id in run.sessions:
        begun(run, run.sessions.close(task_id))


def cleanup_all_environments() -> int:
    """Remove the sandboxes of all tasks that were made by hand; the run's own rollouts keep theirs. Their number."""
    run = run_if_open()
    if run is None:
        return 0
    own = [task_id for task_id in run.by_hand if task_id in run.sessions]
    for task_id in own:
        begun(run, run.sessions.close(task_id))
    return len(own)


def terminal_tool(command: str, task_id: str | None = None, **arguments: Any) -> str:
    """The tool `terminal` in the sandbox of a task. Blocks, so not on the event loop."""
    return handle_function_call("terminal", {"command": command, **arguments}, task_id=task_id)
