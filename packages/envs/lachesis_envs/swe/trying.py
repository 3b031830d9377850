"""Judges files that no agent wrote."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from backends import Backend, SandboxSpec
from lachesis.loop.judgement import Judgement
from lachesis_envs.harbor.places import opened, places_of
from lachesis_envs.swe.building import Files, SweTask
from lachesis_envs.swe.judging import judge_settings, judged
from lachesis_envs.swe.mutations import Judge
from lachesis_envs.task_folders import read_task
from lachesis_tools import ToolSessions


@asynccontextmanager
async def judging(
    folder: Path, task: SweTask, backend: Backend, spec: SandboxSpec, *, images: bool = True
) -> AsyncIterator[Judge]:
    """A judge of `task` in its sandboxes.

    Args:
        folder: where `task` was written.
        images: False judges in the image of `spec`.
    """
    read, numbers = read_task(folder), itertools.count()
    step, settings = read.steps[0], judge_settings(read, read.steps[0])
    places = await places_of(read, backend, spec, images=images, grading="auto")
    async with ToolSessions(backend, places.agent) as sessions:

        async def judge(changed: Files) -> Judgement:
            async with opened(sessions, f"{task.name}-{next(numbers)}") as ctx:
                for path, data in {**task.solution, **changed}.items():
                    await ctx.write_file(path, data)
                return await judged(read, step, settings, ctx)

        yield judge
