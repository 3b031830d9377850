"""Rewards of an environment: the decorator for named rewards, and checks of what a reward function returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Reward:
    """The score of a rollout with its parts.

    `compute_reward` and `compute_group_reward` may return it instead of a number.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the value by name. Each becomes the metric `reward/NAME`: a column of the report, a key of W&B."""
    turn_rewards: Sequence[float] | None = None
    """One number for every turn of the rollout (`result.turns_used`), which is sent to the trainer."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """If the value is the sum of all components, each times its weight: the weights, by name. Others are not recorded.
    Components are recorded without them; for named rewards they are known."""


_WEIGHT = "_reward_weight"


@overload
def reward(method: F, /) -> F: ...
@overload
def reward(*, weight: float) -> Callable[[F], F]: ...
def reward(method: Any = None, /, *, weight: float = 1.0) -> Any:
    """Turn a method of an environment into a named reward: `method(self, item, result, ctx)`, `async def` or plain
    `def`.

    It returns a finite number, or None to leave the rollout out. The score of a rollout is the weighted sum of its
    named rewards, plus `compute_reward` if there is one. Each named reward is also a component of the score, under the
    name of the method and without its weight; with `weight=0` it is only a component.

    Raises:
        TypeError: the weight is not a finite number, or the method cannot be called.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise TypeError(f"the weight of a reward is a finite number, not {weight!r}")
    if method is None:
        return lambda method: _named(method, float(weight))
    return _named(method, float(weight))


def _named(method: Any, weight: float) -> Any:
    if not callable(method):
        raise TypeError(f"@reward decorates a method, not {method!r}; a weight is written @reward(weight=0.5)")
    setattr(method, _WEIGHT, weight)
    return method


def reward_weights(cls: type) -> dict[str, float]:
    """The named rewards of a class with their weights, in the order of definition, base classes first.

    A method that replaces one without the decorator keeps its weight; None in its place removes it.

    Raises:
        TypeError: `compute_reward` or `compute_group_reward` is a named reward.
    """
    found: dict[str, float] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if value is None:
                found.pop(name, None)
            elif isinstance(weight := getattr(value, _WEIGHT, None), float):
                found[name] = weight
    if not found.keys().isdisjoint(("compute_reward", "compute_group_reward")):
        raise TypeError(f"{cls.__name__}: compute_reward and compute_group_reward take no @reward")
    return found


async def scored_otherwise(self: object, item: Any, result: Any, ctx: Any) -> float:
    """`compute_reward` of an environment that has other rewards only: it scores nothing and leaves nothing out."""
    return 0.0


async def scored_by_steps(self: Any, item: Any, result: Any, ctx: Any) -> Reward:
    """`compute_reward` of an environment with `step_rewards`."""
    values = [step.value for step in result.step_rewards]
    turns, tools = [0.0] * result.turns_used, dict[str, float]()
    for step in result.step_rewards:
        turns[step.turn - 1] += step.value
        tools[step.tool_name] = tools.get(step.tool_name, 0.0) + step.value
    value = sum(values) if self.step_rewards == "sum" else values[-1] if values else 0.0
    return Reward(value, tools, turn_rewards=turns)


class RewardError(Exception):
    """A reward function returned something that is not a score, or took too long. An error of the environment."""


class JudgeRefused(RewardError):
    """The judge, which answers other questions of the run, refuses this one because of its content or its length.

    That is the agent's doing where the statement that asked was passed by other rollouts.
    """

    def __init__(self, refused: Exception) -> None:
        self.refused = refused
        """As of a conversation of the agent with that server."""
        super().__init__(f"the judge refused the question: {refused}")


def checked_reward(given: Any, *, turns: int, source: str) -> Reward | None:
    """The result of a reward function as a `Reward`; None leaves the rollout out.

    Args:
        turns: turns of the rollout, for `turn_rewards`.
        source: the environment and its method, for the message.

    Raises:
        RewardError: not a finite number, the wrong number of turns, or weights that are no numbers.
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
        _printable(name): finite_number(value, f"{source}: component {str(name)!r} is")
        for name, value in given.components.items()
    }
    value = finite_number(given.value, f"{source} returned")
    return Reward(value, components, turn_rewards, _checked_weights(given.weights, components, value, source))


def _checked_weights(given: Any, components: Mapping[str, float], value: float, source: str) -> Mapping[str, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RewardError(f"{source}: weights is a mapping of names to numbers, not {given!r}")
    weights = {
        _printable(name): finite_number(weight, f"{source}: weight {str(name)!r} is") for name, weight in given.items()
    }
    try:
        total = math.fsum(weights[name] * part for name, part in components.items())
    except (KeyError, OverflowError, ValueError):  # one has no weight, or the sum is no finite number
        return {}
    explain = math.isclose(total, value, rel_tol=1e-6, abs_tol=1e-6)  # of float32 too; clipped sums are none
    return {name: weights[name] for name in components} if explain else {}


def _printable(name: object) -> str:
    """Halves of characters, which an agent may have left, as their escapes."""
    return str(name).encode(errors="backslashreplace").decode()


def checked_group(given: Any, *, turns: Sequence[int], source: str) -> list[Reward | None]:
    """The result of a group's reward function: one entry per rollout, each checked as in `checked_reward`."""
    ordered = isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)
    if not ordered and not (hasattr(given, "tolist") and hasattr(given, "__len__")):  # an array or a tensor
        raise RewardError(f"{source} returned {given!r}; it must be a list with one reward for each rollout")
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
        raise RewardError(f"{what} {value!r}; it must be a number, or None to leave the rollout out") from None
    if not math.isfinite(number):
        raise RewardError(f"{what} {number}; it must be finite")
    return number
