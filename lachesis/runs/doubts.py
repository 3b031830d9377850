"""Exceptions of rewards that may be the agent's doing: looked at more closely, asked about again, and printed once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from backends import BackendError
from backends.errors import LachesisError
from lachesis.loop.rollout import Rollout
from lachesis.rewards.doubtful import raises_untouched, settled
from lachesis.rewards.evidence import Doubt
from lachesis.rewards.scorer import SetUpFailed
from lachesis.runs.environment import Environment
from lachesis.runs.model_servers import start_servers
from lachesis.settings.server_settings import REFERENCE, ServerConfig

log = logging.getLogger(__name__)

MOST_HELD = 4
"""Groups that wait for evidence before the run stops; `max_failed_groups` where that is more."""

NEXT_STEP = (
    "nothing shows whether the agents or the reward are at fault, so nothing is scored: correct the reward, let it "
    "accept whatever an agent may leave (`ctx.read_json`), or write a reference_policy that passes this line"
)


async def settle(
    env: Environment, item: Any, rollouts: Sequence[Rollout], tools: Sequence[Mapping[str, Any]]
) -> list[Rollout]:
    """The rollouts of an item, with the current evidence about those in doubt.

    For the first doubt of a kind, the reference policy plays the item: it passes the statement, or shows that right
    solutions meet the same. For the first about a statement that is still open, the reward is tried in a sandbox in
    which no agent has been.
    """
    player = env.player
    found = settled(player, rollouts)
    evidence = player.scorer.evidence
    for at, rollout in enumerate(found):
        if rollout.doubt is None or found[at].doubt is None:
            continue
        try:
            async with evidence.asking:
                if evidence.waits_for_reference(rollout.doubt):
                    await _ask_reference(env, item, rollout.doubt, rollout.item_key, tools)
            found = settled(player, found)
            if found[at].doubt is None or rollout.doubt.statement in evidence.asked:
                continue
            evidence.asked.add(rollout.doubt.statement)
            spec = env.sandbox_for(item, player.sessions.spec)
            if await raises_untouched(player, item, found[at], spec):
                trace = f"{rollout.doubt.trace}The reward raises the same in a sandbox in which no agent has been.\n"
                found[at] = replace(found[at], traceback=trace)
        except (BackendError, LachesisError, SetUpFailed) as error:
            log.warning("the exception of a reward could not be looked at more closely: %s", error)
            found = settled(player, found)
    show_first(env, found)
    return found


def look_for_reference(env: Environment) -> None:
    """Note whether there is a reference policy that could be asked."""
    evidence = env.player.scorer.evidence
    if evidence.has_reference is None:
        plays = any(config.model_name == REFERENCE for config in env.server_configs)
        evidence.has_reference = not plays and env.reference_policy() is not None


async def _ask_reference(
    env: Environment, item: Any, doubt: Doubt, item_key: str, tools: Sequence[Mapping[str, Any]]
) -> None:
    """Record which statements the reward passes for a right solution, and whether it raises the same exception."""
    evidence = env.player.scorer.evidence
    try:
        played = await _play_reference(env, item, item_key, tools)
    finally:
        evidence.tried.add(doubt.kind)
    if played is not None and played.doubt is not None and played.doubt.raises_as(doubt):
        evidence.refuted.add(doubt.kind)


async def _play_reference(
    env: Environment, item: Any, item_key: str, tools: Sequence[Mapping[str, Any]]
) -> Rollout | None:
    policy = env.reference_policy()
    if policy is None:
        return None

    async def unchecked(_: Sequence[Any]) -> None:
        pass

    async with AsyncExitStack() as stack:
        reference = ServerConfig(model_name=REFERENCE, server_type="openai")
        server = await start_servers([reference], settings=env.config, policy=policy, stack=stack, check=unchecked)
        player = replace(env.player_for(item), server=server)
        return await player.play(
            item,
            partial(env.initial_messages, item),
            item_key=item_key,
            index=0,
            tools=tools,
            temperature=0.0,
            split="eval",
            spec=env.sandbox_for(item, player.sessions.spec),
        )


def show_first(env: Environment, rollouts: Iterable[Rollout]) -> None:
    """Print the first exception at each statement that was the agent's doing."""
    shown = env.player.scorer.evidence.shown
    for rollout in rollouts:
        line = rollout.agent_fault.rpartition("(")[2]
        if rollout.fault_traceback and line not in shown:
            shown.add(line)
            line = f"agent_fault, on {rollout.item_key}: {rollout.agent_fault}"
            env.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
            env.console.print(rollout.fault_traceback, markup=False, highlight=False, soft_wrap=True)


def why_held(doubts: Sequence[Doubt]) -> str:
    """Why the run stops, with the exception."""
    return f"the last one: {doubts[-1].what}\n{doubts[-1].trace}{NEXT_STEP}"
