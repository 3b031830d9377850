"""From an environment to its `serve` run: what is checked before it begins, and how a group becomes training data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis.agent.rollout import Rollout
from lachesis.inference import RequestRejected, TokenServer, Unauthorized
from lachesis.inference.sampling import read_sampling
from lachesis.runs.model_servers import Phase1CannotTrain, ServerConfigError, describe, token_engine
from lachesis.runs.process import MAX_TRACEBACKS, RunStopped
from lachesis.runs.serve import ServeRun
from lachesis.training.groups import GroupSettings, RolloutSamples, SplitRollouts, build_group
from lachesis.training.rollout_api import EnvDescription, RolloutApi, TrainerInfo
from lachesis.training.serve_settings import Sendable, ServeSettings, Verdict, verdict_of
from lachesis.training.spool import Spool
from lachesis.trajectories import sampling_problem

if TYPE_CHECKING:
    from rich.console import Console

    from lachesis.base_env import HermesAgentBaseEnv
    from lachesis.runs.settings import HermesAgentEnvConfig


ANY_TRAINER = TrainerInfo(batch_size=-1, max_token_len=-1)
"""One that takes sequences of any length."""


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """The rollouts of one item, those included that had to be played again."""

    item: Any
    item_key: str
    tools: Sequence[Mapping[str, Any]]
    rollouts: Sequence[Rollout]

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.reward is not None]


class BrokenGroups:
    """Shows exceptions in the environment's own code, and ends the run when no group gets a score any more.

    Args:
        most: groups in a row without a scored rollout after which the run stops. What the infrastructure broke is
            played again and never comes here.
    """

    def __init__(self, console: Console, most: int) -> None:
        self._console = console
        self._most = most
        self._shown: set[str] = set()
        self._in_a_row = 0

    def look_at(self, group: PlayedGroup) -> None:
        """Raises `RunStopped` after too many groups that taught nothing but a mistake."""
        traces = [rollout.traceback for rollout in group.rollouts if rollout.traceback is not None]
        for trace in traces:
            if trace not in self._shown and len(self._shown) < MAX_TRACEBACKS:
                self._shown.add(trace)
                told = f"exception in the environment, on {group.item_key}:"
                self._console.print(told, style="red", markup=False, highlight=False)
                self._console.print(trace, markup=False, highlight=False, soft_wrap=True)
        self._in_a_row = 0 if group.scored else self._in_a_row + 1
        if self._in_a_row >= self._most:
            why = traces[-1].strip() if traces else _unscored_because(group.rollouts[-1])
            raise RunStopped(
                f"{self._in_a_row} groups in a row without a scored rollout; the last one: {why}\n"
                "correct that and start again; items that were played are not played again"
            )


def refuse_phase_1(env: HermesAgentBaseEnv) -> None:
    """Raises `Phase1CannotTrain` where a server reports no tokens: none are ever made up."""
    for config in env.server_configs:
        if token_engine(config, training=True) is None:
            raise Phase1CannotTrain(
                f"serve: model {config.model_name!r} is used over chat completions (Phase 1), which carry no token ids "
                "and logprobs, and nothing made up is ever sent to a trainer; set --openai.server_type vllm or sglang "
                "for a server that reports tokens (Phase 2) or --openai.model_name embedded for the model that comes "
                "along, or use `process` to write trajectories for supervised training"
            )


def refuse_off_policy(server: TokenServer, config: HermesAgentEnvConfig) -> None:
    """Raises `ServerConfigError` where the sampling settings give logprobs that are not the policy's."""
    for engine in server.servers:
        given = {
            "temperature": config.agent_temperature,
            "extra_body": {**engine.settings.extra_body, **(config.extra_body or {})},
        }
        record = read_sampling(given, default_max_tokens=config.max_token_length).record(engine.logprobs)
        if problem := sampling_problem(record):
            raise ServerConfigError(f"serve: {problem}")


def serve_run(env: HermesAgentBaseEnv, server: TokenServer) -> ServeRun[PlayedGroup]:
    """The run that `serve` plays. The environment is running."""
    config = env.config
    folder = Path(config.spool_path or Path("data") / env.run_name / "spool")
    settings = {
        "environment": env.run_name,
        "model": describe(env.server_configs),
        **config.about_content(evaluation=False),
        "template_report": server.prompts.template_report.to_record(),
    }

    async def play(item: Any, key: str) -> PlayedGroup:
        return await play_whole_group(env, item, key)

    def build(group: PlayedGroup, trainer: TrainerInfo) -> Verdict:
        return judge(group, config, trainer)

    evaluations = Path(config.data_dir_to_save_evals or Path("data") / env.run_name / "eval")
    broken = BrokenGroups(env.console, config.max_failed_groups)

    async def evaluate() -> None:
        config.data_dir_to_save_evals = str(unused(evaluations / f"step-{env.curr_step}"))
        await env.evaluate()

    async def on_group(group: PlayedGroup, verdict: Verdict) -> None:
        broken.look_at(group)
        await env.note_group(group.item, group.item_key, group.tools, group.rollouts)

    async def on_step(step: int) -> None:
        env.curr_step = step
        await env.wandb_log()

    return ServeRun(
        next_item=env.get_next_item,
        play=play,
        build=build,
        api=RolloutApi(config.rollout_server_url),
        env=EnvDescription(
            desired_name=config.wandb_name or env.run_name,
            max_token_length=config.max_token_length,
            group_size=config.group_size,
            weight=config.inference_weight,
            min_batch_allocation=config.min_batch_allocation,
        ),
        spool=Spool(folder, settings),
        refused=folder / "refused.jsonl",
        settings=ServeSettings(
            max_workers=env.max_num_workers,
            max_batches_offpolicy=config.max_batches_offpolicy,
            total_steps=config.total_steps,
            steps_per_eval=config.steps_per_eval,
            eval_handling=config.eval_handling.value,
            eval_limit_ratio=config.eval_limit_ratio,
            worker_timeout=longest_group(config),
            grace_period=config.grace_period,
        ),
        console=env.console,
        evaluate=evaluate,
        on_group=on_group,
        on_step=on_step,
    )


