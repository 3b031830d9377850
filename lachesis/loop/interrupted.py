"""Conversations of cancelled rollouts, for the caller of the group: a cancelled call returns nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lachesis.loop.result import AgentResult
    from lachesis.loop.rollout import Rollout


@dataclass(frozen=True, slots=True)
class InterruptedRollout:
    """A rollout that was cancelled, with its finished turns."""

    rollout: Rollout
    tools: Sequence[Mapping[str, Any]]


_agents: ContextVar[list[AgentResult] | None] = ContextVar("agents", default=None)
_rollouts: ContextVar[list[InterruptedRollout] | None] = ContextVar("rollouts", default=None)


@contextmanager
def interrupted_agents() -> Iterator[list[AgentResult]]:
    """Results of the agent loops inside up to their cancellation; a loop comes after the sub-agents that it called."""
    with _noting(_agents) as found:
        yield found


@contextmanager
def interrupted_rollouts() -> Iterator[list[InterruptedRollout]]:
    """The rollouts inside that were cancelled, also in tasks that begin inside."""
    with _noting(_rollouts) as found:
        yield found


def note_agent(result: AgentResult) -> None:
    """An agent loop was cancelled."""
    if (found := _agents.get()) is not None:
        found.append(result)


def note_rollout(interrupted: InterruptedRollout) -> None:
    """A rollout was cancelled."""
    if (found := _rollouts.get()) is not None:
        found.append(interrupted)


@contextmanager
def _noting(variable: ContextVar[list[Any] | None]) -> Iterator[list[Any]]:
    found: list[Any] = []
    token = variable.set(found)
    try:
        yield found
    finally:
        variable.reset(token)
