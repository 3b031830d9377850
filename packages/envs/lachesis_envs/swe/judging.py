"""The judge of tasks with `[metadata.lachesis.judge]`: hidden tests on the sources that the agent left."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.tasks import in_own_thread
from lachesis.loop.judgement import Judgement
from lachesis.rewards.reward import Reward, RewardError
from lachesis.tool_context.own_folder import own_folder
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor.artifacts import fetch
from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.harbor.verdicts import Verdict
from lachesis_envs.swe.building import diff, within
from lachesis_envs.task_folders import Step, Task

_SHOWN = 20
_LARGEST = 1 << 20
"""Bytes of a file whose difference is shown."""


class JudgeSettings(BaseModel):
    """`[metadata.lachesis.judge]` of task.toml. Paths of the agent's files begin at its working directory."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["pytest"]
    sources: list[str] = Field(min_length=1)
    """Files and folders that the agent may change; nothing else of what it left is taken."""
    not_sources: list[str] = []
    """Folders of tests that the agent sees: they are judged as they were, and `tests` are written over them."""
    tests: str
    """The folder, in that of the step's tests, whose files are written over the working directory."""
    expect: str | list[str]
    """The ids of the tests that must pass, or the file with one per line, next to `tests`."""
    fail_to_pass: list[str] = []
    """Those of them that fail before the agent begins, for the components of the reward."""
    python: str = "python3"
    args: list[str] = []
    timeout: float = Field(default=300, gt=0)
    """Seconds for a run of the tests."""
    rounds: int = Field(default=1, ge=1)


def judge_settings(task: Task, step: Step) -> JudgeSettings:
    """Raises `Invalid` for settings that cannot be used."""
    try:
        settings = JudgeSettings.model_validate(task.own_settings["judge"])
        if isinstance(settings.expect, str):
            settings.expect = (step.tests / settings.expect).read_text(encoding="utf-8").splitlines()
        if not (step.tests / settings.tests).is_dir():
            raise FileNotFoundError(f"{step.tests / settings.tests} is not a folder")
    except (ValidationError, OSError) as error:
        where = task.folder / "task.toml"
        raise Invalid("no_tests", f"{where}, [metadata.lachesis.judge]: {error}. Next step: correct it") from error
    return settings


async def judge(task: Task, step: Step, ctx: ToolContext, *, record: dict[str, Any], keep: Path | None) -> Verdict:
    """Judge the agent's work in the sandbox of `ctx`, which ends.

    The reward is 1.0 where every expected test passed and nothing is forged, else 0.0. Its components are the parts of
    `fail_to_pass` and of the other tests that passed, and whether something is forged.

    Args:
        record: gets what is known, also where this raises.
        keep: a folder that gets the sources below `artifacts/`; None keeps nothing.

    Raises:
        Invalid: the task cannot be judged.
        BackendError: a sandbox failed.
    """
    settings = await in_own_thread(judge_settings, task, step)
    await ctx.stop_processes()
    with _folder(keep) as folder:
        workspace = folder / PurePosixPath(str(await ctx.real_path("."))).relative_to("/")
        await _keep_sources(ctx, settings, workspace, record)
        record["diff"] = await in_own_thread(_changes, task, settings, workspace)
    try:
        found = await judged(task, step, settings, ctx)
    except RewardError as error:
        raise Invalid("no_tests", f"{task.folder}: {error}") from error
    return verdict_of(found, settings.fail_to_pass, record)


async def judged(task: Task, step: Step, settings: JudgeSettings, ctx: ToolContext) -> Judgement:
    """The suite's result for the sources in the sandbox of `ctx`, which ends. Raises as `ctx.judge_pytest`."""
    assert not isinstance(settings.expect, str)
    return await ctx.judge_pytest(
        settings.sources,
        await in_own_thread(_tests, task, step, settings),
        expect=settings.expect,
        python=settings.python,
        args=settings.args,
        timeout=settings.timeout,
        rounds=settings.rounds,
    )


def verdict_of(found: Judgement, fail_to_pass: Sequence[str], record: dict[str, Any]) -> Verdict:
    """The reward, and its record."""
    parts = {}
    for name, wanted in (("fail_to_pass", True), ("pass_to_pass", False)):
        passed = [test.passed for id, test in found.tests.items() if (id in fail_to_pass) is wanted]
        if passed:
            parts[name] = sum(passed) / len(passed)
    parts["forged"] = float(bool(found.forged))
    rewards = {"reward": float(found.passed)}
    notes = [f"{path} was not taken: {reason}" for path, reason in found.refused.items()]
    failed = {id: test for id, test in found.tests.items() if not test.passed}
    notes += [f"not passed: {id}: {test.outcome}, changed {test.changed}" for id, test in failed.items()][:_SHOWN]
    if len(failed) > _SHOWN:
        notes.append(f"{len(failed) - _SHOWN} more did not pass")
    if found.forged:
        record["cause"] = "tampered"
        notes.insert(0, found.forged[:2000])
    record |= {"stdout": found.output[-65536:], "rewards": {**rewards, **parts}, "notes": [*record["notes"], *notes]}
    record["tests"] = {id: asdict(test) for id, test in failed.items()}
    return Verdict(Reward(rewards["reward"], components=parts), {**rewards, **parts}, record)


def _tests(task: Task, step: Step, settings: JudgeSettings) -> dict[str, Path]:
    """The files of the suite: hidden ones, tests that the agent sees, and everything next to those within `sources`."""
    base, hidden = task.folder / "environment" / "repo", step.tests / settings.tests
    seen = [file for folder in settings.not_sources for file in sorted((base / folder).rglob("*"))]
    found = {file.relative_to(base).as_posix(): file for file in seen if file.is_file()}
    for path in [path for path in found if not path.endswith(".py") and not within(path, settings.sources)]:
        del found[path]  # the fresh tree has it
    return found | {file.relative_to(hidden).as_posix(): file for file in hidden.rglob("*") if file.is_file()}


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep / "artifacts"
        return
    with tempfile.TemporaryDirectory(prefix="sources-", dir=own_folder()) as name:
        yield Path(name)


async def _keep_sources(ctx: ToolContext, settings: JudgeSettings, workspace: Path, record: dict[str, Any]) -> None:
    """Copy the sources to their paths below `workspace`. What cannot be copied is noted."""
    for source in settings.sources:
        try:
            await fetch(ctx, source, workspace / source)
        except OSError as error:
            record["notes"].append(f"{source} was not kept: {error}")


def _changes(task: Task, settings: JudgeSettings, workspace: Path) -> str | None:
    """What the agent changed at the sources, as a diff; None where the task does not say what was there."""
    base = task.folder / "environment" / "repo"
    if not base.is_dir():
        return None
    before, after = (_texts(root, settings) for root in (base, workspace))
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return "".join(diff(path, before.get(path, b""), after.get(path, b"")) for path in changed)


def _texts(root: Path, settings: JudgeSettings) -> Mapping[str, bytes]:
    found = {}
    for source in settings.sources:
        for file in [root / source, *sorted((root / source).rglob("*"))]:
            path = file.relative_to(root).as_posix()
            left_out = within(path, settings.not_sources) or file.is_symlink()
            if file.is_file() and not left_out and "__pycache__" not in file.parts:
                found[path] = file.read_bytes() if file.stat().st_size <= _LARGEST else b"(too large to show)"
    return found
