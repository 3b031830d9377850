"""Runs the tool calls of a turn: in a session, or in the one that a task has in the run that is open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lachesis.loop.open_runs import OpenRun, open_run
from lachesis.loop.turn_check import TurnCheck
from lachesis_messages.messages import ToolCall
from lachesis_tools import ToolRegistry, ToolResult, ToolSession, call_tool, call_tools
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
        return await self.bounded(calls, results)

    async def one(self, call: ToolCall) -> ToolResult:
        """The result of one call, of any length."""
        return await call_tool(call.name, call.arguments, self.session, registry=self.registry, allowed=self.names)

    async def bounded(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> Sequence[ToolResult]:
        """The results of the calls of a turn, within the budget."""
        # The tools of a simulator have no sandbox, and starting one for a long answer might fail.
        reads_files = any(self.registry[name].schema is None for name in self.names if name in self.registry)
        place = self.session if reads_files else None
        return await self.budget.apply([(call.id, call.name) for call in calls], results, place)

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


def unrun(call: ToolCall, check: TurnCheck, ran: Mapping[str, ToolResult]) -> ToolResult:
    """The answer to a call that was not run."""
    if call.id in check.faulty:
        content = check.faulty[call.id]
        return ToolResult(content=content, error=json.loads(content)["error"])
    original = check.duplicates.get(call.id)
    if original is not None and original in ran:
        note = f"The same call was made twice in this turn and was run once; its result is that of {original}."
        return ToolResult(content=json.dumps({"note": note}), error=ran[original].error)
    error = "Not run: the budget of tool calls is used up."
    return ToolResult(content=json.dumps({"error": error}), error=error)
