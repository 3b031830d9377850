"""What a command says in sentences and tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_prose(console: Console, text: str, *, style: str = "default") -> None:
    """Sentences, which a terminal wraps between words; a file gets a line each."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def print_table(console: Console, table: Table) -> None:
    """A table; in a file without the blanks that fill its last column."""
    if console.is_terminal:
        console.print(table, highlight=False)
        return
    with console.capture() as printed:
        console.print(table, highlight=False)
    console.out("\n".join(line.rstrip(" ") for line in printed.get().removesuffix("\n").split("\n")), highlight=False)
