"""Agents that do not solve a task and try to be scored as if they had: attacks on a judge, as data.

The task is a module `shop.py`. `SOLUTION` solves it, `WRONG` does not, and a `Cheat` is `WRONG` with an attack from
within the interpreter of the tests. A judge is sound if it gives `SOLUTION` 1.0 and every `Cheat` less.
`benchmarks/tamper.py` compares judges with them; use them on your own.
"""

from lachesis_testing.cheats.false_answers import FALSE_ANSWERS
from lachesis_testing.cheats.forged_results import FORGED_RESULTS
from lachesis_testing.cheats.task import CASES, IDS, SOLUTION, TEST_PATH, TESTS, WRONG, Cheat

CHEATS = (*FORGED_RESULTS, *FALSE_ANSWERS)

__all__ = ["CASES", "CHEATS", "IDS", "SOLUTION", "TESTS", "TEST_PATH", "WRONG", "Cheat"]
