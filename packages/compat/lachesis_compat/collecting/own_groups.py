"""Atropos' hooks in environments of our own base class: the default methods, and the calls of overrides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lachesis.figures.item_keys import item_digest
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs import commands
from lachesis.runs.decisions import Kept
from lachesis.runs.environment import Environment
from lachesis.runs.group_player import play_group
from lachesis.runs.registration import Registration
from lachesis.settings.hooks import hook_errors
from lachesis.tracebacks import explained
from lachesis_client.model_server import ModelServer, tracks_tokens
from lachesis_compat.collecting.collector import Collector
from lachesis_compat.collecting.recorded_server import RecordedServer, describe_servers
from lachesis_compat.collecting.recording import current_recording
from lachesis_compat.collecting.returned import ReturnedGroupError, only
from lachesis_tokens.samples.group_shapes import CERTIFICATE

_OF_TRAJECTORIES = ("tokens", "masks", "scores", "inference_logprobs", "messages", "overrides")


def collector_of(env: Environment, server: ModelServer) -> tuple[RecordedServer, Collector]:
    """The recording server of a run, and the collector of its groups."""
    recorded = RecordedServer(describe_servers(env.server_configs))
    recorded.bind(server)
    return recorded, Collector(
        source=env,
        name=env.run_name,
        decode=partial(decode, env),
        ends=partial(special_tokens, env),
        tools=env.tool_definitions(),
        max_retries=env.config.max_infra_retries,
        timeout=_longest(env.config),
        tell=partial(tell, env),
    )


def _longest(config: Any) -> float | None:
    """Seconds for one group: for our rollouts with all their repetitions, and as much as one rollout for the rest."""
    if config.rollout_timeout is None:
        return None
    rollouts = (3 * config.rollout_timeout + config.reward_timeout) * (
        1 + config.max_infra_retries
    )  # see `RolloutClock`
    return float(rollouts + config.reward_timeout + config.rollout_timeout)


async def own_group(env: Environment, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
    """One group as our own rollouts make it."""
    content, group = await collect_group(env, item)
    _note(group.rollouts)
    return content, []


async def own_trajectory(env: Environment, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
    """One rollout in the shape of Atropos' `ScoredDataItem`, with its certificate."""
    group = await play_group(env, item, item_digest(item), size=1, rounds=1 + env.config.max_infra_retries)
    _note(group.rollouts)
    if not group.scored:
        return None, []
    rollout = group.scored[0]
    sample = next(iter(rollout.samples), None)
    return {
        "tokens": sample.tokens if sample else None,
        "masks": sample.masks if sample else None,
        "inference_logprobs": sample.logprobs if sample else None,
        "scores": rollout.reward,
        "messages": rollout.result.messages if rollout.result else None,
        "overrides": {CERTIFICATE: sample.certificate() if sample else {"rollout_id": rollout.rollout_id}},
    }, []


