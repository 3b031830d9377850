"""Grade the artifacts of a finished run again, with the current verifiers.

No agent acts: the artifacts that the run kept are put into a fresh sandbox, where the tests run. A verifier that looks
at more than that cannot be asked again, and neither can one whose artifacts are missing: both are refused before the
first sandbox.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from backends import Backend
from backends.errors import LachesisError
from lachesis.rewards.reward import Reward
from lachesis_envs.harbor.artifacts import artifacts_of, put
from lachesis_envs.harbor.causes import CAUSES, Invalid
from lachesis_envs.harbor.environment import HarborEnvConfig
from lachesis_envs.harbor.grading import grade, grade_again, way_of
from lachesis_envs.harbor.places import Places, opened, places_of
from lachesis_envs.harbor.trial import Trial
from lachesis_envs.harbor.verdicts import Verdict, below_minimum
from lachesis_envs.task_folders import Step, Task, read_task
from lachesis_messages.images import with_data_once, with_image_data
from lachesis_messages.records.digests import copies_of
from lachesis_messages.records.groups import GroupRecord, RolloutRecord, stored_messages
from lachesis_tools import ToolSessions


class RegradeError(LachesisError):
    """A run cannot be graded again."""


@dataclass(frozen=True, slots=True)
class RegradableRollout:
    """A rollout of which the artifacts are there."""

    rollout_id: str
    task: Task
    folder: Path
    """What `grade` kept; where there are several steps, a folder for each."""
    before: Mapping[str, Any]
    """The rollout's `verifier`."""

    def folder_of(self, step: Step) -> Path:
        return self.folder / step.name


@dataclass(frozen=True, slots=True)
class Graded:
    """The result of today's verifier."""

    verdict: Verdict | None
    record: Mapping[str, Any]
    why: str = ""
    """Why there is no verdict."""


def kept_rollouts(groups: Iterable[GroupRecord], data: Path, config: HarborEnvConfig) -> list[RegradableRollout]:
    """The rollouts to grade: those that a verifier graded, or tried to.

    What no verifier saw stays as it is, and so does the 0 of an agent that tampered: its artifacts do not show that.

    Args:
        data: the folder of the groups file.

    Raises:
        RegradeError: artifacts are missing, or a verifier needs more than them.
        TaskError: a task folder cannot be read.
    """
    found, problems, tasks = list[RegradableRollout](), list[str](), dict[str, Task]()
    for group in groups:
        for rollout in group["rollouts"]:
            before = rollout.get("verifier") or {}
            cause = CAUSES.get(before.get("cause") or "")
            tampered = before.get("cause") == "tampered" and before["grading"] != "judge"
            if not before or tampered or (cause is not None and not cause.grade):
                continue
            folder = str(group["item"]["task"])
            if folder not in tasks:
                tasks[folder] = read_task(Path(folder), variables=config.task_variables)
            kept = RegradableRollout(
                rollout["rollout_id"], tasks[folder], data / (before.get("artifacts") or ""), before
            )
            if problem := _problem(kept, config):
                problems.append(f"rollout {kept.rollout_id} of {kept.task.name}: {problem}")
            found.append(kept)
    if problems:
        raise RegradeError(f"{len(problems)} of {len(found)} rollouts cannot be graded again; the first: {problems[0]}")
    if not found:
        raise RegradeError("no rollout was graded by the verifier of a task folder; nothing can be graded again")
    return found


def _problem(kept: RegradableRollout, config: HarborEnvConfig) -> str:
    if not kept.before.get("artifacts"):
        return "its artifacts were not kept (--env.keep_artifacts false)"
    steps = [step for step in kept.task.steps if kept.folder_of(step).is_dir()]
    if not steps:
        return f"its artifacts are missing: {kept.folder} does not exist. Next step: bring the folder back"
    notes = [note for each in (kept.before, *kept.before.get("steps", ())) for note in each.get("notes", ())]
    if lost := next((note for note in notes if " was not kept: " in note), ""):
        return f"{lost}. Next step: run it again"
    for step in steps:
        folder, way = kept.folder_of(step) / "artifacts", way_of(kept.task, step, config.grading)
        if way == "judge":
            if kept.before["grading"] != way or not folder.is_dir():
                return f"{folder} does not have the sources that today's judge takes. Next step: run it again"
            continue
        if way == "in_place" or (way == "seal" and not step.artifacts):
            return (
                "its tests look at the whole sandbox of the agent, of which only artifacts were kept. Next step: "
                'declare `artifacts` in task.toml, and [verifier] environment_mode = "separate"'
            )
        try:
            listed = {entry["source"] for entry in json.loads((folder / "manifest.json").read_bytes())}
        except FileNotFoundError:
            return f"{folder / 'manifest.json'} does not exist. Next step: bring it back"
        except (ValueError, KeyError, TypeError) as error:
            return f"{folder / 'manifest.json'} is not a list of artifacts ({error!r}). Next step: run it again"
        if missing := [artifact["source"] for artifact in artifacts_of(step) if artifact["source"] not in listed]:
            return f"today's task declares {', '.join(missing)}, which the run did not keep. Next step: run it again"
    return ""


