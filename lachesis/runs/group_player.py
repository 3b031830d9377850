"""The rollouts of one item, side by side, scored each and together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from backends.errors import SettingsError
from backends.tasks import cancel_requests, run_all
from lachesis.figures.item_keys import whole_and_part
from lachesis.figures.summary import BUILTIN_FIGURES, BUILTIN_PREFIXES
from lachesis.loop.result import AgentResult
from lachesis.loop.rollout import PlayedGroup, Rollout, holding_sandboxes
from lachesis.rewards.reward import RewardError
from lachesis.runs.failures import RunStopped, UnusableSettings
from lachesis.settings.server_settings import REFERENCE
from lachesis.tool_context.file_copies import HostDiskFull
from lachesis_client import RequestRejected, Unauthorized
from lachesis_client.errors import NothingThere

if TYPE_CHECKING:
    from lachesis.runs.environment import Environment

Finished: TypeAlias = Callable[[Any, Rollout], None]
"""Learns of an item's rollout."""


async def play_item(
    env: Environment,
    item: Any,
    item_key: str,
    *,
    size: int,
    rounds: int = 1,
    evaluation: bool = False,
    finished: Finished = lambda item, rollout: None,
) -> list[PlayedGroup]:
    """The groups of one item, at least one. Every run gets its groups here.

    An environment that collects its groups itself may return several of an item; any other one has `play_group`.
    """
    if env.collects and not evaluation:
        if plays_trees(env):
            raise UnusableSettings(f"{env.run_name} collects its groups itself, which cannot branch: unset tree_at")
        groups = await env.collect_groups(item, item_key)
        for group in groups:
            for rollout in group.rollouts:
                finished(item, rollout)
        return groups
    return [await play_group(env, item, item_key, size=size, rounds=rounds, evaluation=evaluation, finished=finished)]


def plays_trees(env: Environment) -> bool:
    """Whether its rollouts branch: by `tree_at`, or a `branch_at` of its own."""
    return env.config.tree_at is not None or env.branch_at is not None


async def play_group(
    env: Environment,
    item: Any,
    item_key: str,
    *,
    size: int,
    rounds: int = 1,
    evaluation: bool = False,
    finished: Finished = lambda item, rollout: None,
) -> PlayedGroup:
    """The group of one item, of `size` scored rollouts where that was possible. With the key of a later sample of the
    item, that is the first of its rollouts.

    Args:
        rounds: how often rollouts without a score are replaced by others, plus one. A trainer takes whole groups only.
        finished: called with each rollout as soon as it has its score.

    Raises:
        RunStopped: the server rejects the key, or knows no such model or route; the environment finds a setting
            missing; this machine's disk is full.
    """
    whole, first = whole_and_part(item_key)
    toolsets, tools = env.group_tools(whole)
    with suppress(Exception):  # every rollout says so
        tools = [*tools, *(tool.definition() for tool in env.tools_for(item) if tool.offered)]
    rollouts: list[Rollout] = []
    _look_for_reference(env)

    async def play(index: int) -> Rollout:
        rollout = await env.play_rollout(item, whole, first + index, tools, evaluation=evaluation)
        if env.compute_group_reward is None and rollout.doubt is None:
            finished(item, rollout)
        return rollout

    trees = None
    if size > 1 and plays_trees(env) and not evaluation:
        from lachesis.runs.forks import trees_of

        trees = trees_of(env, item, size, play)
    async with holding_sandboxes():
        for _ in range(rounds):
            scored = sum(rollout.reward is not None or rollout.doubt is not None for rollout in rollouts)
            if scored == size or any(rollout.broken_item for rollout in rollouts):
                break
            if trees is not None:
                rollouts += await trees.rollouts(size - scored)
            else:
                rollouts += await run_all(map(play, range(len(rollouts), len(rollouts) + size - scored)))
            stop_if_hopeless(rollouts)
        late = [env.compute_group_reward is not None or rollout.doubt is not None for rollout in rollouts]
        rollouts = await env.player.score_group(item, rollouts)
        stop_if_hopeless(rollouts)
    if any(rollout.doubt is not None for rollout in rollouts):
        from lachesis.runs.doubts import settle  # late: few rewards raise anything

        rollouts = await settle(env, item, rollouts, tools)
    _show_first(env, rollouts)
    for rollout, is_late in zip(rollouts, late, strict=True):
        if is_late and rollout.doubt is None:
            finished(item, rollout)
    measured = [rollout.measured(partial(_metrics, env, item)) for rollout in rollouts]
    return PlayedGroup(item, item_key, tools, measured, toolsets=toolsets)


