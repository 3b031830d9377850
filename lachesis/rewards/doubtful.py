"""Rollouts whose reward raised what may be the doing of their agents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lachesis.tool_context.tool_context import ToolContext

if TYPE_CHECKING:
    from backends import SandboxSpec
    from lachesis.loop.result import AgentResult
    from lachesis.loop.rollout import Rollout
    from lachesis.loop.rollout_player import RolloutPlayer
    from lachesis.rewards.evidence import Doubt
    from lachesis.rewards.scorer import Scorer


def settled(player: RolloutPlayer, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts, those with a score whose doubt is settled by now as the agent's fault."""
    finished = []
    evidence = player.scorer.evidence
    for rollout in rollouts:
        doubt = rollout.doubt
        if doubt is not None and doubt.kind in evidence.refuted:
            trace = f"{doubt.trace}The reward raises the same for the reference policy: the environment is at fault.\n"
            rollout = replace(rollout, doubt=None, traceback=trace)
        elif doubt is not None and not evidence.waits_for_reference(doubt) and evidence.is_agents(doubt):
            found = replace(rollout, doubt=None, traceback=None, fault_traceback=doubt.trace)
            rollout = player.at_fault(found, doubt.fault, "")
        finished.append(rollout)
    return finished


async def raises_untouched(player: RolloutPlayer, item: Any, rollout: Rollout, spec: SandboxSpec | None = None) -> bool:
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


async def those_alone(
    scorer: Scorer,
    doubt: Doubt,
    item: Any,
    group: Sequence[tuple[Rollout, AgentResult]],
    contexts: Sequence[ToolContext | None],
) -> dict[int, Doubt]:
    """Of a group whose reward raised, by their places: the rollouts for which it raises the same where they are
    alone."""
    if len(group) == 1:
        return {0: doubt}
    found = {}
    for at, ((rollout, result), context) in enumerate(zip(group, contexts, strict=True)):
        if context is not None:
            context.shared.repeated = True
        about = rollout.item_key, rollout.rollout_id
        alone = await scorer.score_group(item, [result], [context], about=about)
        if alone.doubt is not None and alone.doubt.raises_as(doubt):
            found[at] = alone.doubt
    return found
