"""`HarborEnv`: tasks in Harbor's folder format, run by a model, by their solution, or by nobody."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from backends import BackendError, SandboxExhausted, SandboxPerLease, WarmSandboxes
from backends.errors import SettingsError
from backends.executor.trees import remove_tree
from backends.tasks import in_own_thread
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.cli.environment_classes import read_target
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult, ProgramRun
from lachesis.loop.rollout import Rollout
from lachesis.rewards.agent_fault import AgentFault
from lachesis.runs.run_folder import data_folder
from lachesis.settings.checked import reject_unknown
from lachesis.settings.chosen import is_chosen
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.harbor.grading import Grading
from lachesis_envs.harbor.places import Places, places_of
from lachesis_envs.harbor.trial import Trial, solve
from lachesis_envs.harbor.variables import problems_of
from lachesis_envs.task_folders import Task, TaskError, TaskProblem, find_tasks, read_task
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message

if TYPE_CHECKING:
    from backends import SandboxSpec
    from lachesis import Policy
    from lachesis.loop.loop import HermesAgentLoop
    from lachesis.loop.rollout_player import Agent, RolloutPlayer
    from lachesis.rewards.reward import Reward

log = logging.getLogger(__name__)

_SLACK = 120.0
"""Seconds for copies and sandboxes, in addition to the time limits of verifiers."""


class HarborEnvConfig(HermesAgentEnvConfig):
    """Settings of `HarborEnv`."""

    agent: Literal["model", "oracle", "nop"] = Field(
        default="model", description="Who acts: the model, solution/solve.sh, or nobody."
    )
    grading: Grading = Field(
        default="auto",
        description="Where the tests of a shared verifier run: seal (a fresh sandbox with the artifacts), in_place, or "
        "auto: seal where the task declares artifacts.",
    )
    task_images: bool = Field(
        default=True, description="Run in the image of each task; false: in terminal_image, or the backend's default."
    )
    task_limits: bool = Field(default=True, description="Give sandboxes the processors and the memory of each task.")
    unplayable: Literal["error", "skip"] = Field(
        default="error",
        description="What happens where a task cannot be read or honoured: skip warns and leaves it out.",
    )
    task_variables: list[str] = Field(
        default=[], description="Variables of this process that tasks may have where task.toml asks for ${NAME}."
    )
    keep_artifacts: bool = Field(
        default=True, description="Keep artifacts and logs of verifiers in artifacts/ROLLOUT_ID next to the records."
    )


class HarborEnv(HermesAgentBaseEnv):
    """Plays the task folders at `--env.dataset_name`: a task, a folder with tasks, or a glob."""

    name = "harbor"
    env_config_cls = HarborEnvConfig
    config: HarborEnvConfig
    toolsets = ("terminal", "file")
    max_turns = 100
    needs_sandboxes = True
    takes_follow_ups = False  # the user of a task gives the instruction of its next step

    @classmethod
    def at(cls, target: str) -> type[Self]:
        """The class for `harbor:FOLDER?setting=value&...`, where FOLDER is the default of `dataset_name`.

        Raises:
            SettingsError: the target names no tasks, or a setting that there is not.
        """
        scheme, folder, arguments = read_target(target)
        reject_unknown(f"{scheme}:FOLDER?", arguments, cls.env_config_cls.model_fields)
        try:
            find_tasks(folder)
        except TaskError as error:
            raise SettingsError(f"{scheme}: {error}") from error
        own = {"name": f"{scheme}-{Path(folder).resolve().name}", "dataset_name": folder, **arguments}
        return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__, **own})

    def task_folders(self) -> list[Path]:
        """The tasks that `dataset_name` names. Raises `TaskError` if there are none."""
        if not self.config.dataset_name:
            raise SettingsError(f"{self.run_name} has no tasks; set --env.dataset_name to a folder with task folders")
        return find_tasks(self.config.dataset_name)

    def find_tasks(self) -> list[Task]:
        """The tasks to run, in order. Raises `TaskError` for all that cannot run."""
        tasks, problems = list[Task](), list[TaskProblem]()
        for folder in self.task_folders():
            try:
                task = read_task(folder, variables=self.config.task_variables)
                if refused := problems_of(task, task.variables, solves=self.config.agent == "oracle"):
                    raise TaskError(refused)
                tasks.append(task)
            except TaskError as error:
                problems += error.problems
        if problems and (self.config.unplayable == "error" or not tasks):
            raise TaskError(problems)
        for problem in problems:
            log.warning("left out: %s", problem)
        return tasks

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        """See `HermesAgentBaseEnv.running`. Time limits are raised to what the tasks allow."""
        tasks = await in_own_thread(self.find_tasks)
        self.tasks = {str(task.folder): task for task in tasks}
        self._items = itertools.cycle(self._item(task) for task in tasks)
        self._places: dict[str, asyncio.Task[Places]] = {}
        config, steps = self.config, [task.steps for task in tasks]
        graded = max(sum(3 * step.verifier.timeout_sec + _SLACK for step in each) for each in steps)
        config.reward_timeout = max(config.reward_timeout, graded)
        if not is_chosen(config, "rollout_timeout") and config.rollout_timeout is not None:
            config.rollout_timeout = max(config.rollout_timeout, *(self._agent_time(task) or 0.0 for task in tasks))
        asking = [task for task in tasks if any(step.agent.network_mode != "no-network" for step in task.steps)]
        if asking and not config.terminal_network:
            log.warning(
                "%d of %d tasks ask for the network, Harbor's default, and are run without it; "
                "--env.terminal_network true allows it",
                *(len(asking), len(tasks)),
            )
        async with super().running(training=training):
            yield

    def _item(self, task: Task) -> dict[str, str]:
        return {"task": str(task.folder), "name": task.name, "digest": task.digest}

    async def get_next_item(self) -> Mapping[str, str]:
        return next(self._items)

    async def get_eval_items(self) -> Sequence[Mapping[str, str]]:
        found = [self._item(task) for task in self.tasks.values()]
        if len(found) > self.config.eval_items:
            log.warning("%d of %d tasks are evaluated: --env.eval_items", self.config.eval_items, len(found))
        return found[: self.config.eval_items]

    def format_prompt(self, item: Mapping[str, str]) -> str:
        return self.tasks[item["task"]].steps[0].instruction

    def reference_policy(self) -> Policy:
        """Answers without doing anything: what acts is the setting `agent`."""

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            return Message("assistant", "Done.")

        return policy

    async def places(self, task: Task) -> Places:
        """The sandboxes of a task, made ready once for all of its rollouts. Raises `Invalid`."""
        key = str(task.folder)
        known = self._places.get(key)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            config, sessions = self.config, self.player.sessions
            lessor = sessions.lessor
            assert isinstance(lessor, SandboxPerLease | WarmSandboxes)
            self._places[key] = known = asyncio.ensure_future(
                places_of(
                    task,
                    lessor.backend,
                    sessions.spec,
                    images=config.task_images,
                    limits=config.task_limits,
                    grading=config.grading,
                )
            )
        return await asyncio.shield(known)

    def sandbox_for(self, item: Mapping[str, str], spec: SandboxSpec) -> SandboxSpec:
        return self._places[item["task"]].result().agent

    async def play_rollout(
        self,
        item: Mapping[str, str],
        item_key: str,
        index: int,
        tools: Sequence[Mapping[str, Any]],
        *,
        evaluation: bool = False,
    ) -> Rollout:
        try:
            await self.places(self.tasks[item["task"]])
        except BackendError as error:
            broken, why = Outcome.INFRA_ERROR, str(error)
            result = _result((), broken, why)
            result.verifier = error.record if isinstance(error, Invalid) else None
            return Rollout(uuid.uuid4().hex, item_key, index, broken, why, None, result, error=error)
        rollout = await super().play_rollout(item, item_key, index, tools, evaluation=evaluation)
        await in_own_thread(self._file, rollout)
        return rollout

    def _file(self, rollout: Rollout) -> None:
        """Give the folder of the last attempt the rollout's name, and remove those of others."""
        for folder in (root / "artifacts" for root in self._data_folders()):
            for kept in sorted(folder.glob(f".{rollout.rollout_id[:8]}-*")):
                record = rollout.result.verifier if rollout.result is not None else None
                if kept.name.endswith(f"-{rollout.attempts}") and record is not None:
                    kept.rename(folder / rollout.rollout_id)
                    record["artifacts"] = f"artifacts/{rollout.rollout_id}"
                else:
                    remove_tree(str(kept), 60.0)

    def _data_folders(self) -> tuple[Path, Path]:
        """Of `process` and of `eval`."""
        config = self.config
        groups = Path(config.data_path_to_save_groups or data_folder(self.run_name) / "groups.jsonl")
        return groups.parent, Path(config.data_dir_to_save_evals or data_folder(self.run_name) / "eval")

    def player_for(self, item: Mapping[str, str]) -> RolloutPlayer:
        player = super().player_for(item)
        return replace(player, make_loop=partial(self._agent_for, player, self.tasks[item["task"]]))

    def _agent_for(self, player: RolloutPlayer, task: Task, *args: Any, task_id: str, **kwargs: Any) -> Agent:
        loop: Any = player.make_loop(*args, task_id=task_id, **kwargs)
        places = self._places[str(task.folder)].result()
        keep = None
        if self.config.keep_artifacts:
            root = self._data_folders()[loop.split == "eval"]
            keep = root / "artifacts" / ("." + "-".join(task_id.rsplit("-", 2)[-2:]))
        loop.max_turns *= len(task.steps)
        limit = self._agent_time(task)
        if limit is not None:
            most = loop.limits.max_seconds
            limit = limit if most is None else min(limit, most)
            loop.limits = replace(loop.limits, max_seconds=limit)
        return TaskAgent(
            kind=self.config.agent,
            trial=Trial(task, self.config.grading, places.verifiers, keep),
            loop=loop,
            context=player.scorer.context_class(
                player.sessions.get(task_id),
                self.tools,
                open_verifier=partial(player.sessions.open, f"{task_id}-verifier", spec=places.agent),
            ),
        )

    def _agent_time(self, task: Task) -> float | None:
        """Seconds that the agent has for all steps; None where the task leaves it open."""
        times = [step.agent.timeout_sec for step in task.steps]
        return None if None in times else sum(time for time in times if time is not None)

    async def compute_reward(self, item: Mapping[str, str], result: AgentResult, ctx: ToolContext) -> Reward:
        trial: Trial = result.verdict
        try:
            if not trial.over:
                await trial.finish(ctx, reached=result.outcome is Outcome.COMPLETED)
            verdict = trial.verdict()
        except Invalid as invalid:
            result.verifier = invalid.record
            raise
        result.verifier = verdict.record
        return verdict.reward

    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
        """The share of the rollouts with a grading that were caught cheating."""
        record = result.verifier or {}
        return {"tampered": float(record.get("cause") == "tampered")} if "grading" in record else {}


