"""`lachesis eval compare A B`: two evaluations of the same items, item by item, with intervals and a p value.

A and B are folders of `eval`, or their samples.jsonl. The difference is that of the means of the items that both
have; its p is that of a permutation test.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from backends.errors import LachesisError
from lachesis.cli.verb_parser import VerbParser
from lachesis.figures.intervals import Mean
from lachesis.runs.prose import print_table
from lachesis.runs.results import program
from lachesis_view.pairs import Difference
from lachesis_view.reports.comparison import Comparison, compare, write_comparison

COLUMNS = 48

Drawn = Sequence[tuple[str, Mean | Difference]]


def main(argv: Sequence[str] | None = None) -> int:
    """Print tables and a plot of the intervals."""
    parser = VerbParser(prog="lachesis eval compare", description=__doc__)
    parser.add_argument("a", type=Path, metavar="A", help="the evaluation to compare with")
    parser.add_argument("b", type=Path, metavar="B", help="the other one")
    parser.add_argument("more", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="write both runs side by side to this file")
    arguments = parser.parse_args(argv)
    if arguments.more:
        others = "; ".join(
            f"{program()} eval compare {quote(str(arguments.a))} {quote(each)}" for each in map(str, arguments.more)
        )
        parser.error(f"it compares two, A and B; for the others: {others}")
    found = compare(arguments.a, arguments.b)
    console = Console(emoji=False)
    if arguments.json:
        console.out(_as_json(found), highlight=False)
    else:
        _show(console, found)
        for title, drawn in _panels(found):
            console.print(f"\n{title}, 95 % intervals", markup=False, highlight=False)
            for line in _drawn(drawn):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    if arguments.html is not None:
        try:
            write_comparison(arguments.html, found)
        except OSError as error:
            raise LachesisError(f"{arguments.html}: cannot be written ({error.strerror}); choose another") from error
    return 0


def _as_json(found: Comparison) -> str:
    figures = {name: {"a": a, "b": b} for name, a, b in found.means()}
    kept = ("difference", "categories", "only_a", "only_b", "settings")
    content = {"figures": figures, **{name: getattr(found, name) for name in kept}}
    return orjson.dumps(content, option=orjson.OPT_INDENT_2).decode()  # nan becomes null


def _show(console: Console, found: Comparison) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("95 % intervals", "A", "B"):
        table.add_column(column, overflow="fold")
    for row in found.rows():
        table.add_row(*map(escape, row))
    print_table(console, table)
    console.print()
    for name, text in found.lines():
        console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)


def _panels(found: Comparison) -> Iterator[tuple[str, Drawn]]:
    """What is drawn on one axis each."""
    yield "mean reward", [("A", found.a.summary.reward), ("B", found.b.summary.reward)]
    yield "B - A", [("all", found.difference), *found.categories.items()]


def _axis(drawn: Drawn) -> tuple[float, float]:
    """The range of an axis. Differences are drawn with 0 on it."""
    values = [value for _, each in drawn for value in (each.mean, each.low, each.high) if math.isfinite(value)]
    values += [0.0] if any(isinstance(each, Difference) for _, each in drawn) else []
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _drawn(drawn: Drawn) -> Iterator[str]:
    """The intervals as lines of text."""
    low, high = _axis(drawn)

    def at(value: float) -> int:
        # Halved: the ends may be those of all floats.
        return round((value / 2 - low / 2) / (high / 2 - low / 2) * (COLUMNS - 1))

    width = min(24, max(len(name) for name, _ in drawn))
    for name, each in drawn:
        line = [" "] * COLUMNS
        if isinstance(each, Difference):
            line[at(0.0)] = "┆"
        if math.isfinite(each.low):
            line[at(each.low) : at(each.high) + 1] = "─" * (at(each.high) - at(each.low) + 1)
        if math.isfinite(each.mean):
            line[at(each.mean)] = "●"
        yield f"  {name[:width]:<{width}} {''.join(line)}"
    yield f"  {'':<{width}} {f'{low:.3f}':<{COLUMNS - 8}}{f'{high:.3f}':>8}"
