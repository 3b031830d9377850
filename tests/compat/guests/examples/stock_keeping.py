"""A task of Inspect: the model counts what is on shelves with a tool, and reports the sum."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Target, accuracy, match, mean, scorer
from inspect_ai.solver import TaskState, generate, system_message, use_tools
from inspect_ai.tool import tool

SHELVES = {"north": 12, "south": 30, "east": 7, "west": 51}


@tool
def count(broken: bool):
    async def execute(shelf: str) -> int:
        """Count what is on a shelf.

        Args:
            shelf: north, south, east or west.
        """
        if broken:
            raise RuntimeError("the shelf fell over")
        return SHELVES[shelf]

    return execute


@scorer(metrics=[accuracy()])
def asks_a_judge():
    async def score(state: TaskState, target: Target) -> Score:
        verdict = await get_model().generate(f"Is {state.output.completion!r} the same as {target.text}? Yes or no.")
        return Score(value=CORRECT if verdict.completion.startswith("Yes") else INCORRECT)

    return score


@scorer(metrics=[mean()])
def gives(value):
    async def score(state: TaskState, target: Target) -> Score:
        if value == "error":
            raise RuntimeError("the scorer is out of order")
        return Score(value=float("nan") if value == "nan" else value)

    return score


@scorer(metrics={"right": [mean()], "short": [mean()]})
def two_values():
    async def score(state: TaskState, target: Target) -> Score:
        text = state.output.completion
        return Score(value={"right": float(target.text in text), "short": float(len(text) < 20)})

    return score


@task
def stock(score: str = "match", value: object = None, broken: bool = False, **limits: int) -> Task:
    pairs = [(one, other) for one in SHELVES for other in SHELVES if one < other]
    scorers = {
        "match": lambda: match(numeric=True),
        "judge": asks_a_judge,
        "gives": lambda: gives(value),
        "two": two_values,
        "several": lambda: [match(numeric=True), two_values()],
    }
    return Task(
        dataset=[
            Sample(
                id=f"{one}-{other}",
                input=f"How many things are on the shelves {one} and {other} together? End with the number.",
                target=str(SHELVES[one] + SHELVES[other]),
            )
            for one, other in pairs
        ],
        solver=[system_message("Use the tool."), use_tools(count(broken)), generate()],
        scorer=scorers[score](),
        **limits,
    )