@dataclass(slots=True, kw_only=True)
class TaskAgent:
    """Plays all steps of a trial but the last grading, which is the reward's."""

    kind: Literal["model", "oracle", "nop"]
    trial: Trial
    loop: HermesAgentLoop
    """What acts where `kind` is model."""
    context: ToolContext

    async def run(self, messages: Sequence[Mapping[str, Any]]) -> AgentResult:
        """Raises only cancellation and errors of this program."""
        try:
            await self.trial.begin(self.context)
            result = await (self._play(messages) if self.kind == "model" else self._act(messages))
        except SandboxExhausted as error:
            result = _result(messages, Outcome.AGENT_FAULT, str(error))
        except BackendError as error:
            result = _result(messages, Outcome.INFRA_ERROR, str(error))
            result.error = error
        if isinstance(result.error, Invalid):
            result.verifier = result.error.record
        result.verdict = self.trial
        return result

    async def _play(self, messages: Sequence[Mapping[str, Any]]) -> AgentResult:
        self.loop.follow_up = self._next_instruction
        return await self.loop.run(messages)

    async def _next_instruction(self, history: MessageHistory | None = None) -> str | None:
        """The step is over: grade it, unless it is the last."""
        try:
            if self.trial.is_last or not await self.trial.finish(self.context):
                return None
            await self.trial.begin(self.context)
        except AgentFault as fault:
            raise SandboxExhausted(str(fault)) from fault
        return self.trial.step.instruction

    async def _act(self, messages: Sequence[Mapping[str, Any]]) -> AgentResult:
        """Play as oracle or nop."""
        program: ProgramRun | None = None
        while True:
            if self.kind == "oracle":
                limit = self.trial.step.agent.timeout_sec or self.loop.limits.max_seconds or 1e7
                done = await solve(self.trial, self.context, timeout=limit)
                late = str(done["error"] or "").startswith("the command took longer")
                code = None if late else done["exit_code"]
                program = ProgramRun("solution/solve.sh", code, str(done["output"])[-65536:], "", 0.0)
                if late:
                    return _result(messages, Outcome.TIMEOUT, f"solution/solve.sh: {done['error']}", program)
            if await self._next_instruction() is None:
                said = f"ended with exit code {program.exit_code}" if program is not None else "did nothing"
                return _result(messages, Outcome.COMPLETED, f"the {self.kind} {said}", program)


def _result(
    messages: Sequence[Mapping[str, Any]], outcome: Outcome, reason: str, program: ProgramRun | None = None
) -> AgentResult:
    """Of an agent that asked no model."""
    result = AgentResult(
        turns_used=0,
        finished_naturally=outcome is Outcome.COMPLETED,
        reasoning_per_turn=[],
        tool_errors=[],
        outcome=outcome,
        reason=reason,
        history=MessageHistory(messages),
    )
    result.program = program
    return result
