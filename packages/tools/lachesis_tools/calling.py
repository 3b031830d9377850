"""What a tool can know of the call that it answers, beside its arguments and its session: which tools there are, and
the agent that called, if an agent loop did."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lachesis_tools.dispatch import ToolResult
    from lachesis_tools.tool_registry import ToolRegistry


class CallingAgent(Protocol):
    """The agent of a rollout, as its tools see it."""

    def take_call(self) -> bool:
        """Count a call of a tool that is made for it; False if it may make no more."""

    async def delegate(self, task: str, tools: Collection[str], max_turns: int) -> ToolResult:
        """The answer of a sub-agent, with its conversation.

        Raises:
            BackendError, InferenceError, ToolCrashed: the infrastructure failed, or the environment.
        """

    async def ask_user(self, question: str, choices: Sequence[str]) -> ToolResult | None:
        """What the user says to a question; None if there is no user, or the user says nothing."""


@dataclass(frozen=True, slots=True)
class CallableTools:
    """The tools that the caller of a tool may call."""

    registry: ToolRegistry
    allowed: Collection[str] | None
    """None means all of the registry."""

    def names(self, *without: str) -> list[str]:
        """Their names in the order of the registry, but for those in `without`."""
        known = (name for name in self.registry if self.allowed is None or name in self.allowed)
        return [name for name in known if name not in without]


calling_agent: ContextVar[CallingAgent | None] = ContextVar("calling_agent", default=None)
callable_tools: ContextVar[CallableTools] = ContextVar("callable_tools")
"""Set in every call of a tool."""
OF_THE_AGENT = ("delegate_task", "execute_code", "clarify")
"""Tools that only the agent of the rollout itself can call: no sub-agent, and no code."""
OF_ITS_CONVERSATION = ("memory", "todo")
"""Tools whose state belongs to the conversation of the agent, so that a sub-agent has none of them."""
