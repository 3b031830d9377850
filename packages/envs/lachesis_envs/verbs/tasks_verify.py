"""`lachesis tasks verify PATH...`: whether tasks grade soundly.

Plays each task with its solution (which must be worth 1), with an agent that does nothing (0), and with attacks that
have not solved it (0), several times each. Each trial is recorded when it ends: after a stop, the same command runs
the missing ones. Exit code 0: every task is sound. 1: one is not. 2: the command line, or a task, is wrong. 130:
stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from backends import BackendError, SandboxSpec
from backends.errors import ExitCode
from backends.tasks import run_all
from lachesis.cli.subcommands import add_backend, backend_of, check
from lachesis.cli.verb_parser import VerbParser
from lachesis.runs.own_process import run
from lachesis.runs.progress import Progress, Standing
from lachesis.runs.prose import print_table
from lachesis_envs.task_folders import Task, TaskError, find_tasks, read_task
from lachesis_messages.records.jsonl import JsonlWriter, read_lines

if TYPE_CHECKING:
    from lachesis_envs.harbor.verifying import Verification


def main(argv: Sequence[str] | None = None) -> int:
    """Verify the tasks and print the results; returns the exit code."""
    parser = VerbParser(prog="lachesis tasks verify", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a task, a folder with tasks, or a glob")
    parser.add_argument("--times", type=int, default=5, metavar="N", help="trials of each agent (default: 5)")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, metavar="N", help="trials at once")
    parser.add_argument("--only", action="append", metavar="NAME", help="attacks whose names contain this; repeatable")
    parser.add_argument("--grading", choices=("auto", "seal", "in_place"), default="auto", help="see docs/harbor.md")
    add_backend(parser, "where sandboxes are made")
    parser.add_argument("--image", help="run in this image of the backend instead of the tasks' images")
    parser.add_argument("--workdir", help="folder inside in which commands start, with --image")
    parser.add_argument("--no-images", action="store_true", help="run without an image, with the backend's default")
    parser.add_argument("--network", action="store_true", help="let tasks that ask for it have the network")
    parser.add_argument("--variable", action="append", default=[], metavar="NAME", help="tasks may have it; repeatable")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("data/tasks-verify"),
        metavar="FOLDER",
        help="folder of finished trials; in a folder without them all are run (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a task instead of a table")
    arguments = parser.parse_args(argv)
    folders = [folder for path in arguments.paths for folder in find_tasks(path)]
    try:
        tasks = [read_task(folder, variables=arguments.variable) for folder in folders]
    except TaskError as error:  # not 1: nothing was played that could be unsound
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.SETTINGS
    file = arguments.output / "trials.jsonl"
    try:
        return run(_verify(tasks, arguments, file))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"stopped; finished trials are in {file}, start again to continue", file=sys.stderr)
        return ExitCode.STOPPED


async def _verify(tasks: list[Task], arguments: argparse.Namespace, file: Path) -> int:
    from lachesis_envs.harbor.task_attacks import ATTACKS
    from lachesis_envs.harbor.verifying import verify_task
    from lachesis_tools import ToolSessions

    attacks = [one for one in ATTACKS if not arguments.only or any(part in one.name for part in arguments.only)]
    backend = backend_of(arguments)
    await check(backend)
    spec = SandboxSpec(image=arguments.image, workdir=arguments.workdir, network=arguments.network)
    at_once = asyncio.Semaphore(max(1, arguments.at_once))
    console, sound = Console(emoji=False), True
    console.width = max(console.width, 120)  # a table without its last columns says nothing
    total, done, now = len(tasks) * arguments.times * (2 + len(attacks)), 0, 0
    writer = JsonlWriter(file, fsync=True)
    earlier = {result["key"]: result for result in read_lines(file)}
    playing = asyncio.current_task()
    assert playing is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    progress = Progress(Console(emoji=False, stderr=True), "verify")

    def played(*, before: bool) -> None:
        nonlocal done, now
        done, now = done + 1, now + (not before)
        progress.show(Standing(done, total, "trials"), last=done == total)

    async def keep(result: dict[str, Any]) -> None:
        await asyncio.to_thread(writer.write, result)

    async with ToolSessions(backend, spec) as sessions:
        progress.show(Standing(0, total, "trials"))

        async def one(task: Task) -> Verification | BackendError:
            try:
                return await verify_task(
                    task,
                    backend,
                    sessions,
                    times=arguments.times,
                    attacks=attacks,
                    grading=arguments.grading,
                    images=not (arguments.image or arguments.no_images),
                    at_once=at_once,
                    earlier=earlier,
                    keep=keep,
                    played=played,
                )
            except BackendError as error:
                return error

        began = time.monotonic()
        with closing(writer), progress:
            found = await run_all(map(one, tasks))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("task", "graded", "oracle", "nop", "attacks", "invalid", "s/trial", ""):
        table.add_column(column, justify="left" if column in ("task", "graded", "") else "right", no_wrap=True)
    for task, verified in zip(tasks, found, strict=True):
        if isinstance(verified, BackendError):
            problems, cells = [str(verified)], ["–"] * 6
        else:
            problems, cells = verified.problems, _cells(verified, len(attacks))
        sound = sound and not problems
        if arguments.json:
            plays = [] if isinstance(verified, BackendError) else [dataclasses.asdict(play) for play in verified.plays]
            print(json.dumps({"task": str(task.folder), "ok": not problems, "problems": problems, "plays": plays}))
            continue
        table.add_row(task.name, *cells, "ok" if not problems else "UNSOUND", style="green" if not problems else "red")
    if not arguments.json:
        print_table(console, table)
        for task, verified in zip(tasks, found, strict=True):
            for problem in [str(verified)] if isinstance(verified, BackendError) else verified.problems:
                console.print(f"{task.folder}: {problem}", markup=False, highlight=False, soft_wrap=True)
        before = f", {done - now} of them before this start ({file})" if now < done else ""
        print(f"{total} trials{before}; {time.monotonic() - began:.1f} s")
    return 0 if sound else 1


def _cells(verified: Verification, attacks: int) -> list[str]:
    worth = []
    for agent in ("oracle", "nop"):
        rewards = sorted({f"{reward:g}" for reward in verified.rewards(agent) if reward is not None}, key=float)
        worth.append("-".join(dict.fromkeys([*rewards[:1], *rewards[-1:]])) or "invalid")
    invalid = sum(play.reward is None for play in verified.plays)
    seconds = sum(play.seconds for play in verified.plays) / max(1, len(verified.plays))
    return [verified.way, *worth, f"{len(verified.forged)}/{attacks}", str(invalid), f"{seconds:.2f}"]
