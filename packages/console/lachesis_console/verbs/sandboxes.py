"""`lachesis sandboxes list|reap|attack`: list sandboxes, remove what killed runs left, attack a backend."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from backends import Backend, BackendError, SandboxInfo, backend_names, create_backend
from backends.errors import ExitCode, SettingsError
from lachesis.cli import command
from lachesis.cli.subcommands import options_of
from lachesis.cli.verb_parser import VerbParser


def parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="lachesis sandboxes", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="every sandbox of the backend")
    reaping = verbs.add_parser("reap", help="remove sandboxes whose run has ended")
    verbs.add_parser("attack", help="try to break out of the sandboxes of a backend; 1 if an attack succeeds")
    for verb in (listing, reaping):
        verb.add_argument(
            "--backend",
            action="append",
            help=f"ask this one: {', '.join(backend_names())}, or package.module:Class; default: all that work here",
        )
        verb.add_argument(
            "--options",
            default="{}",
            metavar="YAML",
            help="the backend's own options, as in terminal_options: '{host: worker-1}'",
        )
    reaping.add_argument("--run", metavar="RUN_ID", help="only sandboxes of this run")
    reaping.add_argument("--everyone", action="store_true", help="also sandboxes of runs that are alive")
    return parser


async def look(names: Sequence[str] | None, options: dict[str, Any], arguments: argparse.Namespace) -> int:
    """List or reap, backend by backend. 1 when a backend that was named, or that works here, fails."""
    console, code = Console(emoji=False), 0
    found: list[SandboxInfo] = []
    for name in names or sorted(backend_names()):
        is_expected = bool(names)
        try:
            backend: Backend = create_backend(name, **(options if names else {}))
            if not names and not (await backend.check()).ok:
                continue
            is_expected = True
            found += await (
                backend.sandboxes()
                if arguments.verb == "list"
                else backend.reap(run_id=arguments.run, everyone=arguments.everyone)
            )
        except (BackendError, ValueError) as error:
            if is_expected:
                print(f"error: {error}" if name in str(error) else f"error: {name}: {error}", file=sys.stderr)
                code = ExitCode.FAILED if isinstance(error, BackendError) else ExitCode.SETTINGS
    for info in found:
        console.print(_line(info), markup=False, highlight=False, soft_wrap=True)
    if code and not found:
        return code
    word = "sandbox" if len(found) == 1 else "sandboxes"
    done = "" if arguments.verb == "list" else " removed"
    print(f"{len(found)} {word}{done}", file=sys.stderr)
    return code


def _line(info: SandboxInfo) -> str:
    age = f"{time.time() - info.created:.0f} s old" if info.created else "age unknown"
    state = "orphan" if info.orphan else "in use"
    return "  ".join([info.backend, info.id, state, age, info.run_id or "-", info.task_id or "-", info.detail])


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a sandbox; the exit code."""
    given = sys.argv[2:] if argv is None else argv
    if given[:1] == ["attack"]:
        return command("sandboxes attack")(given[1:])
    arguments = parser().parse_args(given)
    options = options_of(arguments.options)
    if options and len(arguments.backend or []) != 1:
        raise SettingsError("--options needs exactly one --backend")
    return asyncio.run(look(arguments.backend, options, arguments))
