"""`serve`: groups for a trainer at a rollout API."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lachesis.figures.exclusion import WINDOW, Exclusions
from lachesis.figures.item_keys import ItemKeys
from lachesis.figures.repaired_calls import RepairedCalls
from lachesis.figures.rollout_records import counted_record
from lachesis.figures.running_figures import RunningFigures
from lachesis.loop.rollout import PlayedGroup
from lachesis.runs.commands import (
    about_content,
    longest_group,
    note,
    own_evaluation,
    record_of,
    tracking,
)
from lachesis.runs.decisions import Decision, Kept
from lachesis.runs.environment import Environment
from lachesis.runs.failures import FailureBrake
from lachesis.runs.group_player import play_item, settled_group
from lachesis.runs.held_out import without_eval_items
from lachesis.runs.pipeline import NextItem, Pipeline
from lachesis.runs.run_folder import data_folder, unused
from lachesis.settings.hooks import hook_errors, of_hook
from lachesis.settings.server_settings import Phase1CannotTrain, ServerConfigError, token_engine
from lachesis_tokens.samples.decision import decide_for_training
from lachesis_tokens.server.serving import settings_problem
from lachesis_tokens.server.token_server import TokenServer
from lachesis_train.item_pools import ItemPools
from lachesis_train.outbox import Outbox
from lachesis_train.rollout_api import TOKEN_VARIABLE, EnvDescription, RolloutApi
from lachesis_train.rollout_api_sink import RolloutApiSink
from lachesis_train.serve_result import ServeResult


async def serve(env: Environment, *, hold_out: bool) -> ServeResult:
    """Play groups for a trainer at Atropos' rollout API, and send the tokens exactly as they were sampled.

    Args:
        hold_out: evaluation takes its items from `get_next_item`: draw them before training does, so that they are the
            same after a restart.

    Raises:
        Phase1CannotTrain: a server that reports no tokens.
        ServerConfigError: sampling settings whose logprobs would not be those of the policy, or a chat template that
            does not show the tools.
        RunStopped: the run cannot go on; finished groups are in the outbox.
    """
    _reject_phase_1(env)
    async with tracking(env, "serve"), env.running(training=True):
        _reject_off_policy(env)
        config = env.config
        next_item: NextItem = env.get_next_item
        if hold_out and config.steps_per_eval > 0:
            next_item = await without_eval_items(env)

        async def on_group(group: PlayedGroup, decision: Decision) -> None:
            if isinstance(decision, Kept):
                await env.after_group(group)
            note_calls(group)
            if (tracker := env.tracker) is not None and tracker.on:
                # Conversations of thousands of turns are copied: not on the loop.
                tracker.add(await asyncio.to_thread(record_of, env, group, with_samples=False))

        def note_calls(group: PlayedGroup) -> None:
            results = (rollout.result for rollout in group.rollouts)
            if alarm := repaired.add(result.repaired_calls for result in results if result is not None):
                sink.tell(f"alarm: {alarm}")

        exclusions, repaired = Exclusions(WINDOW), RepairedCalls()
        if env.tracker is not None:
            exclusions, repaired = env.tracker.exclusions, env.tracker.repaired
        figures = RunningFigures(window=1_000)  # the policy changes
        sink = _rollout_api_sink(env, figures, next_item)
        if (
            config.terminal_network
            and config.terminal_backend in ("local", "singularity")
            and not sink.relay.api.has_token
        ):
            note(
                env.console,
                "agents have the network of this machine, and the rollout API requires no token: they could reset its "
                f"data or send their own groups; set {TOKEN_VARIABLE}, for it, here and for the trainer",
            )
        play = partial(
            play_item, env, size=config.group_size, rounds=1 + config.max_infra_retries, finished=figures.add
        )

        async def play_drawn(item: Any, key: str) -> list[PlayedGroup]:
            groups, about = await play(item, key), {} if sink.pools is None else {"item_draw": sink.pools.about(key)}
            return [replace(group, group_overrides={**group.group_overrides, **about}) for group in groups]

        pipeline = Pipeline(
            title=config.wandb_name or env.run_name,
            next_item=next_item if sink.pools is None else sink.pools.next_item,
            keys=sink.pools or ItemKeys(),
            play=play_drawn,
            sink=sink,
            console=env.console,
            brake=FailureBrake(env.console, config.max_failed_groups, figures.causes),
            on_played=lambda group: exclusions.add_group(counted_record(group.item_key, group.rollouts)),
            on_group=on_group,
            ask_again=partial(settled_group, env, figures.add),
            timeout=longest_group(config),
            grace_period=config.grace_period,
        )
        await pipeline.run(signals=True)
        exclusion = await asyncio.to_thread(exclusions.result)
        return replace(sink.result(pipeline), exclusion=exclusion, repaired=repaired)


def _rollout_api_sink(env: Environment, figures: RunningFigures, next_item: NextItem) -> RolloutApiSink[PlayedGroup]:
    config, name = env.config, env.config.wandb_name or env.run_name
    folder = Path(config.spool_path or data_folder(env.run_name) / "spool")
    evaluations = Path(config.data_dir_to_save_evals or data_folder(env.run_name) / "eval")

    pools = None
    if config.item_sampling == "difficulty":
        pools = ItemPools(
            next_item,
            folder / "draws.jsonl",
            seed=config.item_seed,
            new_share=config.new_item_share,
        )

    async def evaluate_step() -> None:
        config.data_dir_to_save_evals = str(unused(evaluations / f"step-{env.curr_step}"))
        await own_evaluation(env)

    async def on_step(step: int) -> None:
        if (registration := sink.relay.registration) is not None:
            with hook_errors():
                env.at_step(step, registration)
        env.curr_step = step
        tracker = env.tracker
        call = env.wandb_log(sink.age_metrics() if tracker is not None and tracker.on else None)
        await of_hook(call if tracker is None else tracker.hook(call))

    sink: RolloutApiSink[PlayedGroup] = RolloutApiSink(
        config,
        workers=env.max_num_workers,
        build=lambda group, trainer: decide_for_training(_named(group, name), config, trainer),
        api=RolloutApi(config.rollout_server_url, token=config.rollout_server_token or ""),
        env=EnvDescription(
            desired_name=name,
            max_token_length=config.max_token_length,
            group_size=config.group_size,
            weight=config.inference_weight,
            min_batch_allocation=config.min_batch_allocation,
        ),
        outbox=Outbox(folder, about_content(env, evaluation=False)),
        refused=folder / "refused.jsonl",
        console=env.console,
        figures=figures,
        evaluate=evaluate_step,
        on_step=on_step,
        pools=pools,
    )
    return sink


def _named(group: PlayedGroup, name: str) -> PlayedGroup:
    """The group with the name of its environment, by which a trainer tells those of several."""
    return replace(group, group_overrides={**group.group_overrides, "environment": name})


def _reject_phase_1(env: Environment) -> None:
    for config in env.server_configs:
        if token_engine(config) is None:
            raise Phase1CannotTrain(
                f"serve: model {config.model_name!r} is used over chat completions (Phase 1), which carry no token ids "
                "and logprobs, and a trainer never gets made-up ones; set --openai.server_type vllm or sglang "
                "for a server that reports tokens (Phase 2) or --openai.model_name embedded for the embedded model, "
                "or use `process` to write trajectories for supervised training"
            )


def _reject_off_policy(env: Environment) -> None:
    server, config = env.server, env.config
    assert isinstance(server, TokenServer)
    engines = [(engine.settings, engine.logprobs) for engine in server.servers]
    if problem := settings_problem(engines, config, temperature=config.agent_temperature):
        raise ServerConfigError(f"serve: {problem}")
