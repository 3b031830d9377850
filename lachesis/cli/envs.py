"""`lachesis envs`: the environments that are installed with the project."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lachesis.cli.environment_classes import ENVIRONMENTS


def main(argv: Sequence[str] | None = None) -> int:
    """Print them; the exit code."""
    argparse.ArgumentParser(prog="lachesis envs", description=__doc__).parse_args(argv)
    table = Table("environment", "plays", "needs", box=None, pad_edge=False)
    for name, included in ENVIRONMENTS.items():
        table.add_row(name, included.does, included.needs or "nothing")
    console = Console()
    console.print(table)
    console.print("\nplay one: lachesis eval NAME -n 20 -m MODEL -b URL", highlight=False)
    console.print("write one: lachesis new NAME", highlight=False)
    return 0
