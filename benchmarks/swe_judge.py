"""The judge of software tasks: what it says about solution, nothing and cheats, and what it costs over bare pytest.

    python benchmarks/swe_judge.py TASKS [--cheats] [--times 3] [--backend local] [--options '{...}']

TASKS is what `lachesis tasks build` wrote. A row is a task: the rewards of the solution and of nothing, how many cheats
of `lachesis_testing.cheats` are worth something, and the least seconds of the suite by itself, in a sandbox that is
open, and of the whole grading. Exits with 1 where the solution is not 1, or anything else is not 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends import Backend, SandboxSpec, create_backend
from lachesis.tool_context.pace import MachineOverloaded
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor.grading import grade
from lachesis_envs.harbor.places import opened, places_of
from lachesis_envs.swe.judging import judge_settings
from lachesis_envs.task_folders import Task, find_tasks, read_task
from lachesis_testing.cheats import CHEATS
from lachesis_tools import ToolSessions

_numbers = itertools.count()
_ATTEMPTS = 9
"""Where the machine is overloaded, before the last."""


async def timed(work: Awaitable[Any]) -> tuple[Any, float]:
    """The result, and seconds."""
    began = time.monotonic()
    return await work, time.monotonic() - began


async def measure(task: Task, backend: Backend, spec: SandboxSpec, options: argparse.Namespace) -> bool:
    step = task.steps[0]
    settings = judge_settings(task, step)
    solution = {file.relative_to(base).as_posix(): file.read_text() for base, file in files(task, "solution/files")}
    module = next(iter(solution))
    text = (task.folder / "environment/repo" / module).read_text()
    places = await places_of(task, backend, spec, images=not options.image, grading="auto")
    async with ToolSessions(backend, places.agent) as sessions:

        async def play(left: dict[str, str], act: Callable[[ToolContext], Awaitable[Any]]) -> tuple[Any, float]:
            for _ in range(_ATTEMPTS):
                with contextlib.suppress(MachineOverloaded):
                    return await play_once(left, act)
            return await play_once(left, act)

        async def play_once(left: dict[str, str], act: Callable[[ToolContext], Awaitable[Any]]) -> tuple[Any, float]:
            async with opened(sessions, f"swe-{next(_numbers)}") as ctx:
                for path, content in left.items():
                    await ctx.write_file(path, content)
                return await timed(act(ctx))

        tests = sorted({id.partition("::")[0] for id in settings.expect})
        hidden = {file.relative_to(base).as_posix(): file.read_text() for base, file in files(task, "tests/files")}
        command = f"{settings.python} -m pytest -q {' '.join(settings.args)} {' '.join(tests)}"
        bare = [await play({**solution, **hidden}, lambda ctx: ctx.terminal(command)) for _ in range(options.times)]
        graded = [await play(solution, partial(grade, task, step)) for _ in range(options.times)]
        nothing = await play({}, partial(grade, task, step))
        forged = []
        for cheat in CHEATS if options.cheats else ():
            if cheat.is_general:
                found = await play(cheat.left_in(module, text), partial(grade, task, step))
                if found[0].reward.value:
                    forged.append(cheat.name)
    rewards = [found[0].reward.value for found in graded], nothing[0].reward.value
    least = [min(seconds for _, seconds in runs) for runs in (bare, graded)]
    numbers = f"{least[0]:.2f} | {least[1]:.2f} | {least[1] - least[0]:+.2f}"
    worth = f"{len(forged)} {', '.join(forged)}" if options.cheats else "-"
    print(f"| {task.name} | {min(rewards[0]):g} | {rewards[1]:g} | {worth} | {numbers} |", flush=True)
    return min(rewards[0]) == 1.0 and rewards[1] == 0.0 and not forged


def files(task: Task, below: str) -> list[tuple[Path, Path]]:
    base = task.folder / below
    return [(base, file) for file in sorted(base.rglob("*.py"))]


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks")
    parser.add_argument("--cheats", action="store_true")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--disk_bytes", type=int, help="0: no limit, for engines whose storage has none")
    parser.add_argument("--image", help="an image that has the tree, in place of the task's")
    options = parser.parse_args()
    backend = create_backend(options.backend, **options.options)
    spec = SandboxSpec(image=options.image, disk_bytes=options.disk_bytes)
    print("| task | solution | nothing | forged by | pytest s | grading s | more |")
    print("| --- |" + " --- |" * 6)
    sound = True
    for folder in find_tasks(options.tasks):
        sound &= await measure(read_task(folder), backend, spec, options)
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
