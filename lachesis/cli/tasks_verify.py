"""`lachesis tasks verify PATH...`: whether tasks grade soundly.

Plays each task with its solution (which has to be worth 1), with an agent that does nothing (0), and with attacks that
have not solved it (0), several times each. Exit code 0: every task is sound. 1: one is not. 2: the command line, or a
task, is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from backends import BackendError, SandboxSpec
from lachesis.cli.subcommands import add_backend, backend_of, check
from lachesis.task_folders import Task, find_tasks, read_task

if TYPE_CHECKING:
    from lachesis.environments.harbor.verifying import Verification


def main(argv: Sequence[str] | None = None) -> int:
    """Verify the tasks and print what was found; the exit code."""
    parser = argparse.ArgumentParser(prog="lachesis tasks verify", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a task, a folder with tasks, or a glob")
    parser.add_argument("--times", type=int, default=5, metavar="N", help="trials of each agent (default: 5)")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, metavar="N", help="trials at once")
    parser.add_argument("--only", action="append", metavar="NAME", help="attacks whose names contain this; repeatable")
    parser.add_argument("--grading", choices=("auto", "seal", "in_place"), default="auto", help="see docs/harbor.md")
    add_backend(parser, "where sandboxes are made")
    parser.add_argument("--image", help="play in this image of the backend, and not in those of the tasks")
    parser.add_argument("--workdir", help="folder inside in which commands start, with --image")
    parser.add_argument("--no-images", action="store_true", help="play with what the backend has without an image")
    parser.add_argument("--network", action="store_true", help="let tasks that ask for it have the network")
    parser.add_argument("--variable", action="append", default=[], metavar="NAME", help="tasks may have it; repeatable")
    parser.add_argument("--json", action="store_true", help="one JSON object a task instead of a table")
    arguments = parser.parse_args(argv)
    folders = [folder for path in arguments.paths for folder in find_tasks(path)]
    tasks = [read_task(folder, variables=arguments.variable) for folder in folders]
    return asyncio.run(_verify(tasks, arguments))


async def _verify(tasks: list[Task], arguments: argparse.Namespace) -> int:
    from lachesis.environments.harbor.verifying import verify_task
    from lachesis.testing.task_attacks import ATTACKS
    from lachesis.tools import ToolSessions

    attacks = [one for one in ATTACKS if not arguments.only or any(part in one.name for part in arguments.only)]
    backend = backend_of(arguments)
    await check(backend)
    spec = SandboxSpec(image=arguments.image, workdir=arguments.workdir, network=arguments.network)
    at_once = asyncio.Semaphore(max(1, arguments.at_once))
    console, sound = Console(), True
    console.width = max(console.width, 120)  # a table without its last columns says nothing
    done, total = 0, len(tasks) * arguments.times * (2 + len(attacks))

    def played(_: object) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done}/{total} trials", end="" if done < total else "\n", file=sys.stderr, flush=True)

    async with ToolSessions(backend, spec) as sessions:

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
                    played=played,
                )
            except BackendError as error:
                return error

        began = time.monotonic()
        found = await asyncio.gather(*map(one, tasks))
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
        console.print(table, highlight=False)
        for task, verified in zip(tasks, found, strict=True):
            for problem in [str(verified)] if isinstance(verified, BackendError) else verified.problems:
                console.print(f"{task.folder}: {problem}", markup=False, highlight=False, soft_wrap=True)
        print(f"{total} trials in {time.monotonic() - began:.1f} s")
    return 0 if sound else 1


def _cells(verified: Verification, attacks: int) -> list[str]:
    worth = []
    for agent in ("oracle", "nop"):
        rewards = sorted({f"{reward:g}" for reward in verified.rewards(agent) if reward is not None}, key=float)
        worth.append("-".join(dict.fromkeys([*rewards[:1], *rewards[-1:]])) or "invalid")
    invalid = sum(play.reward is None for play in verified.plays)
    seconds = sum(play.seconds for play in verified.plays) / max(1, len(verified.plays))
    return [verified.way, *worth, f"{len(verified.forged)}/{attacks}", str(invalid), f"{seconds:.2f}"]
