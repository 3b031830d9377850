"""Exceptions of rewards that may be the agent's doing: looked at more closely, asked about again, and printed once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from backends import BackendError, SandboxSpec
from backends.errors import LachesisError
from lachesis.loop.rollout import Rollout
from lachesis.loop.rollout_player import RolloutPlayer
from lachesis.rewards.doubt import Doubt
from lachesis.rewards.scorer import SetUpFailed
from lachesis.runs.reference_policy import ReferencePolicy

if TYPE_CHECKING:
    from lachesis.runs.environment import Environment

log = logging.getLogger(__name__)


async def settle(
    env: Environment, item: Any, rollouts: Sequence[Rollout], tools: Sequence[Mapping[str, Any]]
) -> list[Rollout]:
    """The rollouts of an item, with the current evidence about those in doubt.

    For the first doubt of a kind, the reference policy plays the item: it passes the statement, or shows that right
    solutions meet the same. For the first about a statement that is still open, the reward is tried in a sandbox in
    which no agent has been.
    """
    player = env.player
    found = [player.settled(rollout) for rollout in rollouts]
    evidence = player.scorer.evidence
    for at, rollout in enumerate(found):
        if rollout.doubt is None or found[at].doubt is None:
            continue
        try:
            async with evidence.asking:
                if evidence.waits_for_reference(rollout.doubt):
                    await _ask_reference(env, item, rollout.doubt, rollout.item_key, tools)
            found = [player.settled(rollout) for rollout in found]
            if found[at].doubt is None or rollout.doubt.statement in evidence.asked:
                continue
            evidence.asked.add(rollout.doubt.statement)
            spec = env.sandbox_for(item, player.sessions.spec)
            if await _raises_untouched(player, item, found[at], spec):
                trace = f"{rollout.doubt.trace}The reward raises the same in a sandbox in which no agent has been.\n"
                found[at] = replace(found[at], traceback=trace)
        except (BackendError, LachesisError, SetUpFailed) as error:
            log.warning("the exception of a reward could not be looked at more closely: %s", error)
            found = [player.settled(rollout) for rollout in found]
    return found


async def _raises_untouched(player: RolloutPlayer, item: Any, rollout: Rollout, spec: SandboxSpec | None) -> bool:
    """Whether the reward raises the same where no agent has been: then the environment is at fault.

    Raises:
        BackendError, InferenceError, SetUpFailed: it could not be found out.
    """
    task_id = f"{rollout.item_key}-{rollout.index}-{rollout.rollout_id[:8]}-untouched"
    verifier_id = f"{task_id}-verifier"
    session = player.sessions.open(task_id, spec=spec)
    try:
        await player.scorer.set_up(item, session, player.registry)
        verifier = partial(player.sessions.open, verifier_id, spec=spec)
        context = player.scorer.context_class(session, player.registry, open_verifier=verifier)
        assert rollout.result is not None and rollout.doubt is not None
        found = (await player.scorer.score(item, rollout.result, context)).doubt
    finally:
        await player.release(task_id, verifier_id)
    return found is not None and found.raises_as(rollout.doubt)


async def _ask_reference(
    env: Environment, item: Any, doubt: Doubt, item_key: str, tools: Sequence[Mapping[str, Any]]
) -> None:
    """Record which statements the reward passes for a right solution, and whether it raises the same exception."""
    met = env.player.scorer.evidence.reference_met
    found = None
    try:
        played = await _play_reference(env, item, item_key, tools)
        found = played.doubt if played is not None else None
    finally:  # nothing is decided before, and it is not asked twice
        met[doubt.kind] = found is not None and found.raises_as(doubt)


async def _play_reference(
    env: Environment, item: Any, item_key: str, tools: Sequence[Mapping[str, Any]]
) -> Rollout | None:
    policy = env.reference_policy()
    if policy is None:
        return None

    player = replace(env.player_for(item), server=ReferencePolicy(policy))
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