async def play_rollout(
    env: Environment,
    item: Any,
    item_key: str,
    index: int,
    tools: Sequence[Mapping[str, Any]],
    *,
    evaluation: bool = False,
) -> Rollout:
    """One finished rollout of `item`. An exception in the environment's code ends this rollout only."""
    before = cancel_requests()
    try:
        player = env.player_for(item)
        first = partial(env.initial_messages, item)  # a session may write them
        return await player.play(
            item,
            first() if player.scorer.session is None else first,
            item_key=item_key,
            index=index,
            tools=tools,
            temperature=env.config.eval_temperature if evaluation else env.config.agent_temperature,
            split="eval" if evaluation else "train",
            spec=env.sandbox_for(item, player.sessions.spec),
        )
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit would end the run, with its own exit code
        if isinstance(error, asyncio.CancelledError) and cancel_requests() > before:
            raise
        return Rollout.broken(item_key, index, error)


def settled_group(env: Environment, finished: Finished, group: PlayedGroup, *, last: bool = False) -> PlayedGroup:
    """A group in doubt with the current evidence. `last`: this is the last check, and remaining doubts are errors of
    the environment."""

    rollouts = []
    for before, rollout in zip(group.rollouts, map(env.player.settled, group.rollouts), strict=True):
        if rollout.doubt is not None and last:
            rollout = replace(rollout, doubt=None)
        if before.doubt is not None and rollout.doubt is None:
            finished(group.item, rollout)
            rollout = rollout.measured(partial(_metrics, env, group.item))
        rollouts.append(rollout)
    _show_first(env, rollouts)
    return replace(group, rollouts=rollouts)


def _metrics(env: Environment, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
    metrics = env.rollout_metrics(item, result, reward)
    for name in map(str, metrics):
        if name in BUILTIN_FIGURES or name.startswith(BUILTIN_PREFIXES):
            raise RewardError(
                f"{env.run_name}: rollout_metrics returned {name!r}, which is the name of a built-in figure; rename it"
            )
    return metrics


def stop_if_hopeless(rollouts: Sequence[Rollout]) -> None:
    """Raises `RunStopped` for what would fail every rollout: a key, the name of the model, a missing judge, a full
    disk."""
    for rollout in rollouts:
        if isinstance(rollout.error, HostDiskFull):
            raise RunStopped(str(rollout.error)) from rollout.error
        if isinstance(rollout.error, SettingsError) or _every_request_would_fail(rollout.error):
            raise UnusableSettings(str(rollout.error)) from rollout.error


def _every_request_would_fail(error: Exception | None) -> bool:
    """Whether the key, the name of the model or the kind of server is wrong."""
    of_route = isinstance(error, RequestRejected) and error.status == 404 and not error.refuses_content
    return of_route or isinstance(error, Unauthorized | NothingThere)


def _look_for_reference(env: Environment) -> None:
    """Note whether there is a reference policy that could be asked."""
    evidence = env.player.scorer.evidence
    if evidence.has_reference is None:
        plays = any(config.model_name == REFERENCE for config in env.server_configs)
        evidence.has_reference = not plays and env.reference_policy() is not None


def _show_first(env: Environment, rollouts: Iterable[Rollout]) -> None:
    """Print the first exception at each statement that was the agent's doing."""
    shown = env.player.scorer.evidence.shown
    for rollout in rollouts:
        line = rollout.agent_fault.rpartition("(")[2]
        if rollout.fault_traceback and line not in shown:
            shown.add(line)
            line = f"the agent's fault, on {rollout.item_key}: {rollout.agent_fault}"
            env.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
            env.console.print(rollout.fault_traceback, markup=False, highlight=False, soft_wrap=True)
