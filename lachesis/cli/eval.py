"""`lachesis eval ENV`: measure a model. `lachesis eval compare|regrade`: what to do with finished evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis.cli import play_environment
from lachesis.cli.subcommands import run_subcommand

SUBCOMMANDS = {
    "compare": ("eval compare", "compare two evaluations of the same items"),
    "regrade": ("eval regrade", "grade the artifacts of a finished run again, with today's verifiers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(argv or ())
    if arguments and arguments[0] in SUBCOMMANDS:
        return run_subcommand("lachesis eval", __doc__, SUBCOMMANDS, arguments)
    return play_environment.main("eval", arguments)
