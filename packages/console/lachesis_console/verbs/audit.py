"""`lachesis audit ENV`: what is wrong with an environment, found without a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backends.errors import SettingsError
from backends.text import counted, escaped
from lachesis.cli.verb_parser import VerbParser, count

_DESCRIPTION = """\
Play any environment with a reference policy if it has one, with policies that have no skill, and with cheats, in two
processes of its own, and name what is wrong with it. Exit code 0: nothing, 1: findings that are errors, 2: it could not
be audited. Other flags are settings: --env.NAME VALUE. docs/audit.md explains the findings.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the findings; the exit code."""
    parser = VerbParser(prog="lachesis audit", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("environment", metavar="ENV", help="env.py, SCHEME:NAME, or a name of `lachesis envs`")
    parser.add_argument("--items", type=count, default=8, metavar="N", help="items to play (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    parser.add_argument("--item-seconds", type=float, default=60.0, metavar="S", help="of a rollout (default: 60)")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="limit of the audit (default: 600)")
    parser.add_argument("--context", type=int, default=32768, metavar="N", help="tokens of a prompt (default: 32768)")
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
        beside.print(f"error: {given.environment} could not be audited: {found.not_audited}", markup=False)
        return found.exit_code
    table = Table("policy", "rollouts", "mean reward", "lowest", "highest", "no score", "s", box=None, pad_edge=False)
    without: list[str] = []
    for name in dict.fromkeys(play.policy for play in found.plays):
        played = [play for play in found.plays if play.policy == name]
        rewards = [play.reward for play in played if play.reward is not None]
        if name != "reference" and len(rewards) == len(played) and not any(rewards):
            without.append(name)
            continue
        figures = (sum(rewards) / len(rewards), min(rewards), max(rewards)) if rewards else ()
        shown = [f"{value:.3f}" for value in figures] or ["–"] * 3
        seconds = sum(play.seconds for play in played) / len(played)
        table.add_row(name, str(len(played)), *shown, str(len(played) - len(rewards)), f"{seconds:.2f}")
    console.print(table)
    if without:
        rollouts = counted(sum(play.policy in without for play in found.plays), "rollout")
        console.print(f"reward 0 in {rollouts} of {len(without)} other policies (--json has each)", style="dim")
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
