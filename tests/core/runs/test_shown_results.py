"""The table that a run ends with, and what follows it, on a narrow terminal."""

import io
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from lachesis.runs.results import Row, ShownResult, print_result

COMMAND = "lachesis export data/reference/groups.jsonl --format trl -o trl.jsonl"


class Shown(ShownResult):
    def rows(self) -> Iterator[Row]:
        yield "items", "50"

    def paths(self) -> Iterator[tuple[str, Path]]:
        yield "groups", Path("groups.jsonl")
        yield "requests for summaries", Path("failed.jsonl")

    def next_steps(self) -> Iterator[str]:
        yield f"{COMMAND}   (or openai, dpo, ...)"

    def warnings(self) -> Iterator[str]:
        yield from ()


def printed(*, terminal: bool) -> list[str]:
    console = Console(file=(file := io.StringIO()), width=80, force_terminal=terminal, color_system=None)
    print_result(console, Shown())
    return file.getvalue().splitlines()


def test_all_values_begin_in_one_column() -> None:
    lines = printed(terminal=False)
    begins = [lines[at].rindex(text) for at, text in enumerate(("50", "groups.jsonl", "failed.jsonl", "lachesis"))]
    assert len({*begins}) == 1 and begins[0] == len("requests for summaries") + 2


def test_a_terminal_has_the_explanation_of_a_long_command_in_a_line_of_its_own() -> None:
    assert printed(terminal=False)[-1].endswith(f"{COMMAND}   (or openai, dpo, ...)")
    *command, use = (line.strip() for line in printed(terminal=True)[-3:])
    pasted = " ".join(line.removesuffix(" \\") for line in command)
    assert (pasted, use) == (f"next{'':<20}{COMMAND}", "(or openai, dpo, ...)")
