"""`lachesis sandboxes attack`: try to get out of sandboxes, to forge results, to outlive limits.

Exit code 0: every attack was repelled. 1: one succeeded, or could not be carried out. 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from backends import Backend, BackendError, SandboxSpec, backend_names, create_backend
from backends.errors import SettingsError
from lachesis.cli.subcommands import check, options_of
from lachesis.cli.verb_parser import VerbParser
from lachesis_testing.attacks import ATTACKS, Attack, AttackTarget, attacked

SHOWN = {"Held": ("held", "green"), "Fell": ("FELL", "red"), "NotApplicable": ("n/a", "yellow"), "": ("ERROR", "red")}


@dataclass(frozen=True, slots=True)
class AttackRow:
    attack: Attack
    verdict: str
    """`Held`, `Fell`, `NotApplicable`, or empty when the attack or the backend failed."""
    detail: str
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print each verdict as it comes; the exit code."""
    parser = VerbParser(prog="lachesis sandboxes attack", description=__doc__)
    names = ", ".join(backend_names())
    parser.add_argument(
        "--backend", action="append", required=True, help=f"attack this one: {names}, or package.module:Class"
    )
    parser.add_argument(
        "--options",
        default="{}",
        metavar="YAML",
        help="the backend's own options, as in terminal_options: '{host: worker-1}'",
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="attacks whose names contain this; repeatable")
    parser.add_argument(
        "--heavy", action="store_true", help="also those that put a load on the machine: gigabytes, 100,000 files"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--list", action="store_true", help="only show what would be tried")
    arguments = parser.parse_args(argv)
    if len(arguments.backend) != 1:
        raise SettingsError("attack takes exactly one --backend")
    return asyncio.run(_attack(arguments.backend[0], options_of(arguments.options), arguments))


async def _attack(name: str, options: dict[str, Any], arguments: argparse.Namespace) -> int:
    chosen = [
        one
        for one in ATTACKS
        if (arguments.heavy or not one.is_heavy)
        and (not arguments.only or any(part in one.name for part in arguments.only))
    ]
    if not chosen:
        raise BackendError(f"no attack has {' or '.join(arguments.only)} in its name; --list shows all names")
    if arguments.list:
        for one in chosen:
            print(f"{one.name:<36}{one.tries}")
        return 0
    backend = create_backend(name, **options)
    await check(backend)
    console, counts = Console(emoji=False), Counter[str]()
    target = AttackTarget(backend, await backend.create(SandboxSpec(labels={"run_id": "attack"})))
    try:
        for one in chosen:
            row = await _row(one, target, backend)
            counts[row.verdict] += 1
            _show(row, console, arguments.json)
    finally:
        await target.close()
        await target.sandbox.close()
    if not arguments.json:
        total = ", ".join(f"{counts[kind]} {shown}" for kind, (shown, _) in SHOWN.items() if counts[kind])
        console.print(f"\n{name}: {len(chosen)} attacks: {total}", highlight=False)
    return 1 if counts["Fell"] or counts[""] else 0


async def _row(one: Attack, target: AttackTarget, backend: Backend) -> AttackRow:
    begin = time.monotonic()
    try:
        verdict = await attacked(one, target)
        kind, detail = type(verdict).__name__, verdict.detail
    except Exception as error:
        kind, detail = "", f"{type(error).__name__}: {error}"
        try:
            await target.sandbox.exec("true", timeout=30)
        except BackendError:
            kind, detail = "Fell", f"the sandbox is lost: {error}"
            target.sandbox = await backend.create(SandboxSpec(labels={"run_id": "attack"}))
    return AttackRow(one, kind, detail, time.monotonic() - begin)


def _show(row: AttackRow, console: Console, as_json: bool) -> None:
    shown, style = SHOWN[row.verdict]
    if as_json:
        line = {"attack": row.attack.name, "tries": row.attack.tries, "verdict": shown.lower(), "detail": row.detail}
        print(json.dumps({**line, "seconds": round(row.seconds, 2)}), flush=True)
        return
    console.print(f"{shown:<7}", style=style, end="")
    detail = f": {row.detail}" if row.detail and row.verdict != "Held" else ""
    text = f"{row.attack.name:<36}{row.attack.tries}{detail}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
