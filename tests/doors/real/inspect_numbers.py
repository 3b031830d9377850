"""A task of Inspect: the agent finds a number with a tool."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def compare():
    async def execute(number: int) -> str:
        """Compare a number with the one that is looked for.

        Args:
            number: the number.
        """
        return "higher" if number < 7 else "lower" if number > 7 else "right"

    return execute


@task
def numbers(count: int = 1000) -> Task:
    return Task(
        dataset=[Sample(id=str(place), input="Which number is it?", target="7") for place in range(count)],
        solver=[use_tools(compare()), generate()],
        scorer=includes(),
    )
