"""What runs the tool calls of a turn: a session, or the one that a task has in the run that is open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeAlias

from lachesis.agent.open_runs import open_run
from lachesis.tools import ToolRegistry, ToolResult, ToolSession, call_tools
from lachesis.tools.budget import ResultBudget
from lachesis.trajectories import ToolCall

ExecuteTools: TypeAlias = Callable[[Sequence[ToolCall]], Awaitable[Sequence[ToolResult]]]
"""Runs the calls of one turn, concurrently where that is safe; results in the order of the calls."""


def in_session(
    session: ToolSession, registry: ToolRegistry, names: Collection[str], budget: ResultBudget
) -> ExecuteTools:
    """Runs calls of the tools `names` in one session, with results within the budget."""

    async def execute(calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        wanted = [(call.name, call.arguments) for call in calls]
        results = await call_tools(wanted, session, registry=registry, allowed=names)
        return await budget.apply([(call.id, call.name) for call in calls], results, session)

    return execute


def in_open_run(task_id: str, names: Collection[str], budget: ResultBudget) -> ExecuteTools:
    """The same in the session that the task has, or gets at the first call, in the open run.

    Raises:
        NoOpenRun: no run is open.
    """
    run = open_run(task_id)

    async def execute(calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        done = in_session(run.session(task_id), run.registry, names, budget)(calls)
        if asyncio.get_running_loop() is run.loop:
            return await done
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(done), run.loop))

    return execute


async def _awaited(results: Awaitable[Sequence[ToolResult]]) -> Sequence[ToolResult]:
    return await results
