"""From an environment to its `serve` run: what is checked before it begins, and how a group becomes training data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.process import RunStopped
from environments.rollout import Rollout
from environments.rollout_api import EnvDescription, RolloutApi, TrainerInfo
from environments.serve import ServeRun
from environments.serve_settings import ServeSettings, Verdict, verdict_of
from environments.servers import Phase1CannotTrain, ServerConfigError, describe, token_engine
from environments.spool import Spool
from environments.training_groups import GroupSettings, RolloutSamples, SplitRollouts, build_group
from inference import TokenServer, Unauthorized
from inference.sampling import read_sampling
from trajectories import sampling_problem

if TYPE_CHECKING:
    from environments.config import HermesAgentEnvConfig
    from environments.hermes_base_env import HermesAgentBaseEnv


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
        "template_verdict": server.prompts.verdict.to_record(),
    }

    async def play(item: Any, key: str) -> PlayedGroup:
        return await play_whole_group(env, item, key)

    def build(group: PlayedGroup, trainer: TrainerInfo) -> Verdict:
        return judge(group, config, trainer)

    evaluations = Path(config.data_dir_to_save_evals or Path("data") / env.run_name / "eval")

    async def evaluate() -> None:
        config.data_dir_to_save_evals = str(evaluations / f"step-{env.curr_step}")
        await env.evaluate()

    async def on_group(group: PlayedGroup, verdict: Verdict) -> None:
        env.note_group(group.item, group.item_key, group.tools, group.rollouts)

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


def longest_group(config: HermesAgentEnvConfig) -> float:
    """Seconds that a group may take if each of its rollouts ends itself in time, replays included; -1 for any."""
    if config.worker_timeout <= 0:
        return -1.0
    return float((config.worker_timeout + config.reward_timeout) * (1 + config.max_infra_retries))


async def play_whole_group(env: HermesAgentBaseEnv, item: Any, item_key: str) -> PlayedGroup:
    """`group_size` scored rollouts. One that ended without a score is played again, `max_infra_retries` times at most.

    Raises:
        RunStopped: the server refuses the key.
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
            if isinstance(rollout.error, Unauthorized):
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
    return verdict_of(
        build_group(rollouts, settings),
        rewards=[rollout.reward for rollout in group.rollouts],
        record={
            "item_key": group.item_key,
            "rewards": [rollout.reward for rollout in group.rollouts],
            "left_out": [rollout.traceback or rollout.reason for rollout in left_out],
        },
        # An exception in the environment's own code would come again; what the infrastructure broke may not.
        again=bool(left_out) and all(rollout.traceback is None for rollout in left_out),
    )
