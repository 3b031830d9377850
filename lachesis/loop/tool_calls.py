"""Runs the tool calls of a turn: a session, or the one that a task has in the run that is open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lachesis.loop.open_runs import OpenRun, open_run
from lachesis_messages.messages import ToolCall
from lachesis_tools import ToolRegistry, ToolResult, ToolSession, call_tools
from lachesis_tools.budget import ResultBudget

ExecuteTools: TypeAlias = Callable[[Sequence[ToolCall]], Awaitable[Sequence[ToolResult]]]
"""Runs the calls of one turn, concurrently where that is safe; results in the order of the calls. It may have a method
`waited`: seconds so far that the calls spent waiting for the infrastructure."""


@dataclass(frozen=True, slots=True)
class SessionCalls:
    """Runs calls of the tools `names` in one session, with results within the budget."""

    session: ToolSession
    registry: ToolRegistry
    names: Collection[str]
    budget: ResultBudget

    async def __call__(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        wanted = [(call.name, call.arguments) for call in calls]
        results = await call_tools(wanted, self.session, registry=self.registry, allowed=self.names)
        return await self.budget.apply([(call.id, call.name) for call in calls], results, self.session)

    def waited(self) -> float:
        """Seconds so far that the session waited for the infrastructure."""
        return self.session.waited


@dataclass(frozen=True, slots=True)
class OpenRunCalls:
    """The same in the session that the task has, or gets at the first call, in an open run."""

    run: OpenRun
    task_id: str
    names: Collection[str]
    budget: ResultBudget

    async def __call__(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        session = self.run.session(self.task_id)
        done = SessionCalls(session, self.run.registry, self.names, self.budget)(calls)
        if asyncio.get_running_loop() is self.run.loop:
            return await done
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(done, self.run.loop))

    def waited(self) -> float:
        """Seconds so far that the session waited for the infrastructure."""
        sessions = self.run.sessions
        return sessions.get(self.task_id).waited if self.task_id in sessions else 0.0


def in_open_run(task_id: str, names: Collection[str], budget: ResultBudget) -> OpenRunCalls:
    """
    Raises:
        NoOpenRun: no run is open."""
    return OpenRunCalls(open_run(task_id), task_id, names, budget)
