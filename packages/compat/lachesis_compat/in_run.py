"""Calls of old, synchronous code into the run that is open."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from lachesis.loop.open_runs import NoOpenRun, OpenRun, open_run
from lachesis_tools import BUILTIN_TOOLS, ToolRegistry

T = TypeVar("T")


def run_if_open(task_id: str = "") -> OpenRun | None:
    """The run that a task belongs to, if there is one."""
    try:
        return open_run(task_id)
    except NoOpenRun:
        return None


def registry_in_use() -> ToolRegistry:
    """The tools of the open run; the built-in ones where none is open."""
    run = run_if_open()
    return BUILTIN_TOOLS if run is None else run.registry


def missing(toolset: str) -> dict[str, str]:
    """The tools of a toolset that lack something on this machine, and what."""
    registry = registry_in_use()
    lacking = registry.unavailable()
    return {name: why for name, why in lacking.items() if registry[name].toolset == toolset}


def on_loop_of(run: OpenRun) -> bool:
    """Whether the caller is on the thread of the run's event loop, where waiting would stop everything."""
    try:
        return asyncio.get_running_loop() is run.loop
    except RuntimeError:
        return False


def waited(run: OpenRun, call: Coroutine[Any, Any, T], what: str) -> T:
    """The result of `call`, which runs on the loop of the run while this thread waits.

    Raises:
        RuntimeError: on the thread of the loop itself.
    """
    if on_loop_of(run):
        call.close()
        raise RuntimeError(
            f"{what} waits for its result and would block the event loop: call it on another thread "
            f"(`await asyncio.to_thread({what}, ...)`), or use `await ctx.call_tool(...)`"
        )
    return asyncio.run_coroutine_threadsafe(call, run.loop).result()


def begun(run: OpenRun, call: Coroutine[Any, Any, None]) -> None:
    """Run `call` to its end on the loop of the run: at once where this thread may wait, else in a task."""
    if not on_loop_of(run):
        asyncio.run_coroutine_threadsafe(call, run.loop).result()
        return
    task = asyncio.ensure_future(call)
    run.tasks.add(task)
    task.add_done_callback(run.tasks.discard)
