"""How a rollout with several samples is sent: settings of runs, and of groups for a trainer."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, TypeAlias

LARGEST_REWARD: Final = 1e100
"""Rewards of a larger magnitude are rejected: the sum of their squares overflows."""


class SplitRollouts(StrEnum):
    """The treatment of a rollout with several samples (after an edit, a compaction, a sub-agent, a retry)."""

    FINAL = "final"
    """Send one sample a rollout: the path on which its conversation ended. Count the others as undelivered. Groups have
    exactly `group_size` sequences, which the stock rollout API can pack into batches."""
    LONGEST = "longest"
    """The same with the sample that trains the most tokens, which may be a branch that the conversation left."""
    ALL = "all"
    """Send all samples, with the advantages of their tokens and the number of samples in `group_overrides`. Needs a
    rollout API that takes groups of any size and a trainer that reads `advantages`: see `NO_SPLIT_GROUPS`."""


DiscardedAttempts: TypeAlias = Literal["none", "rollout"] | float
"""The reward of a discarded attempt (`TokenSample.discarded`): none, and it is not sent; the reward of its rollout; or
a number of at most 0 instead of that reward."""


def check_split(split: SplitRollouts, attempts: DiscardedAttempts) -> None:
    """Raises ValueError for settings of which one would have no effect."""
    if isinstance(attempts, float | int) and not -LARGEST_REWARD <= attempts <= 0:
        raise ValueError(f"discarded_attempts is {attempts!r}; a penalty is a number of at most 0")
    if split is SplitRollouts.FINAL and attempts != "none":
        raise ValueError(
            f"discarded_attempts {attempts} has no effect with split_rollouts final, which sends no discarded attempt; "
            "set split_rollouts all, or discarded_attempts none"
        )
    if split is SplitRollouts.LONGEST and attempts not in ("none", "rollout"):
        raise ValueError(
            f"discarded_attempts {attempts} has no effect with split_rollouts longest, where the sample that is sent "
            "earns the reward of the rollout; set split_rollouts all, or discarded_attempts none or rollout"
        )
