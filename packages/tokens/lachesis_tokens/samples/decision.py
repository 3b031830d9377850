"""Whether a played group becomes training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lachesis.loop.result import AgentResult
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs.decisions import Decision, Kept, LeftOut
from lachesis.runs.registration import TrainerInfo
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_messages.records.split_rollouts import SplitRollouts
from lachesis_tokens.samples.advantages import overlong
from lachesis_tokens.samples.group_shapes import (
    OF_TOKENS,
    GroupSettings,
    RejectReason,
    RolloutSamples,
    TrainingGroup,
    build_group,
    with_digest,
)

ANY_TRAINER = TrainerInfo(batch_size=-1, max_token_len=-1)
"""One that takes sequences of any length."""

SAME_SCORES: Final = "same scores"
"""The reason of groups that are left out because all rewards are equal."""


def decide_for_training(group: PlayedGroup, config: HermesAgentEnvConfig, trainer: TrainerInfo) -> Decision:
    """The group as it is sent, or why it is not. CPU-bound: not for the event loop."""
    rollouts = [_of_rollout(rollout, config) for rollout in group.scored]
    settings = GroupSettings(
        group_size=int(group.group_overrides.get("group_size") or config.group_size),
        split_rollouts=SplitRollouts(config.split_rollouts),
        ensure_scores_are_not_same=config.ensure_scores_are_not_same,
        max_token_len=trainer.max_token_len,
        discarded_attempts=config.discarded_attempts,
        unchecked_prompts=config.unchecked_prompts,
        turn_discount=config.turn_discount if config.credit == "turn" else None,
        tree_credit=config.tree_credit,
    )
    left_out = [rollout for rollout in group.rollouts if rollout.reward is None]
    beside = [] if group.beside is None else [group.beside]
    lost = sum(rollout.lost.completion_tokens for rollout in (*group.rollouts, *beside)) + sum(
        rollout.result.cost.tokens.completion_tokens for rollout in (*left_out, *beside) if rollout.result is not None
    )
    built = build_group(rollouts, settings)
    undelivered = sum(built.undelivered.values()) + lost
    if isinstance(built, TrainingGroup):
        rewards = [rollout.reward for rollout in group.scored]
        of_split = sum(built.undelivered.values())
        return Kept(_with_extras(built, group), built.delivered, undelivered, of_split, rewards, group.tracebacks)
    why = left_out[-1].unscored_because if left_out else ""
    if group.declined:
        return LeftOut("declined", group.declined, undelivered, group.rewards, declined=True, unscored_because=why)
    return LeftOut(
        reason=built.reason.value.replace("_", " "),
        detail=f"{built.detail}; the last one that was left out: {why}" if left_out else built.detail,
        tokens=undelivered,
        rewards=group.rewards,
        record={
            "item_key": group.item_key,
            "rewards": group.rewards,
            "left_out": [rollout.tracebacks or rollout.unscored_because for rollout in left_out],
        },
        # Another attempt may avoid what the infrastructure broke, but not an exception in the environment's own code,
        # a reward that is None, or a request that the server rejects. A whole group is decided.
        again=built.reason is RejectReason.INCOMPLETE
        and any(rollout.may_pass for rollout in left_out)
        and all(rollout.traceback is None for rollout in left_out)
        and not group.of_broken_item,
        broken_item=group.of_broken_item,
        unscored_because=why,
        tracebacks=group.tracebacks,
        left_to_agents=group.left_to_agents,
        of_every_group=built.reason is RejectReason.UNCHECKED_PROMPTS,
    )


def _of_rollout(rollout: Rollout, config: HermesAgentEnvConfig) -> RolloutSamples:
    samples, result = rollout.samples, rollout.result
    turns = result.turn_responses if result else ()
    limit, penalty = config.soft_length_limit, None
    if limit is not None and samples:
        inherited = result.inherited.tokens.completion_tokens if result and result.inherited else 0
        length = samples[0].sampled + inherited
        penalty = config.length_penalty * overlong(length, limit=limit, buffer=config.soft_length_buffer)
    turn_ids = [response.tokens.completion_id for response in turns if response.tokens is not None]
    below, given_up = _beside(result, turn_ids) if config.credit == "turn" and result else (frozenset[str](), None)
    return RolloutSamples(
        rollout.rollout_id,
        rollout.reward,
        samples,
        result.recorded_messages if config.include_messages and result else None,
        rollout.turn_rewards,
        result.repaired_calls if result else (0, 0),
        tree=rollout.tree,
        turn_ids=turn_ids,
        below=below,
        given_up=given_up,
        length_penalty=penalty,
    )


def _beside(result: AgentResult, turn_ids: Sequence[str]) -> tuple[frozenset[str], str | None]:
    """The ids of its sub-agents' completions, and of the one with which it ended if that is none of its turns."""
    history = result.history
    own = {id(node.origin) for node in history.all_nodes()}
    below = [each.tokens for each in history.completions() if id(each) not in own]
    last = next((each.tokens for each in reversed(history.ended_on()) if each.purpose == "turn"), None)
    given_up = last.completion_id if last is not None and last.completion_id not in turn_ids else None
    return frozenset(each.completion_id for each in below if each is not None), given_up


def _with_extras(built: TrainingGroup, group: PlayedGroup) -> dict[str, Any]:
    """The group with the fields that the environment sends in addition to its tokens. Our own fields take
    precedence.
    """
    content = built.to_atropos()
    content["group_overrides"] = {**group.group_overrides, **content["group_overrides"]}
    spans = [span for sample in built.samples for span in sample.spans]
    versions = {name for span in spans for name, _, _ in span.versions or [(span.model_version, 0, 0)] if name}
    if versions:
        content["group_overrides"]["model_versions"] = sorted(versions)
    of_samples = [group.extras.get(sample.rollout_id, {}) for sample in built.samples]
    content["overrides"] = [
        {**extras.get("overrides", {}), **own} for extras, own in zip(of_samples, content["overrides"], strict=True)
    ]
    names = {name for extras in of_samples for name in extras} - {"overrides"}
    if any(sample.index for sample in built.samples):
        names -= OF_TOKENS  # they belong to the tokens of the first sample of a rollout
    for name in names:
        values = [extras.get(name) for extras in of_samples]
        if content.get(name) is None and (name == "images" or None not in values):
            content[name] = values
    return with_digest(content)
