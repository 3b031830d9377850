"""`lachesis tasks build FOLDER`: write software tasks as folders in Harbor's format.

The real fixes come from source archives of PyPI, which are fetched once and checked by their SHA-256. With --mutations,
more tasks are made of the same trees; that runs their tests in sandboxes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends import SandboxSpec
from backends.errors import SettingsError
from lachesis.cli.subcommands import add_backend, backend_of, check
from lachesis.cli.verb_parser import VerbParser
from lachesis_envs.swe.building import WORKSPACE, SweTask, read_fixes, recipe, write_swe_task
from lachesis_envs.swe.recipes import write_expected


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folders and print one line each; the exit code."""
    parser = VerbParser(prog="lachesis tasks build", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="gets one folder a task")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="a recipe of your own, instead of the built-in one")
    parser.add_argument(
        "--write-expected",
        action="store_true",
        help="first find the tests that must pass, in sandboxes, and write their ids next to --recipe",
    )
    names = ", ".join(entry["name"] for entry in recipe()["tasks"])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=f"repeatable; built-in: {names}")
    parser.add_argument(
        "--archives", action="append", default=[], type=Path, metavar="DIR", help="has archives already"
    )
    parser.add_argument("--mutations", type=int, default=0, metavar="N", help="tasks to make of each fix (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="decides which mutations are tried first")
    add_backend(parser, "where tests run for --write-expected and --mutations")
    parser.add_argument(
        "--image", help="run them in this image of the backend, which has the tree, instead of the tasks' images"
    )
    parser.add_argument("--workdir", default=WORKSPACE, help="folder inside in which they run, with --image")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.write_expected:
        if arguments.recipe is None:
            raise SettingsError("--write-expected needs --recipe: the built-in recipe has its lists already")
        asyncio.run(_find_expected(arguments))
    for task in read_fixes(arguments.only, arguments.archives, arguments.recipe):
        print(f"{write_swe_task(task, arguments.folder / task.name)}: {len(task.expected)} tests", flush=True)
        if arguments.mutations:
            asyncio.run(_mutate(task, arguments))
    return 0


async def _find_expected(arguments: Any) -> None:
    from lachesis_envs.swe.expecting import expected_of

    backend = backend_of(arguments)
    await check(backend)
    for task in read_fixes(arguments.only, arguments.archives, arguments.recipe, judged=False):
        folder = arguments.folder / task.name
        found = await expected_of(task, folder, backend, _spec(arguments), images=not arguments.image)
        file = write_expected(arguments.recipe, task.name, found.passing, found.failing_before)
        print(
            f"{file}: {len(found.passing)} tests pass with the solution, {len(found.failing_before)} of them fail "
            f"without it; {len(found.left_out)} left out"
        )
        for id, what in found.left_out.items():
            print(f"  left out: {id}: {what}")


def _spec(arguments: Any) -> SandboxSpec:
    return SandboxSpec(image=arguments.image, workdir=arguments.workdir) if arguments.image else SandboxSpec()


async def _mutate(task: SweTask, arguments: Any) -> None:
    from lachesis_envs.swe.mutations import mutated
    from lachesis_envs.swe.trying import judging

    backend = backend_of(arguments)
    await check(backend)
    folder, images = arguments.folder / task.name, not arguments.image
    async with judging(folder, task, backend, _spec(arguments), images=images) as judge:
        made = await mutated(task, judge, arguments.mutations, arguments.seed)
    for mutation in made:
        folder = write_swe_task(mutation, arguments.folder / mutation.name)
        print(f"{folder}: {mutation.origin['change']}, {len(mutation.fail_to_pass)} tests fail", flush=True)
