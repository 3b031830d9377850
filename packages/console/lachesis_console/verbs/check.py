"""`lachesis check ENV`: find mistakes of an environment without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from shlex import quote
from statistics import fmean

from rich.console import Console
from rich.table import Table

from backends.text import counted
from lachesis.cli.verb_parser import ENVIRONMENT, VerbParser, count
from lachesis.runs.prose import print_prose, print_table

_DESCRIPTION = """\
Run up to three policies in an environment: its reference policy, if it has one, twice for each item, one that does
nothing, and one that calls tools at random. Report what is suspicious: less than 1 for the reference, rewards for the
others, rewards that differ between equal rollouts or never differ, and a slow set-up. Other flags are settings:
--env.NAME VALUE, --config FILE.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 if nothing is suspicious."""
    parser = VerbParser(prog="lachesis check", description=_DESCRIPTION)
    parser.add_argument("environment", metavar="ENV", help=ENVIRONMENT)
    parser.add_argument("-n", "--items", dest="n", type=count, default=5, metavar="N", help="items to run (default: 5)")
    parser.add_argument(
        "--recorded", metavar="PATH", help="rollouts of `lachesis chat --as agent`, as the reference policy"
    )
    given, flags = parser.parse_known_args(argv)
    console = Console(emoji=False)
    from lachesis.cli.environment_classes import environment_class
    from lachesis.runs.command_line import note_misspelt_hooks, report_error
    from lachesis.runs.results import program
    from lachesis_console.chat.recordings import with_recordings
    from lachesis_console.checking import check_environment

    env_cls = environment_class(given.environment)
    if given.recorded is not None:
        env_cls = with_recordings(env_cls, given.recorded)
    Console(emoji=False, stderr=True).print(
        f"{given.environment}: running {counted(given.n, 'item')} without a model", style="dim"
    )
    try:
        report = asyncio.run(check_environment(env_cls, flags, items=given.n))
    except Exception as error:
        note_misspelt_hooks(env_cls, Console(emoji=False, stderr=True))
        return report_error(error, kept=False)
    table = Table("policy", "rollouts", "mean reward", "lowest", "highest", "no score", box=None, pad_edge=False)
    for played in report.played:
        rewards, plays = played.scored, sum(map(len, played.rewards.values()))
        figures = (fmean(rewards), min(rewards), max(rewards)) if rewards else ()
        shown = [f"{value:.3f}" for value in figures] or ["–"] * 3
        table.add_row(played.policy, str(plays), *shown, str(plays - len(rewards)))
    print_table(console, table)
    for text in report.findings:
        print_prose(console, f"suspicious: {text}", style="yellow")
        if text in report.code:
            console.print(report.code[text], markup=False, highlight=False, soft_wrap=True)
    for text in report.notes:
        print_prose(console, f"note: {text}")
    if not report.findings:
        console.print("nothing suspicious")
        next_step = f"next  {program()} audit {quote(given.environment)}   (tries cheats and wrong answers)"
        console.print(next_step, style="dim", markup=False, highlight=False, soft_wrap=True)
    return int(bool(report.findings))