async def group_of_trajectories(env: Any, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
    """`group_size` results of an overridden `collect_trajectory`, each with a backlog or without one. Those that are
    None are left out."""
    given = await asyncio.gather(*(env.collect_trajectory(item) for _ in range(env.config.group_size)))
    results = [each if isinstance(each, tuple) and len(each) == 2 else (each, None) for each in given]
    found = [only(trajectory, Mapping) for trajectory, _ in results if trajectory is not None]
    for trajectory in found:
        if not isinstance(trajectory, Mapping):
            raise ReturnedGroupError(
                f"collect_trajectory returned {type(trajectory).__name__}; it must be a dict with tokens, masks and "
                "scores, or None to leave the trajectory out"
            )
    backlog = [later for _, items in results for later in items or ()]
    if not found:
        return None, backlog
    names = dict.fromkeys((*_OF_TRAJECTORIES, *(name for trajectory in found for name in trajectory)))
    group = {name: [trajectory.get(name) for trajectory in found] for name in names if name != "group_overrides"}
    of_group = [given for trajectory in found if (given := trajectory.get("group_overrides"))]
    return {**group, "group_overrides": {key: value for given in of_group for key, value in given.items()}}, backlog


def atropos_group(group: PlayedGroup) -> dict[str, Any]:
    """A finished group in Atropos' shape, with the path on which each rollout ended: for hooks that show or count."""
    if group.returned is not None:
        return dict(group.returned)
    rollouts = group.scored
    final = [next(iter(each.samples), None) for each in rollouts]
    return {
        "tokens": [sample.tokens if sample else [] for sample in final],
        "masks": [sample.masks if sample else [] for sample in final],
        "inference_logprobs": [sample.logprobs if sample else [] for sample in final],
        "scores": [rollout.reward for rollout in rollouts],
        "messages": [rollout.result.messages if rollout.result else [] for rollout in rollouts],
        "group_overrides": {},
    }


async def call_hook(env: Any, hook: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> None:
    """Call a hook that only shows something. An exception is shown once on the console of `env`, and ends nothing."""
    name = getattr(hook, "__name__", repr(hook))
    try:
        with hook_errors():
            await hook(*args, **kwargs)
    except Exception as error:
        trace = explained(error)
        shown: set[str] = env.__dict__.setdefault("_shown_hooks", set())
        if (key := f"{name}: {type(error).__name__}") not in shown:
            shown.add(key)
            tell(env, f"exception in {name} (the groups are not touched):\n{trace}")


async def after_group(env: Any, group: PlayedGroup) -> None:
    """Call the environment's own `add_rollouts_for_wandb`."""
    await call_hook(env, env.add_rollouts_for_wandb, atropos_group(group), item=group.item)


def at_step(env: Any, step: int, registration: Registration) -> None:
    """Load the environment's state at the trainer's first step, and save it where the trainer's checkpoints are."""
    before: int | None = env.__dict__.get("_checkpoint_step")
    env.__dict__["_checkpoint_step"] = step
    env.checkpoint_dir, env.checkpoint_interval = registration.checkpoint_dir, registration.checkpoint_interval
    env.wandb_prepend = env.wandb_prepend or env.config.wandb_name or env.name or type(env).__name__
    env.curr_step = step
    every = registration.checkpoint_interval
    if before is None:
        if step > 0:
            env.load_checkpoint()
    elif every > 0 and step // every > before // every:
        env.save_checkpoint(step // every * every)


def save_checkpoint(env: Any, step: int, data: Mapping[str, Any] | None) -> None:
    """Atropos' default: `data` as JSON where `load_checkpoint` finds it."""
    if data is None:
        return
    folder = Path(env.checkpoint_dir) / "env_checkpoints" / str(env.wandb_prepend)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step-{step}.json").write_text(json.dumps(data), encoding="utf-8")


def decode(env: Any, ids: Sequence[int]) -> str:
    """The text of ids, special tokens included."""
    return str(env.tokenizer.decode(list(ids), skip_special_tokens=False))


def special_tokens(env: Any) -> list[str]:
    """The texts that no message contains: ends of turns, roles."""
    tokenizer = env.tokenizer
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return [*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]


def tell(env: Any, line: str) -> None:
    env.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _note(rollouts: Sequence[Rollout]) -> None:
    """The rollouts belong to the item that is being collected."""
    recording = current_recording()
    if recording is not None:
        recording.rollouts.update({rollout.rollout_id: rollout for rollout in rollouts})


async def collect_group(env: Environment, item: Any) -> tuple[dict[str, Any] | None, PlayedGroup]:
    """One group in Atropos' shape, in Phase 2 as `serve` would send it; None when it is not complete or not scored.
    And the group itself."""
    config = env.config
    play = partial(play_group, env, item, item_digest(item), size=config.group_size)
    if tracks_tokens(env.player.server):
        group = await play(rounds=1 + config.max_infra_retries)
        from lachesis_tokens.samples.decision import ANY_TRAINER, decide_for_training

        # An override reads the messages; the run sends what is set, and refuses what it does not trust.
        changed: dict[str, Any] = {"include_messages": True, "unchecked_prompts": "allow"}
        if env.collects:  # its override may give equal scores others: the run decides about what it returns
            changed["ensure_scores_are_not_same"] = False
        config = config.model_copy(update=changed)
        decision = await asyncio.to_thread(decide_for_training, group, config, ANY_TRAINER)
        return dict(decision.content) if isinstance(decision, Kept) else None, group
    group = await play()
    record = commands.record_of(env, group)
    return record if record["scores"] else None, group
