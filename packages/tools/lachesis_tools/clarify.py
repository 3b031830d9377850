"""The tool `clarify`: a question to the user."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lachesis_tools.calling_agent import agent_of_call
from lachesis_tools.dispatch import ToolResult
from lachesis_tools.tool_registry import ToolFailure, tool


@tool(toolset="clarify", time_limit=None)  # a person has no limit of time; a simulated one has that of `follow_up`
async def clarify(question: Annotated[str, Field(min_length=1)], choices: list[str] | None = None) -> ToolResult:
    """Ask the user a question when the task is not clear.

    Args:
        question: The question.
        choices: Answers to choose from; the user may give another one.
    """
    agent = agent_of_call()
    said = None if agent is None else await agent.ask_user(question, choices or [])
    if said is None:
        raise ToolFailure("the user does not answer: decide yourself")
    return said
