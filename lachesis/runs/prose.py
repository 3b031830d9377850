"""What a run says in sentences."""

from __future__ import annotations

from rich.console import Console


def print_prose(console: Console, text: str, *, style: str = "default") -> None:
    """Sentences, which a terminal wraps between words; a file gets a line each."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)
