"""`lachesis api`: the rollout API between environments and a trainer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from backends.errors import ExitCode
from backends.tasks import stop_event
from lachesis.cli import port_number
from lachesis.cli.verb_parser import VerbParser
from lachesis.runs.own_process import run
from lachesis_tokens.wire.visitors import is_loopback
from lachesis_train.api import ApiSettings, RolloutApiServer
from lachesis_train.rollout_api import TOKEN_VARIABLE

N = TypeVar("N", int, float)

_DEFAULTS = ApiSettings(Path("data/api.db"))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit code."""
    given = _parser().parse_args(argv)
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token and not given.insecure and not is_loopback(given.host):
        print(
            f"lachesis api: on {given.host} everybody who reaches port {given.port} could post groups and reset the "
            f"queue; set {TOKEN_VARIABLE}, here and for environments and the trainer",
            file=sys.stderr,
        )
        return ExitCode.SETTINGS
    settings = ApiSettings(
        db=given.db,
        host=given.host,
        port=given.port,
        token=token,
        insecure=given.insecure,
        lease=given.lease,
        most_stored=given.max_stored_mb << 20,
        most_body=given.max_body_mb << 20,
        most_in_memory=max(given.max_memory_mb, given.max_body_mb) << 20,
        pack_wait=given.pack_wait,
        environments=given.environments,
    )
    return run(_serve(settings))


async def _serve(settings: ApiSettings) -> int:
    stopped = stop_event()
    async with RolloutApiServer(settings, report=_report) as server:
        state = server.state
        held = f"groups waiting: {len(state.waiting)}, batches not acknowledged: {len(state.batches)}"
        _report(f"{server.url} (a page for browsers, /metrics); {settings.db}: {held}")
        await stopped.wait()
    return 0


def _report(line: str) -> None:
    print(f"lachesis api: {line}", flush=True)


def _positive(kind: Callable[[str], N]) -> Callable[[str], N]:
    def number(text: str) -> N:
        if not 0 < (value := kind(text)) < 1e9:
            raise argparse.ArgumentTypeError(f"{text} is not above 0 and below a billion")
        return value

    number.__name__ = "number"  # in argparse's message about anything else
    return number


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(
        prog="lachesis api",
        description=__doc__,
        epilog=f"{TOKEN_VARIABLE}: a bearer token that every request must have.",
    )
    add = parser.add_argument
    add("--db", type=Path, default=_DEFAULTS.db, help="keeps groups and batches (default: %(default)s)")
    add("--host", default=_DEFAULTS.host, help="(default: %(default)s)")
    add("--port", type=port_number, default=_DEFAULTS.port, help="0 takes a free one (default: %(default)s)")
    add(
        "--lease",
        type=_positive(float),
        default=_DEFAULTS.lease,
        metavar="S",
        help="after this long without a sign of the trainer, its batch may go to another one (default: %(default)g)",
    )
    add(
        "--max-stored-mb",
        type=_positive(int),
        default=_DEFAULTS.most_stored >> 20,
        metavar="MB",
        help="groups that no trainer has acknowledged; beyond it the answer is 429 (default: %(default)s)",
    )
    add(
        "--max-body-mb",
        type=_positive(int),
        default=_DEFAULTS.most_body >> 20,
        metavar="MB",
        help="one request, unpacked (default: %(default)s)",
    )
    add(
        "--max-memory-mb",
        type=_positive(int),
        default=_DEFAULTS.most_in_memory >> 20,
        metavar="MB",
        help="bodies that are received at the same time (default: %(default)s)",
    )
    add(
        "--environments",
        type=_positive(int),
        default=_DEFAULTS.environments,
        metavar="N",
        help=f"form no batch before so many have registered, for {_DEFAULTS.silent_env:g} s at most",
    )
    add(
        "--pack-wait",
        type=_positive(float),
        default=_DEFAULTS.pack_wait,
        metavar="S",
        help="wait for a group that completes a batch exactly, before a smaller batch is formed (default: %(default)g)",
    )
    add(
        "--insecure",
        action="store_true",
        help="answer other users, and other machines that --host lets in, without a token",
    )
    return parser
