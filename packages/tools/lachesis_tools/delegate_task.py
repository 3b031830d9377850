"""The tool `delegate_task`: a part of the task for a sub-agent, a fresh conversation of the same model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lachesis_tools.calling_agent import OF_ITS_CONVERSATION, OF_THE_AGENT, agent_of_call, callable_names
from lachesis_tools.dispatch import ToolResult, callable_tools
from lachesis_tools.tool_registry import ToolFailure, ToolUnavailable, tool
from lachesis_tools.toolsets import ToolsetError, resolve_tools

MAX_TURNS = 30
"""The most turns of one sub-agent."""


@tool(toolset="delegation", time_limit=None)  # its turns are counted, and its time is that of the rollout
async def delegate_task(
    goal: Annotated[str, Field(min_length=1)],
    context: str | None = None,
    toolsets: list[str] | None = None,
    max_turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 15,
) -> ToolResult:
    """Give a part of the task to a sub-agent, which works in the same sandbox with a conversation of its own, and
    returns its final answer. It knows nothing of this conversation.

    Args:
        goal: What the sub-agent has to do, and what its answer should say.
        context: Everything that it needs to know, such as paths, findings and errors.
        toolsets: The toolsets or tools that it gets; all of yours without this.
        max_turns: How many turns it may take.
    """
    agent, names = agent_of_call(), callable_names(*OF_THE_AGENT, *OF_ITS_CONVERSATION)
    if agent is None:
        raise ToolFailure("there is no agent here that could have a sub-agent")
    if toolsets is not None:
        try:
            chosen = resolve_tools(toolsets, registry=callable_tools.get().registry)
        except (ToolsetError, ToolUnavailable) as error:
            raise ToolFailure(str(error)) from None
        names = [name for name in names if name in chosen]
    task = goal if not context else f"{goal}\n\nWhat you need to know:\n{context}"
    return await agent.delegate(task, names, max_turns)
