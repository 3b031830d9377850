"""The tools of the browser, by task id. Their results are JSON."""

from __future__ import annotations

from typing import Any, Literal

from lachesis_compat.in_run import begun, run_if_open
from lachesis_compat.modules.model_tools import handle_function_call
from lachesis_tools.browser import Browser
from lachesis_tools.browser import check_browser_requirements as _reason


def check_browser_requirements() -> bool:
    """Whether this machine has the programs of the browser."""
    return _reason() is None


def cleanup_browser(task_id: str) -> None:
    """End the browser of a task, if it has one; its sandbox stays. On the event loop it ends soon after."""
    run = run_if_open(task_id)
    if run is not None and task_id in run.sessions and not (session := run.sessions.get(task_id)).closed:
        begun(run, session.state(Browser).close())


def browser_navigate(url: str, task_id: str | None = None) -> str:
    """This tool, like the others below. Blocks, so not on the event loop."""
    return _called("navigate", task_id, url=url)


def browser_snapshot(full: bool = False, task_id: str | None = None, user_task: str | None = None) -> str:
    """`user_task` has no effect."""
    return _called("snapshot", task_id, full=full)


def browser_click(ref: str, task_id: str | None = None) -> str:
    return _called("click", task_id, ref=ref)


def browser_type(ref: str, text: str, task_id: str | None = None) -> str:
    return _called("type", task_id, ref=ref, text=text)


def browser_scroll(direction: Literal["up", "down"], task_id: str | None = None) -> str:
    return _called("scroll", task_id, direction=direction)


def browser_back(task_id: str | None = None) -> str:
    return _called("back", task_id)


def browser_press(key: str, task_id: str | None = None) -> str:
    return _called("press", task_id, key=key)


def browser_get_images(task_id: str | None = None) -> str:
    return _called("get_images", task_id)


def browser_vision(question: str, annotate: bool = False, task_id: str | None = None) -> str:
    return _called("vision", task_id, question=question, annotate=annotate)


def browser_console(clear: bool = False, expression: str | None = None, task_id: str | None = None) -> str:
    return _called("console", task_id, clear=clear, expression=expression)


def _called(name: str, task_id: str | None, **arguments: Any) -> str:
    return handle_function_call(f"browser_{name}", arguments, task_id=task_id)
