"""Advantages of rollouts and of the tokens of their samples.

A rollout has one reward, so it counts once in the baseline of its group, however many samples it splits into.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeAlias

from lachesis_messages.records.split_rollouts import LARGEST_REWARD
from lachesis_tokens.samples.samples import TokenSample

Advantage: TypeAlias = float | Sequence[float]
"""Of the trained tokens of a sample: one of all, or one of each of its spans."""


class LossAverage(StrEnum):
    """How a trainer averages the loss of a batch. It decides how samples are scaled so that a rollout counts once."""

    SAMPLE = "sample"
    """The mean over sequences of the mean over their trained tokens: samples carry advantage times weight."""
    TOKEN = "token"
    """The mean or the sum over all trained tokens of the batch: samples carry the advantage unchanged."""


def rollout_advantages(rewards: Sequence[float | None], *, normalise: bool = False) -> list[float | None]:
    """The reward minus the mean reward of the group's scored rollouts; None where a rollout has no reward.

    Args:
        rewards: one for each rollout of the group (not for each sample).
        normalise: divide by the population standard deviation.

    Where all scored rewards are equal, every advantage is exactly 0.

    Raises:
        ValueError: a reward is not finite, or beyond `LARGEST_REWARD`.
    """
    for at, reward in enumerate(rewards):
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            raise ValueError(f"reward {at} is {reward!r}; use None for a rollout without a finite reward")
    scored = [float(reward) for reward in rewards if reward is not None]
    if not scored or min(scored) == max(scored):
        # Not by subtraction: the mean of equal numbers can be off by one bit, which a division turns into 1.
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    distance, scale = spread(scored) if normalise else (1.0, 1.0)
    return [None if reward is None else (reward - mean) / distance * scale for reward in rewards]


def spread(rewards: Sequence[float]) -> tuple[float, float]:
    """Of rewards that are not all equal: their distance from the mean, and the root of their number. The first divided
    by the second is the population standard deviation, which may underflow."""
    mean = math.fsum(rewards) / len(rewards)
    # hypot, not squares: the squares of tiny differences underflow to 0.
    return math.hypot(*(reward - mean for reward in rewards)), math.sqrt(len(rewards))


def overlong(tokens: int, *, limit: int, buffer: int) -> float:
    """0 for a rollout of at most `limit` - `buffer` tokens, -1 from `limit` on, and linear between: the soft overlong
    punishment of DAPO (arXiv 2503.14476)."""
    return -min(max(tokens - limit + buffer, 0), buffer) / buffer


def sample_advantage(
    sample: TokenSample, advantage: float, average: LossAverage = LossAverage.SAMPLE, *, of: int | None = None
) -> float:
    """The advantage of every trained token of `sample`, from the advantage of its rollout.

    `of` is the number of tokens that all samples of the rollout train, where some samples are left out: the rollout
    then still counts once. None: all tokens that were sampled.
    """
    return advantage * sample.trained / (of or sample.sampled) if average is LossAverage.SAMPLE else advantage


def token_advantages(sample: TokenSample, advantage: Advantage) -> list[float]:
    """Its advantage where the sample trains, 0.0 elsewhere. As long as its tokens."""
    found = [0.0] * len(sample.tokens)
    values = advantage if isinstance(advantage, Sequence) else [advantage] * len(sample.spans)
    for span, value in zip(sample.spans, values, strict=True):
        found[span.start : span.end] = [value] * len(span)
    return found


def has_signal(advantage: Advantage) -> bool:
    """Whether it is not 0 everywhere."""
    return any(advantage) if isinstance(advantage, Sequence) else bool(advantage)
