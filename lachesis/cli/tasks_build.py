"""`lachesis tasks build FOLDER`: write software tasks as folders in Harbor's format.

The real fixes come from source archives of PyPI, which are fetched once and checked by their SHA-256. With --mutations,
more tasks are made of the same trees; that runs their tests in sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends import SandboxSpec
from lachesis.cli.subcommands import add_backend, backend_of, check
from lachesis.environments.swe.building import SweTask, read_fixes, recipe, write_swe_task


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folders and print one line each; the exit code."""
    parser = argparse.ArgumentParser(prog="lachesis tasks build", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="gets one folder a task")
    names = ", ".join(entry["name"] for entry in recipe()["tasks"])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=f"repeatable; one of {names}")
    parser.add_argument(
        "--archives", action="append", default=[], type=Path, metavar="DIR", help="has archives already"
    )
    parser.add_argument("--mutations", type=int, default=0, metavar="N", help="tasks to make of each fix (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="decides which mutations are tried first")
    add_backend(parser, "where mutations are tested")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for task in read_fixes(arguments.only, arguments.archives):
        print(f"{write_swe_task(task, arguments.folder / task.name)}: {len(task.expected)} tests", flush=True)
        if arguments.mutations:
            asyncio.run(_mutate(task, arguments))
    return 0


async def _mutate(task: SweTask, arguments: Any) -> None:
    from lachesis.environments.swe.mutations import mutated
    from lachesis.environments.swe.trying import judging

    backend = backend_of(arguments)
    await check(backend)
    async with judging(arguments.folder / task.name, task, backend, SandboxSpec()) as judge:
        made = await mutated(task, judge, arguments.mutations, arguments.seed)
    for mutation in made:
        folder = write_swe_task(mutation, arguments.folder / mutation.name)
        print(f"{folder}: {mutation.origin['change']}, {len(mutation.fail_to_pass)} tests fail", flush=True)
