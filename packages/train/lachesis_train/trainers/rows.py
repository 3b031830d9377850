"""Rows for a trainer, cut from samples that were verified here. A trainer that takes one row a rollout never gets a
rollout of several samples without anybody's decision (`on_branches`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from backends.errors import LachesisError
from lachesis.figures.repaired_calls import RepairedCalls
from lachesis_messages.records.split_rollouts import SplitRollouts
from lachesis_messages.tokens import MASKED
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RejectedGroup,
    RolloutSamples,
    build_group,
)
from lachesis_tokens.samples.samples import TokenSample
from lachesis_tokens.samples.verification import not_written

log = logging.getLogger(__name__)

OnBranches: TypeAlias = Literal["error", "last", "longest"]
"""What happens to a rollout of several samples where a trainer takes one row a rollout: the training stops, or one of
the samples is trained: that in which the conversation ended, or that with the most sampled tokens."""
_SPLITS: Final = {"last": SplitRollouts.FINAL, "longest": SplitRollouts.LONGEST, None: SplitRollouts.ALL}


def branches_setting(given: str) -> OnBranches:
    """`on_branches` as somebody wrote it. "final" is an earlier name of "last".

    Raises:
        ValueError: there is no such choice.
    """
    given = "last" if given == "final" else given
    if given not in (names := get_args(OnBranches)):
        raise ValueError(f"on_branches is {given!r}; it is one of {', '.join(names)}")
    return given  # type: ignore[return-value]


class BranchedRollout(LachesisError):
    """A rollout has several samples, and the trainer takes one row a rollout."""


class UnscoredRollout(LachesisError):
    """A rollout has no score, and the trainer has no way to leave it out: it would count as 0."""


class RejectedRollout(LachesisError):
    """A sample does not pass its verification, or has what no row holds, so nothing of the rollout may be trained."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence for the trainer. All lists but `prompt_ids` are equally long."""

    prompt_ids: Sequence[int]
    """The tokens before the first trained span."""
    completion_ids: Sequence[int]
    env_mask: Sequence[int]
    """1 where a token was sampled and is trained; 0 everywhere in a rollout that was not scored."""
    logprobs: Sequence[float]
    """Of the sampled tokens; 0.0 elsewhere."""
    reward: float | None
    sample: TokenSample | None
    """What it was cut from; None where the rollout has none."""
    branches: int = 1
    """Samples of the rollout, without discarded attempts."""
    undelivered: int = 0
    """Sampled tokens of the rollout that no row of it trains."""


def refuse_not_written(rollout: Any, samples: Sequence[TokenSample]) -> None:
    """Raise RejectedRollout for samples that rows hold only in part."""
    if reasons := [reason for sample in samples for reason in not_written(sample)]:
        raise RejectedRollout(
            f"rollout {rollout.rollout_id} of item {rollout.item_key} cannot be trained here: {reasons[0]}; "
            "leave them out, or use a trainer on the rollout API, which gets them"
        )


def count_calls(seen: RepairedCalls, rollouts: Sequence[Any], name: str) -> None:
    """Count the calls of a group, and warn where it raises the alarm."""
    results = (rollout.result for rollout in rollouts)
    if alarm := seen.add(result.repaired_calls for result in results if result is not None):
        log.warning("%s: alarm: %s", name, alarm)


def call_figures(rollout: Any) -> dict[str, float]:
    """The share of a rollout's calls that the parser repaired; empty where it read none."""
    repaired, parsed = (0, 0) if rollout.result is None else rollout.result.repaired_calls
    return {"repaired_call_rate": repaired / parsed} if parsed else {}


def rows_of(
    rollout: Any,
    *,
    on_branches: OnBranches | None,
    taker: str,
    unchecked_prompts: Literal["refuse", "allow"] = "refuse",
    evaluation: bool = False,
    padding: int | None = None,
) -> list[Row]:
    """The rows of a finished `Rollout`; none where it was not scored.

    Args:
        on_branches: None makes a row of each sample.
        taker: takes one row a rollout, for messages.
        unchecked_prompts: see `GroupSettings`.
        evaluation: nothing is trained on them, so they may be sampled in any way.
        padding: the id that fills the row of a scored rollout with no token to train, such as one whose first
            completion was never finished: its score counts. None makes no row of it.

    Raises:
        BranchedRollout: it has several samples, and `on_branches` is "error".
        RejectedRollout: a sample fails its verification, or has images, routed experts or sampling masks.
    """
    samples: Sequence[TokenSample] = rollout.samples
    found = [sample for sample in samples if not sample.discarded]
    if rollout.reward is None or (padding is None and not found):
        return []
    if not found and padding is not None:
        left = samples[0].sampled if samples else 0
        return [Row([padding], [padding], [0], [0.0], float(rollout.reward), None, 0, left)]
    if evaluation:
        return [Row(*_cut(sample), float(rollout.reward), sample, len(found)) for sample in found[:1]]
    if len(found) > 1 and on_branches == "error":
        raise BranchedRollout(
            f"rollout {rollout.rollout_id} of item {rollout.item_key} has {len(found)} samples, because its "
            "conversation was edited, compacted, sampled several times or had sub-agents, and "
            f"{taker} takes one row a rollout; set on_branches='last' to train the path on which the conversation "
            "ended, or 'longest' for the sample with the most sampled tokens"
        )
    settings = GroupSettings(
        group_size=1,
        split_rollouts=_SPLITS.get(on_branches, SplitRollouts.FINAL),
        ensure_scores_are_not_same=False,
        unchecked_prompts=unchecked_prompts,
    )
    group = build_group([RolloutSamples(rollout.rollout_id, rollout.reward, samples)], settings)
    if isinstance(group, RejectedGroup):
        raise RejectedRollout(
            f"rollout {rollout.rollout_id} of item {rollout.item_key} cannot be trained ({group.reason.value}): "
            f"{group.detail}"
        )
    refuse_not_written(rollout, group.samples)
    left = samples[0].sampled - group.delivered
    return [Row(*_cut(sample), float(rollout.reward), sample, len(found), left) for sample in group.samples]


def row_of(rollout: Any, *, on_branches: OnBranches, padding: int) -> Row:
    """The row of a finished `Rollout` for TRL; see `rows_of`.

    A rollout without a reward is a row in which no token is trained, and its reward is None. `padding` is the id that
    fills the row of a rollout without any sample.
    """
    if rows := rows_of(rollout, on_branches=on_branches, taker="rollout_func of TRL"):
        return rows[0]
    # What the agent only tried, and what nobody scored, says nothing about what to train.
    samples: Sequence[TokenSample] = rollout.samples
    found = [sample for sample in samples if not sample.discarded]
    sampled = samples[0].sampled if samples else 0
    if not found:
        return Row([padding], [padding], [0], [0.0], None, None, 0, sampled)
    prompt, completion, _, logprobs = _cut(found[0])
    return Row(prompt, completion, [0] * len(completion), logprobs, None, found[0], len(found), sampled)


def _cut(sample: TokenSample) -> tuple[list[int], list[int], list[int], list[float]]:
    start = sample.spans[0].start
    mask = [int(token != MASKED) for token in sample.masks[start:]]
    logprobs = [value if trained else 0.0 for value, trained in zip(sample.logprobs[start:], mask, strict=True)]
    return sample.tokens[:start], sample.tokens[start:], mask, logprobs
