"""Grade-school word problems that are made here: no download and no other package, for demos and first steps.

They are far fewer kinds than `gsm_symbolic` has, and easier: a check that everything works, not a measure of a model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, overload

from lachesis_envs.gsm8k.worked_solutions import evaluate

NAMES: Final = ("Ada", "Amir", "Chen", "Elif", "Ines", "Jonas", "Kofi", "Lena", "Mateo", "Nora", "Priya", "Tom")
RANGES: Final = {"a": (12, 60), "b": (2, 9), "c": (3, 20), "d": (100, 400)}
"""Smallest and largest value of each letter."""
KINDS: Final[Sequence[tuple[str, Sequence[str]]]] = (
    (
        "{name} sells {a} clips in April and {b} times as many in May. How many clips does {name} sell in both months?",
        ("{a}*{b}", "{a}+{0}"),
    ),
    (
        "{name} has ${d} and buys {b} notebooks for ${c} each. How many dollars are left?",
        ("{b}*{c}", "{d}-{0}"),
    ),
    (
        "A bakery fills {a} trays with {c} rolls each. It sells {d} rolls. How many rolls are left?",
        ("{a}*{c}", "{0}-{d}"),
    ),
    (
        "{name} earns ${c} an hour and works {b} hours a day. How many dollars does {name} earn in {a} days?",
        ("{c}*{b}", "{0}*{a}"),
    ),
    (
        "{name} has {d} stickers, keeps {a} of them and shares the others equally among {b} friends. How many stickers "
        "does each friend get?",
        ("{d}-{a}", "{0}/{b}"),
    ),
    (
        "A book has {d} pages. {name} reads {c} pages a day for {b} days. How many pages are left to read?",
        ("{c}*{b}", "{d}-{0}"),
    ),
    (
        "A garden has {b} rows of {c} tomato plants, and each plant bears {a} tomatoes. A storm ruins {d} tomatoes. "
        "How many tomatoes are left?",
        ("{b}*{c}", "{0}*{a}", "{1}-{d}"),
    ),
    (
        "{name} runs {c} km on each of {b} days, and {a} km on the day of a race. How many km does {name} run in all?",
        ("{c}*{b}", "{0}+{a}"),
    ),
    (
        "Tickets cost ${c} for adults and ${b} for children. {a} adults and {d} children come. How many dollars are "
        "paid in all?",
        ("{a}*{c}", "{d}*{b}", "{0}+{1}"),
    ),
    (
        "{name} packs {d} apples into boxes of {b} and sells each box for ${c}. How many dollars does {name} earn?",
        ("{d}/{b}", "{0}*{c}"),
    ),
)
"""Questions, and the steps of their solutions: letters are drawn, and numbers stand for results of earlier steps."""


class WordProblems(Sequence[Mapping[str, Any]]):
    """`size` rows of `{"question", "answer"}` in the format of GSM8K, made on access; the same for the same seed."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        places = range(self._size)[place]
        return _problem(self._seed, places) if isinstance(places, int) else [_problem(self._seed, at) for at in places]


def _problem(seed: int, place: int) -> Mapping[str, str]:
    draw = random.Random(f"{seed}/{place}")
    question, steps = draw.choice(KINDS)
    name = draw.choice(NAMES)
    while True:  # until every step gives a whole number above zero
        drawn = {letter: draw.randint(*limits) for letter, limits in RANGES.items()}
        results: list[str] = []
        lines = []
        for step in steps:
            expression = step.format(*results, **drawn)
            value = evaluate(expression)
            if value is None or value < 1 or value.denominator != 1:
                break
            results.append(str(value))
            lines.append(f"{expression} = <<{expression}={value}>>{value}")
        else:
            answer = "\n".join([*lines, f"#### {results[-1]}"])
            return {"question": question.format(name=name, **drawn), "answer": answer}
