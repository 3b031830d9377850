"""`lachesis audit ENV`: what is wrong with an environment, found without a model."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from backends.errors import SettingsError
from backends.text import counted, escaped
from lachesis.cli.verb_parser import ENVIRONMENT, VerbParser, count
from lachesis.runs.prose import print_prose, print_table
from lachesis_console.auditing.findings import AuditFinding
from lachesis_console.auditing.records import AuditPlay

if TYPE_CHECKING:
    from lachesis_console.auditing.report import Audit

_COLOURS = {"error": "red", "warning": "yellow", "note": "default"}
"""By severity, the worst first."""
_ALWAYS = {"reference", "nothing", "random"}
"""Policies with which others are compared."""
_LONGEST = 200
"""Characters that are shown of a text."""
_CUT = re.compile(r"(?!\s)|\s+[~^]+$")
"""Lines of a traceback that was shortened, and those that only mark a place."""
_DESCRIPTION = """\
Find the flaws of an environment, in two processes of its own: run its reference policy, if it has one, policies
without any skill, and cheats. Exit code 0: no errors found, 1: errors found, 2: it could not be audited. Other flags
are settings: --env.NAME VALUE. docs/audit.md explains the findings.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdict, the findings and the table; the exit code."""
    parser = VerbParser(prog="lachesis audit", description=_DESCRIPTION)
    parser.add_argument("environment", metavar="ENV", help=ENVIRONMENT)
    parser.add_argument("-n", "--items", type=count, default=8, metavar="N", help="items to run (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--all", action="store_true", help="a row for each policy, not only for those of findings")
    parser.add_argument(
        "--item-seconds", type=float, default=60.0, metavar="S", help="time limit of a rollout (default: 60)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, metavar="S", help="time limit of all rollouts (default: 600)"
    )
    parser.add_argument(
        "--context", type=int, default=32768, metavar="N", help="longest prompt, in tokens (default: 32768)"
    )
    given, flags = parser.parse_known_args(argv)
    try:
        if given.json is not None:
            given.json.open("a").close()
    except OSError as error:  # not after ten minutes
        raise SettingsError(f"--json {given.json}: cannot be written ({error.strerror})") from None
    from lachesis.runs.results import program
    from lachesis_console.auditing.report import audit

    console, beside = Console(emoji=False), Console(emoji=False, stderr=True)
    shown = time.monotonic()

    def progress(said: str, played: int) -> None:
        nonlocal shown
        status.update(text := f"{played} rollouts, now {said}")
        if not beside.is_terminal and time.monotonic() - shown > 60:  # without a terminal, a line a minute
            shown = time.monotonic()
            print_prose(beside, text)

    with beside.status("starting") as status:
        found = audit(
            given.environment,
            flags,
            items=given.items,
            item_seconds=given.item_seconds,
            seconds=given.seconds,
            context=given.context,
            progress=progress,
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found.to_record(), indent=1, ensure_ascii=False) + "\n")
    if found.not_audited:
        named = given.environment.partition(":")[0] in found.not_audited.partition("\n")[0]
        said = f"error: {'' if named else f'{given.environment} could not be audited: '}{found.not_audited.rstrip()}"
        if "\n" in said:  # of the author's code
            said += "\ncorrect it and start again"
        beside.print(said, markup=False, highlight=False, soft_wrap=True)
        return found.exit_code
    print_audit(console, found, every=given.all)
    if given.json is not None and found.findings:
        print_prose(console, f"next  {program()} view {quote(str(given.json))}   (the rollouts of each)", style="dim")
    elif not found.exit_code:
        line = f"next  {program()} eval {quote(given.environment)} -n 20 -m MODEL -b URL   (a model, on 20 items)"
        print_prose(console, line, style="dim")
    return found.exit_code


def print_audit(console: Console, found: Audit, *, every: bool = False) -> None:
    """The verdict, the findings, then a table of policies: of those of findings, or of all."""
    by_policy: dict[str, list[AuditPlay]] = defaultdict(list)
    for play in found.plays:
        by_policy[play.policy].append(play)
    _print_verdict(console, found, len(by_policy))
    for each in found.findings:
        _print_finding(console, each)
    console.print()
    for text in found.facts.left_out:
        _print_lines(console, f"not looked at: {text}", style="dim")
    _print_policies(console, found, by_policy, every=every)


def _print_verdict(console: Console, found: Audit, policies: int) -> None:
    kinds = Counter[str](each.severity for each in found.findings)
    said = ", ".join(counted(kinds[name], name) for name in _COLOURS if kinds[name])
    kind = "policy" if policies == 1 else "policies"
    where = f"in {policies} {kind}, {counted(len(found.plays), 'rollout')}"
    missing = [f"{len(found.facts.left_out)} not looked at"] if found.facts.left_out else []
    if all(play.reward is None for play in found.plays):
        missing.append("no rollout had a score")
    worst = next((name for name in _COLOURS if kinds[name]), "")
    style = f"bold {_COLOURS[worst] if worst else 'default' if missing else 'green'}"
    print_prose(console, "; ".join([f"{found.target}: {said or 'nothing found'} {where}", *missing]), style=style)


def _print_finding(console: Console, finding: AuditFinding) -> None:
    """What was seen, two examples, and what to do."""
    console.print()
    _print_lines(console, f"{finding.severity}: {finding.said}", style=_COLOURS[finding.severity])
    told = set()
    for seen in finding.evidence[:2]:
        if 'File "' in (text := str(seen.get("text", ""))):  # the same lines for each
            told.add("\n".join(f"  {line}" for line in text.strip("\n").splitlines() if not _CUT.match(line)))
            continue
        values = {"on item": seen.get("item"), "by": seen.get("policy"), "reward": seen.get("reward"), "": text}
        values[""] = f"“{escaped(text[:_LONGEST])}{'…' * (len(text) > _LONGEST)}”" if text else ""
        known = (
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
            if value not in ("", None)
        )
        _print_lines(console, "  " + ", ".join(each.strip() for each in known), style="dim")
    for lines in told:
        console.print(lines, style="dim", markup=False, highlight=False, soft_wrap=True)
    _print_lines(console, f"  = {finding.next_step} ({finding.code})")


def _print_policies(
    console: Console, found: Audit, by_policy: Mapping[str, Sequence[AuditPlay]], *, every: bool
) -> None:
    """A row for each policy of a finding and for what they are compared with, and a line for all others."""
    named = _ALWAYS.union(*(each.policies for each in found.findings))
    rows = [name for name in by_policy if every or name in named]
    table = Table("policy", "rollouts", "mean reward", "lowest", "highest", "no score", "s", box=None, pad_edge=False)
    for name in rows:
        played = by_policy[name]
        rewards = [play.reward for play in played if play.reward is not None]
        figures = (sum(rewards) / len(rewards), min(rewards), max(rewards)) if rewards else ()
        shown = [f"{value:.3f}" for value in figures] or ["–"] * 3
        seconds = sum(play.seconds for play in played) / len(played)
        table.add_row(name, str(len(played)), *shown, str(len(played) - len(rewards)), f"{seconds:.2f}")
    print_table(console, table)
    others: dict[str, list[int]] = defaultdict(list)
    for name, played in by_policy.items():
        if name not in rows:
            scores = {play.reward for play in played}
            said = "other rewards" if scores != {None} else "no score"
            if None in scores and len(scores) > 1:
                said = "a score in some rollouts only"
            elif len(scores) == 1 and (score := scores.pop()) is not None:
                said = f"reward {score:g}"
            others[said].append(len(played))
    listed = (f"{len(counts)} with {said} ({counted(sum(counts), 'rollout')})" for said, counts in others.items())
    if others:
        _print_lines(console, f"policies without a finding: {', '.join(listed)}; --all has a row for each", style="dim")
    for word, said in found.explained.items():
        if any(name.partition(":")[0] == word for name in rows):
            _print_lines(console, f"{word}: {said}", style="dim")


def _print_lines(console: Console, text: str, *, style: str = "default") -> None:
    """A sentence, whose further lines on a terminal begin below its words."""
    if console.is_terminal:
        indent = " " * (2 * (len(text) - len(text.lstrip()) > 0) + 2)
        lines = wrap(text, max(40, console.width), subsequent_indent=indent, break_on_hyphens=False)
        text = "\n".join(lines)
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
