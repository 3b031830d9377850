"""An environment of verifiers: the model looks prices up with a tool, and answers with a sum."""

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

PRICES = {"pear": 3, "fig": 5, "apple": 2, "plum": 4}


def price(fruit: str) -> int:
    """The price of one fruit.

    Args:
        fruit: its name, in the singular.
    """
    return PRICES[fruit]


def rows(first: int, count: int) -> Dataset:
    fruits = sorted(PRICES)
    rows = []
    for number in range(first, first + count):
        one, other = fruits[number % 4], fruits[(number // 4 + number + 1) % 4]
        question = f"What do {number + 1} x {one} and 2 x {other} cost together? Answer with the number only."
        rows.append({"question": question, "answer": str((number + 1) * PRICES[one] + 2 * PRICES[other])})
    return Dataset.from_list(rows)


def last(completion) -> str:
    return (completion[-1].content or "").strip() if completion else ""


def load_environment(
    count: int = 12, max_turns: int = 4, broken: str = "", together: bool = False, judge_url: str = ""
) -> vf.Environment:
    """`broken` names a part that fails; with `together`, the group is scored as a whole; `judge_url` is of a judge."""

    async def judged(judge, prompt, completion, answer, state) -> float:
        return float("yes" in (await judge(prompt, completion, answer, state)).lower())

    async def right_answer(completion, answer) -> float:
        if broken == "rubric":
            raise RuntimeError("the rubric is out of order")
        return float(last(completion) == answer)

    async def is_short(completion) -> float:
        return float(len(last(completion)) < 10)

    def shorter_than_others(completions, answers) -> list[float]:
        lengths = [len(completion) for completion in completions]
        return [float(last(completion) == answers[0]) / max(lengths) for completion in completions]

    class Shop(vf.ToolEnv):
        async def setup_state(self, state) -> None:
            if broken == "setup":
                raise vf.SandboxError("no sandbox could be made")
            if broken == "state":
                raise ValueError("the row cannot be read")

    rubric = vf.Rubric([shorter_than_others] if together else [right_answer], [1.0])
    if not together:
        rubric.add_metric(is_short)
    if judge_url:
        client = AsyncOpenAI(base_url=judge_url, api_key="none", max_retries=0)
        rubric = vf.JudgeRubric(judge_client=client, judge_model="fake")
        rubric.add_reward_func(judged)
    stop = [KeyError] if broken == "tool" else []
    return Shop(
        tools=[price],
        max_turns=max_turns,
        stop_errors=stop,
        dataset=rows(0, count),
        eval_dataset=rows(100, 4),
        system_prompt="Use the tool.",
        rubric=rubric,
    )