async def regrade(
    rollouts: Sequence[RegradableRollout],
    backend: Backend,
    config: HarborEnvConfig,
    *,
    at_once: int,
    graded: Callable[[], None] = lambda: None,
) -> dict[str, Graded]:
    """Grade them, `at_once` at a time; by rollout id.

    Args:
        graded: called after each.

    Raises:
        BackendError: a sandbox or an image failed, which is not a verdict.
    """
    limit, places = asyncio.Semaphore(at_once), dict[Path, asyncio.Future[Places]]()

    async with ToolSessions(backend, config.sandbox_spec({"environment": "regrade"})) as sessions:

        async def one(kept: RegradableRollout) -> tuple[str, Graded]:
            task = kept.task
            async with limit:
                if task.folder not in places:
                    made = partial(places_of, images=config.task_images, limits=config.task_limits)
                    places[task.folder] = asyncio.ensure_future(
                        made(task, backend, sessions.spec, grading=config.grading)
                    )
                try:
                    verdict = await _verdict(kept, await asyncio.shield(places[task.folder]), sessions, config)
                    found = Graded(verdict, verdict.record)
                except Invalid as invalid:
                    if not invalid.cause.grade:
                        raise
                    found = Graded(None, invalid.record, str(invalid))
                except _NotPlayed as error:
                    found = Graded(None, {**kept.before, "rewards": {}, "cause": "not_reached"}, str(error))
            graded()
            return kept.rollout_id, found

        started = [asyncio.ensure_future(one(kept)) for kept in rollouts]
        try:
            return dict(await asyncio.gather(*started))
        finally:
            rest: list[asyncio.Future[Any]] = [*started, *places.values()]
            for each in rest:
                each.cancel()
            await asyncio.gather(*rest, return_exceptions=True)


class _NotPlayed(Exception):
    pass


async def _verdict(kept: RegradableRollout, places: Places, sessions: ToolSessions, config: HarborEnvConfig) -> Verdict:
    trial = Trial(kept.task, config.grading, places.verifiers)
    unreached = {at for at, step in enumerate(kept.before.get("steps", ())) if step.get("cause") == "not_reached"}
    for at, step in enumerate(kept.task.steps):
        if at in unreached:
            nothing = dict.fromkeys(trial.verdicts[-1].rewards, 0.0)
            trial.verdicts.append(Verdict(Reward(0.0), nothing, {"cause": "not_reached"}))
            continue
        if not kept.folder_of(step).is_dir():
            raise _NotPlayed(f"step {step.name!r} was not run: an earlier step had less than its min_reward then")
        trial.verdicts.append(await _graded(kept, step, places, sessions))
        if below_minimum(trial.verdicts[-1].rewards, step.min_reward):
            break
    return trial.verdict()


async def _graded(kept: RegradableRollout, step: Step, places: Places, sessions: ToolSessions) -> Verdict:
    name, folder = f"regrade-{kept.rollout_id}-{step.name}", kept.folder_of(step)
    spec = places.verifiers.get(step.name, places.agent)
    async with opened(sessions, name, spec) as ctx:
        if way_of(kept.task, step) != "judge":
            return await grade_again(kept.task, step, ctx, folder)
        from lachesis_envs.swe.judging import judge_settings

        workspace = folder / "artifacts" / PurePosixPath(str(await ctx.real_path("."))).relative_to("/")
        for source in judge_settings(kept.task, step).sources:
            await ctx.terminal(f"rm -rf -- {shlex.quote(source)}")
            await put(ctx, workspace / source, source)
        return await grade(kept.task, step, ctx)


def regraded_groups(groups: Iterable[GroupRecord], graded: Mapping[str, Graded]) -> Iterator[dict[str, Any]]:
    """The groups with today's rewards. What was before is in each rollout, under `regraded`."""
    for group in groups:
        rollouts = [_regraded(rollout, graded.get(rollout["rollout_id"])) for rollout in group["rollouts"]]
        messages = [stored_messages(group, rollout) for rollout in group["rollouts"]]
        scored = [at for at, rollout in enumerate(rollouts) if rollout["reward"] is not None]
        for at, rollout in enumerate(rollouts):
            rollout["place"] = scored.index(at) if at in scored else None
            if at in scored:
                rollout.pop("messages", None)
            else:
                rollout["messages"] = messages[at]
        ids = {rollouts[at]["rollout_id"] for at in scored}
        regraded = {
            **group,
            "scores": [rollouts[at]["reward"] for at in scored],
            "messages": [messages[at] for at in scored],
            "samples": with_data_once(each for each in with_image_data(group["samples"]) if each["rollout_id"] in ids),
            "rollouts": rollouts,
        }
        yield copies_of(group)(regraded)


def _regraded(rollout: RolloutRecord, graded: Graded | None) -> dict[str, Any]:
    if graded is None:
        return dict(rollout)
    before = {key: rollout.get(key) for key in ("reward", "outcome", "reason", "turn_rewards", "verifier")}
    record = {**graded.record, "artifacts": rollout["verifier"]["artifacts"], "diff": rollout["verifier"]["diff"]}
    kept = {name: value for name, value in rollout["metrics"].items() if not name.startswith("reward/")}
    changed: dict[str, Any] = {"verifier": record, "regraded": before, "turn_rewards": None, "metrics": kept}
    if graded.verdict is None:
        changed |= {"reward": None, "outcome": "infra_error", "unscored_kind": "infra_error", "reason": graded.why}
    else:
        reward = graded.verdict.reward
        changed["reward"] = reward.value
        changed["metrics"] = kept | {f"reward/{name}": value for name, value in reward.components.items()}
        if rollout["reward"] is None:  # how its agent ended is not in its record
            changed |= {"outcome": "completed", "unscored_kind": "", "reason": "graded anew"}
    unweighted = {name: value for name, value in rollout.items() if name != "reward_weights"}
    return {**unweighted, **changed, "completed": changed.get("outcome", rollout["outcome"]) == "completed"}
