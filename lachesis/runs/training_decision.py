"""Whether a played group becomes training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lachesis.runs.decisions import Decision, Kept, LeftOut
from lachesis.runs.group_player import PlayedGroup
from lachesis.runs.settings import HermesAgentEnvConfig
from lachesis.training.groups import (
    GroupSettings,
    RejectedGroup,
    RejectReason,
    RolloutSamples,
    SplitRollouts,
    TrainingGroup,
    build_group,
)
from lachesis.training.rollout_api import TrainerInfo

ANY_TRAINER = TrainerInfo(batch_size=-1, max_token_len=-1)
"""One that takes sequences of any length."""


def decide_for_training(group: PlayedGroup, config: HermesAgentEnvConfig, trainer: TrainerInfo) -> Decision:
    """The group as it is sent, or why it is not. CPU-bound: not for the event loop."""
    rollouts = [
        RolloutSamples(
            rollout.rollout_id,
            rollout.reward,
            rollout.samples,
            rollout.result.recorded_messages if config.include_messages and rollout.result else None,
            rollout.turn_rewards,
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
    built = build_group(rollouts, settings)
    incomplete = isinstance(built, RejectedGroup) and built.reason is RejectReason.INCOMPLETE
    decision = decision_of(
        built,
        rewards=group.rewards,
        record={
            "item_key": group.item_key,
            "rewards": group.rewards,
            "left_out": [rollout.tracebacks or rollout.unscored_because for rollout in left_out],
        },
        # Another attempt may avoid what the infrastructure broke, but not an exception in the environment's own code,
        # a reward that is None, or a request that the server rejects. A whole group is decided.
        again=incomplete
        and any(rollout.may_pass for rollout in left_out)
        and all(rollout.traceback is None for rollout in left_out),
    )
    lost = sum(rollout.lost_completion_tokens for rollout in group.rollouts) + sum(
        rollout.result.tokens.completion_tokens for rollout in left_out if rollout.result is not None
    )
    if isinstance(decision, Kept):
        return replace(decision, undelivered=decision.undelivered + lost, tracebacks=group.tracebacks)
    detail, why = decision.detail, ""
    if left_out:
        why = left_out[-1].unscored_because
        detail = f"{detail}; the last one that was left out: {why}"
    tokens = decision.tokens + lost
    return replace(decision, detail=detail, tokens=tokens, unscored_because=why, tracebacks=group.tracebacks)


def decision_of(
    built: TrainingGroup | RejectedGroup,
    *,
    rewards: Sequence[float | None],
    record: Mapping[str, Any] | None = None,
    again: bool = False,
) -> Decision:
    """The result of `build_group` as a decision; `record` and `again` are about a group that is refused."""
    if isinstance(built, TrainingGroup):
        return Kept(
            content=built.to_atropos(),
            tokens=built.delivered,
            undelivered=sum(built.undelivered.values()),
            rewards=[reward for reward in rewards if reward is not None],
        )
    return LeftOut(
        reason=built.reason.value.replace("_", " "),
        detail=built.detail,
        tokens=sum(built.undelivered.values()),
        rewards=rewards,
        record=record or {},
        again=again,
    )
