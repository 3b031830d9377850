"""What a reward function returns, and the check of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of a rollout with its parts.

    `compute_reward` and `compute_group_reward` may return it instead of a number.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the value by name. Each becomes the metric `reward/NAME`: a column of the report, a key of W&B."""
    turn_rewards: Sequence[float] | None = None
    """One number for every turn of the rollout (`result.turns_used`). They travel with the rollout to the trainer."""


class RewardError(Exception):
    """A reward function returned something that is no score, or took too long. An error of the environment."""


def checked_reward(given: Any, *, turns: int, source: str) -> Reward | None:
    """What a reward function returned, as a `Reward`; None leaves the rollout out.

    Args:
        turns: turns of the rollout, for `turn_rewards`.
        source: the environment and its method, for the message.

    Raises:
        RewardError: not a finite number, or the wrong number of turns.
    """
    if given is None:
        return None
    if not isinstance(given, Reward):
        return Reward(finite_number(given, f"{source} returned"))
    if not isinstance(given.components, Mapping):
        raise RewardError(f"{source}: components is a mapping of names to numbers, not {given.components!r}")
    turn_rewards = None
    if given.turn_rewards is not None:
        if isinstance(given.turn_rewards, str | bytes) or not hasattr(given.turn_rewards, "__iter__"):
            raise RewardError(f"{source}: turn_rewards is a list of numbers, not {given.turn_rewards!r}")
        turn_rewards = tuple(finite_number(value, f"{source}: turn_rewards has") for value in given.turn_rewards)
        if len(turn_rewards) != turns:
            raise RewardError(
                f"{source}: turn_rewards has {len(turn_rewards)} numbers for {turns} turns; give one for each turn"
            )
    components = {
        str(name): finite_number(value, f"{source}: component {str(name)!r} is")
        for name, value in given.components.items()
    }
    return Reward(finite_number(given.value, f"{source} returned"), components, turn_rewards)


def checked_group(given: Any, *, turns: Sequence[int], source: str) -> list[Reward | None]:
    """What a group's reward function returned: one entry for each rollout, each as `checked_reward` takes it."""
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__") or not hasattr(given, "__iter__"):
        raise RewardError(f"{source} returned {given!r}; it has to be a list with one reward for each rollout")
    rewards = list(given)
    if len(rewards) != len(turns):
        raise RewardError(f"{source} returned {len(rewards)} rewards for {len(turns)} rollouts; give one for each")
    return [checked_reward(entry, turns=count, source=source) for entry, count in zip(rewards, turns, strict=True)]


def finite_number(value: Any, what: str) -> float:
    """`value` as a finite float. `what` begins the message of the `RewardError` that is raised otherwise."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardError(f"{what} {value!r}; it has to be a number, or None to leave the rollout out") from None
    if not math.isfinite(number):
        raise RewardError(f"{what} {number}; it has to be finite")
    return number
