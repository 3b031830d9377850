"""The result of a grading: the numbers of a verdict file, the one that is the reward, and the record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lachesis.rewards.reward import Reward
from lachesis_envs.harbor.causes import Invalid
from lachesis_envs.task_folders import Task

_KEPT_OUTPUT = 64 << 10
"""Characters of the tests' output in a record: the first half and the last."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A reward, and what its record keeps."""

    reward: Reward
    rewards: Mapping[str, float]
    """All numbers of the verdict file."""
    record: dict[str, Any] = field(default_factory=dict)
    """`{"stdout", "rewards", "cause", "grading", "diff", "artifacts", "notes"}`."""


def lost(why: str, record: dict[str, Any], cause: str = "tampered") -> Verdict:
    """The verdict on an agent that put something in the way of its reward."""
    record |= {"cause": cause, "rewards": {"reward": 0.0}}
    record["notes"].append(why)
    parts = {"in_place": 1.0} if record["grading"] == "in_place" else {}
    return Verdict(Reward(0.0, components=parts), {"reward": 0.0}, record)


def parsed_rewards(data: bytes, path: str) -> dict[str, float]:
    """The numbers of a verdict file, as Harbor reads it.

    Raises:
        Invalid: it holds none.
    """
    if not data:
        raise Invalid("empty_reward_file", path)
    try:
        text = data.decode()
        found = json.loads(text, parse_int=float) if path.endswith(".json") else {"reward": float(text)}
    except (ValueError, RecursionError) as error:
        raise Invalid("not_a_reward", f"{path}: {error}: {data[:200]!r}") from None
    if not isinstance(found, dict):
        raise Invalid("not_a_reward", f"{path} holds {found!r:.200}, not an object of numbers")
    for name, value in found.items():
        if not isinstance(value, bool | float) or not math.isfinite(value):
            raise Invalid("not_a_reward", f"{path}: {name!r} is {value!r:.200}, not a finite number")
    return {name: float(value) for name, value in found.items()}


def verdict_of(task: Task, rewards: Mapping[str, float], record: dict[str, Any]) -> Verdict:
    key = str(task.own_settings.get("reward", "reward"))
    if key not in rewards and len(rewards) == 1:
        (key,) = rewards
    if key not in rewards:
        raise Invalid(
            "not_a_reward",
            f"no {key!r} among {', '.join(rewards) or 'no numbers'}. Next step: name the one that counts in task.toml, "
            '[metadata.lachesis] reward = "NAME"',
        )
    parts = {name: value for name, value in rewards.items() if name != key}
    if record["grading"] == "in_place":
        parts["in_place"] = 1.0  # beside the number in every table, metric and report
    return Verdict(Reward(rewards[key], components=parts), rewards, record)


def mean_of_steps(verdicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the steps; one that a step does not have is 0 there."""
    names = {name: None for rewards in verdicts for name in rewards}
    return {name: sum(rewards.get(name, 0.0) for rewards in verdicts) / len(verdicts) for name in names}


def below_minimum(rewards: Mapping[str, float], minimum: float | Mapping[str, float] | None) -> bool:
    """Whether the steps after this one are not run."""
    least = minimum if isinstance(minimum, Mapping) else {} if minimum is None else {"reward": minimum}
    return any(rewards.get(name, -math.inf) < value for name, value in least.items())


def shortened(text: str) -> str:
    if len(text) <= _KEPT_OUTPUT:
        return text
    half = _KEPT_OUTPUT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
