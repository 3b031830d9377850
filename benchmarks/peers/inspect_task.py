"""The conversation as a task of Inspect."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool
def noop() -> Tool:
    async def execute(text: str) -> str:
        """Does nothing.

        Args:
            text: Any text.
        """
        return "done"

    return execute


@task
def conversation(count: int) -> Task:
    samples = [Sample(input=f"What is the answer to question {number}?", target="42") for number in range(count)]
    return Task(dataset=samples, solver=[use_tools(noop()), generate()], scorer=includes())
