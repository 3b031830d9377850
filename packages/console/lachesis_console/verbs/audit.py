"""`lachesis audit ENV`: what is wrong with an environment, found without a model."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backends.errors import SettingsError
from backends.text import counted, escaped
from lachesis.cli.verb_parser import ENVIRONMENT, VerbParser, count
from lachesis.runs.prose import print_table
from lachesis_console.auditing.records import AuditPlay

FEW = 3
"""Policies with one reward that share a line."""
_DESCRIPTION = """\
Find the flaws of an environment, in two processes of its own: run its reference policy, if it has one, policies
without any skill, and cheats. Exit code 0: no errors found, 1: errors found, 2: it could not be audited. Other flags
are settings: --env.NAME VALUE. docs/audit.md explains the findings.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the findings; the exit code."""
    parser = VerbParser(prog="lachesis audit", description=_DESCRIPTION)
    parser.add_argument("environment", metavar="ENV", help=ENVIRONMENT)
    parser.add_argument("-n", "--items", type=count, default=8, metavar="N", help="items to run (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument(
        "--item-seconds", type=float, default=60.0, metavar="S", help="time limit of a rollout (default: 60)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, metavar="S", help="time limit of the audit (default: 600)"
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
    from lachesis_console.auditing.report import audit

    console, beside = Console(emoji=False), Console(emoji=False, stderr=True)
    with beside.status("starting") as status:
        found = audit(
            given.environment,
            flags,
            items=given.items,
            item_seconds=given.item_seconds,
            seconds=given.seconds,
            context=given.context,
            progress=lambda said, played: status.update(f"{played} rollouts, now {said}"),
        )
    if given.json is not None:
        given.json.write_text(json.dumps(found.to_record(), indent=1, ensure_ascii=False) + "\n")
    if found.not_audited:
        named = given.environment.partition(":")[0] in found.not_audited.partition("\n")[0]
        said = f"error: {'' if named else f'{given.environment} could not be audited: '}{found.not_audited}"
        beside.print(said, markup=False, highlight=False, soft_wrap=True)
        return found.exit_code
    table = Table("policy", "rollouts", "mean reward", "lowest", "highest", "no score", "s", box=None, pad_edge=False)
    by_policy: dict[str, list[AuditPlay]] = defaultdict(list)
    for play in found.plays:
        by_policy[play.policy].append(play)
    alike = _alike(by_policy)
    told = {name for names in alike.values() for name in names}
    for name, played in by_policy.items():
        if name in told:
            continue
        rewards = [play.reward for play in played if play.reward is not None]
        figures = (sum(rewards) / len(rewards), min(rewards), max(rewards)) if rewards else ()
        shown = [f"{value:.3f}" for value in figures] or ["–"] * 3
        seconds = sum(play.seconds for play in played) / len(played)
        table.add_row(name, str(len(played)), *shown, str(len(played) - len(rewards)), f"{seconds:.2f}")
    if table.rows:
        print_table(console, table)
    for word, said in found.explained.items():
        console.print(f"{word}: {said}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for reward, names in sorted(alike.items()):
        rollouts = counted(sum(len(by_policy[name]) for name in names), "rollout")
        console.print(f"reward {reward:g} in {rollouts} of {len(names)} other policies (--json has each)", style="dim")
    colours = {"error": "red", "warning": "yellow", "note": "default"}
    for each in found.findings:
        style = colours[each.severity]
        console.print(f"{each.severity}: {each.code}: {each.said}", style=style, markup=False, soft_wrap=True)
        for seen in each.evidence[:2]:
            text = ", ".join(f"{name} {value}" for name, value in seen.items() if value not in ("", None))
            console.print(f"    {escaped(text[:300])}", style="dim", markup=False, highlight=False, soft_wrap=True)
        console.print(f"    next step: {each.next_step}", markup=False, highlight=False, soft_wrap=True)
    for text in found.facts.left_out:
        console.print(f"not looked at: {text}", markup=False, highlight=False, soft_wrap=True)
    kinds = Counter[str](each.severity for each in found.findings)
    said = ", ".join(counted(kinds[name], name) for name in colours if kinds[name])
    console.print(f"in all: {said}" if said else "nothing suspicious", markup=False)
    return found.exit_code


def _alike(by_policy: Mapping[str, Sequence[AuditPlay]]) -> dict[float, list[str]]:
    """By reward the policies that earned it in every rollout, where they need no row: several of them, or without a
    reward, and none with full marks."""
    found: dict[float, list[str]] = defaultdict(list)
    for name, played in by_policy.items():
        rewards = {play.reward for play in played}
        if name != "reference" and len(rewards) == 1 and (reward := rewards.pop()) is not None:
            found[reward].append(name)
    highest = max((play.reward or 0.0 for played in by_policy.values() for play in played), default=0.0)
    return {reward: names for reward, names in found.items() if reward == 0 or (len(names) >= FEW and reward < highest)}
