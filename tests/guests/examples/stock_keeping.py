"""A task of Inspect: the model counts what is on a shelf with a tool, and reports the sum."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, accuracy, match, scorer
from inspect_ai.solver import TaskState, generate, system_message, use_tools
from inspect_ai.tool import tool

SHELVES = {"north": 12, "south": 30, "east": 7, "west": 51}


@tool
def count():
    async def execute(shelf: str) -> int:
        """Count what is on a shelf.

        Args:
            shelf: north, south, east or west.
        """
        return SHELVES[shelf]

    return execute


@scorer(metrics=[accuracy()])
def fails():
    async def score(state: TaskState, target: Target) -> Score:
        raise RuntimeError("the scorer is out of order")

    return score


@scorer(metrics=[accuracy()])
def unknown():
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=float("nan"))

    return score


@task
def stock(broken: str = "", **limits: int) -> Task:
    pairs = [(one, other) for one in SHELVES for other in SHELVES if one < other]
    return Task(
        dataset=[
            Sample(
                id=f"{one}-{other}",
                input=f"How many things are on the shelves {one} and {other} together? End with the number.",
                target=str(SHELVES[one] + SHELVES[other]),
            )
            for one, other in pairs
        ],
        solver=[system_message("Use the tool."), use_tools(count()), generate()],
        scorer={"scorer": fails(), "nan": unknown()}.get(broken, match(numeric=True)),
        **limits,
    )
