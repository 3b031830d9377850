"""What a tool can know of the call that it answers, beside its arguments and its session: which tools the caller may
call, and which agent it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from lachesis_tools.dispatch import callable_tools, calling_agent

if TYPE_CHECKING:
    from lachesis_tools.dispatch import ToolResult

OF_THE_AGENT: Final = ("delegate_task", "execute_code", "clarify")
"""Tools that only the agent of the rollout itself can call: no sub-agent, and no code."""
OF_ITS_CONVERSATION: Final = ("memory", "todo")
"""Tools whose state belongs to the conversation of the agent, so that a sub-agent has none of them."""


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


def agent_of_call() -> CallingAgent | None:
    """The agent that called; None where a reward or other code did."""
    agent = calling_agent.get()
    found: CallingAgent | None = agent() if agent is not None else None
    return found


def callable_names(*without: str) -> list[str]:
    """The names of the tools that the caller may call, in the order of the registry, but for those in `without`."""
    tools = callable_tools.get()
    known = (name for name in tools.registry if tools.allowed is None or name in tools.allowed)
    return [name for name in known if name not in without]
