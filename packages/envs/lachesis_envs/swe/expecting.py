"""The tests that a solution must pass, found by running the suite with and without the fix, in the same way as the
judge.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from backends import Backend, SandboxSpec
from lachesis.loop.judgement import Judgement
from lachesis_envs.harbor.places import opened, places_of
from lachesis_envs.judging.pytest_judge import other_changes
from lachesis_envs.swe import building
from lachesis_envs.swe.building import SweTask, write_swe_task
from lachesis_envs.swe.mutations import Judge
from lachesis_envs.swe.recipes import BuildError
from lachesis_envs.swe.trying import judging
from lachesis_envs.task_folders import read_task
from lachesis_tools import ToolSessions

_COLLECTING = 300.0
_WAYS = 3
"""How often tests are changed anew: an unsound change often has an effect only for some values."""


@dataclass(frozen=True)
class Expected:
    """The result."""

    passing: list[str]
    """Tests that pass with the solution, and whose changed form fails, so that the judge can tell."""
    failing_before: list[str]
    """Those of them that fail without the solution."""
    left_out: dict[str, str]
    """The others, each with what it did."""


async def expected_of(
    task: SweTask, folder: Path, backend: Backend, spec: SandboxSpec, *, images: bool = True
) -> Expected:
    """Run all tests of `task`, which is written to `folder`.

    Raises:
        BuildError: no test can be collected, or none fails without the solution.
        BackendError: a sandbox failed.
    """
    ids = await _collected(task, folder, backend, spec, images)
    task = replace(task, expected=ids)
    async with judging(write_swe_task(task, folder), task, backend, spec, images=images) as judge:
        after, *again = [await _otherwise(judge, changes) for changes in range(_WAYS)]
        before = await judge({path: task.tree.get(path, b"") for path in task.solution})
    passing = [id for id in ids if all(each.tests[id].passed for each in (after, *again))]
    failing = [id for id in passing if not before.tests[id].passed]
    left_out = {
        id: f"{test.outcome}, changed {test.changed}"
        for each in (after, *again)
        for id, test in each.tests.items()
        if not test.passed
    }
    if not failing:
        shown = "".join(f"\n  {id}: {what}" for id, what in list(left_out.items())[:5])
        raise BuildError(
            f"{task.name}: no test fails without the solution and passes with it, so none can decide.{shown}\n"
            "Next step: write one into `checks`, or correct `tests` and `fix`"
        )
    return Expected(passing, failing, left_out)


async def _otherwise(judge: Judge, changes: int) -> Judgement:
    """The solution's, with tests changed in another way for each number."""
    before = other_changes.set(bytes([changes]))
    try:
        return await judge({})
    finally:
        other_changes.reset(before)


async def _collected(task: SweTask, folder: Path, backend: Backend, spec: SandboxSpec, images: bool) -> list[str]:
    """The ids of the tests, with the solution in place."""
    read = read_task(write_swe_task(replace(task, expected=["none"]), folder))
    places = await places_of(read, backend, spec, images=images, grading="auto")
    arguments = shlex.join([*building.ARGUMENTS, task.test_folder])
    async with ToolSessions(backend, places.agent) as sessions, opened(sessions, f"{task.name}-collect") as ctx:
        for path, data in {**task.tree, **task.solution, **task.tests}.items():
            await ctx.write_file(path, data)
        done = await ctx.terminal(f"{building.PYTHON} -m pytest --collect-only -q {arguments}", timeout=_COLLECTING)
    output = str(done["output"])
    if ids := [line for line in output.splitlines() if ".py::" in line and not line.startswith(("ERROR ", " "))]:
        return list(dict.fromkeys(ids))
    raise BuildError(
        f"{task.name}: pytest finds no test in {task.test_folder}: {output.strip()[-500:]}. Next step: correct `tests` "
        "or add the modules that they import to `python`"
    )
