"""`lachesis envs`: the environments that are installed with the project."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lachesis.cli.environment_classes import ENVIRONMENTS
from lachesis.cli.verb_parser import VerbParser
from lachesis.runs.prose import print_table

ABOUT = {
    "gsm8k": (
        "maths problems with a Python tool",
        "reasoning-gym; or --env.dataset_name word_problems, or openai/gsm8k",
    ),
    "reasoning_gym": (
        "106 generators of puzzles",
        "--env.dataset_name reasoning_gym:NAME; the package reasoning-gym",
    ),
    "swe": ("bugs of Python packages, graded by hidden tests", "downloads from PyPI at the first start"),
    "harbor": ("tasks in Harbor's folder format", "--env.dataset_name FOLDER"),
    "terminal": ("write a file with given content", "nothing"),
    "tool_call": ("one call with the right arguments", "nothing"),
    "tool_result": ("a question that only a tool can answer", "nothing"),
    "maze": ("a maze of files, in at least five turns", "nothing"),
    "web_research": ("questions over several generated pages", "nothing"),
    "browser_tasks": ("things to do in a web application", "Chromium, agent-browser (docs/tools.md)"),
}
"""What its tasks are, and what it needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print them; the exit code."""
    VerbParser(prog="lachesis envs", description=__doc__).parse_args(argv)
    table = Table("environment", "tasks", "needs", box=None, pad_edge=False)
    for name in [*ABOUT, *(name for name in ENVIRONMENTS.names() if name not in ABOUT)]:
        table.add_row(name, *ABOUT.get(name, ("that of another package", "")))
    console = Console(emoji=False)
    print_table(console, table)
    console.print("\nplay one: lachesis eval NAME -n 20 -m MODEL -b URL", highlight=False)
    console.print("write one: lachesis new NAME", highlight=False)
    return 0