def unused(folder: Path) -> Path:
    """`folder`, or `folder-2` and so on: what lies there is of other weights, though of a step with the same number."""
    at, number = folder, 1
    while at.exists():
        number += 1
        at = folder.with_name(f"{folder.name}-{number}")
    return at


def longest_group(config: HermesAgentEnvConfig) -> float:
    """Seconds that a group may take if each of its rollouts ends itself in time, replays included; -1 for any."""
    if config.worker_timeout <= 0:
        return -1.0
    return float((config.worker_timeout + config.reward_timeout) * (1 + config.max_infra_retries))


async def play_whole_group(env: HermesAgentBaseEnv, item: Any, item_key: str) -> PlayedGroup:
    """`group_size` scored rollouts. One that ended without a score is played again, `max_infra_retries` times at most.

    Raises:
        RunStopped: the server refuses the key, or knows no such model or route.
    """
    config = env.config
    tools = env.tool_definitions()
    rollouts: list[Rollout] = []
    scored = 0
    for _ in range(1 + config.max_infra_retries):
        async with asyncio.TaskGroup() as group:
            first = len(rollouts)
            tasks = [
                group.create_task(env.play_rollout(item, item_key, first + index, tools))
                for index in range(config.group_size - scored)
            ]
        rollouts += [task.result() for task in tasks]
        for rollout in rollouts[first:]:
            if _is_a_setting(rollout.error):
                raise RunStopped(str(rollout.error)) from rollout.error
        scored = sum(rollout.reward is not None for rollout in rollouts)
        if scored == config.group_size:
            break
    return PlayedGroup(item, item_key, tools, rollouts)


def judge(group: PlayedGroup, config: HermesAgentEnvConfig, trainer: TrainerInfo) -> Verdict:
    """Whether a group goes out, and as what. CPU-bound: not for the event loop."""
    rollouts = [
        RolloutSamples(
            rollout.rollout_id,
            rollout.reward,
            rollout.samples,
            rollout.result.history.to_openai("reasoning") if config.include_messages and rollout.result else None,
        )
        for rollout in group.scored
    ]
    settings = GroupSettings(
        group_size=config.group_size,
        split_rollouts=SplitRollouts(config.split_rollouts),
        ensure_scores_are_not_same=config.ensure_scores_are_not_same,
        max_token_len=trainer.max_token_len,
    )
    left_out = [rollout for rollout in group.rollouts if rollout.reward is None]
    verdict = verdict_of(
        build_group(rollouts, settings),
        rewards=[rollout.reward for rollout in group.rollouts],
        record={
            "item_key": group.item_key,
            "rewards": [rollout.reward for rollout in group.rollouts],
            "left_out": [rollout.traceback or _unscored_because(rollout) for rollout in left_out],
        },
        # What the infrastructure broke may go well another time. An exception in the environment's own code would come
        # again, and so would the None of a reward, or a server's no.
        again=any(rollout.may_pass for rollout in left_out) and all(rollout.traceback is None for rollout in left_out),
    )
    lost = sum(rollout.lost_completion_tokens for rollout in group.rollouts) + sum(
        rollout.result.tokens.completion_tokens for rollout in left_out if rollout.result is not None
    )
    if isinstance(verdict, Sendable):
        return replace(verdict, undelivered=verdict.undelivered + lost)
    if left_out:
        why = _unscored_because(left_out[-1])
        verdict = replace(verdict, detail=f"{verdict.detail}; the last one that was left out: {why}")
    return replace(verdict, tokens=verdict.tokens + lost)


def _unscored_because(rollout: Rollout) -> str:
    """Why a rollout has no reward, in a line. How it ended says that only where it did not come to the reward."""
    if rollout.traceback is not None:
        return rollout.traceback.strip().rpartition("\n")[2]
    return "compute_reward returned None" if rollout.outcome.scored else rollout.reason


def _is_a_setting(error: Exception | None) -> bool:
    """Whether every request would fail like this: the key, the model's name or the kind of server is wrong."""
    return isinstance(error, Unauthorized) or (isinstance(error, RequestRejected) and error.status == 404)
