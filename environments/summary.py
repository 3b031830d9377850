"""Figures over many rollouts, from their records: for the table, the report, W&B and metrics.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.intervals import Mean, mean_over_items


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. Rewards are over scored rollouts only; everything else is over all of them."""

    items: int
    rollouts: int
    scored: int
    reward: Mean
    outcomes: Mapping[str, int]
    turns: float
    """Mean per rollout; the same for the next two."""
    tool_calls: float
    tool_errors: float
    tool_use_rate: float
    """Share of rollouts with at least one tool call."""
    completion_tokens: int
    uncounted_requests: int
    exceptions: int
    retried: int
    """Rollouts that needed more than one start."""
    discarded: int
    """Completions that were rolled back."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of the environment's own metrics over the rollouts that have them."""


def summarise(groups: Iterable[Mapping[str, Any]]) -> Summary:
    """Figures of group records (`environments.records.group_record`)."""
    groups = list(groups)
    rollouts: list[Mapping[str, Any]] = [rollout for group in groups for rollout in group["rollouts"]]
    count = len(rollouts) or 1
    own: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout["metrics"].items():
            own.setdefault(name, []).append(value)
    return Summary(
        items=len(groups),
        rollouts=len(rollouts),
        scored=sum(rollout["reward"] is not None for rollout in rollouts),
        reward=mean_over_items([_rewards(group["rollouts"]) for group in groups]),
        outcomes=dict(Counter(rollout["outcome"] for rollout in rollouts).most_common()),
        turns=sum(rollout["turns"] for rollout in rollouts) / count,
        tool_calls=sum(rollout["tool_calls"] for rollout in rollouts) / count,
        tool_errors=sum(len(rollout["tool_errors"]) for rollout in rollouts) / count,
        tool_use_rate=sum(rollout["tool_calls"] > 0 for rollout in rollouts) / count,
        completion_tokens=sum(rollout.get("completion_tokens", 0) for rollout in rollouts),
        uncounted_requests=sum(rollout.get("uncounted_requests", 0) for rollout in rollouts),
        exceptions=sum(rollout["traceback"] is not None for rollout in rollouts),
        retried=sum(rollout["attempts"] > 1 for rollout in rollouts),
        discarded=sum(len(rollout["discarded"]) for rollout in rollouts),
        metrics={name: sum(values) / len(values) for name, values in sorted(own.items())},
    )


def _rewards(rollouts: Sequence[Mapping[str, Any]]) -> list[float]:
    return [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]


def evaluation_metrics(summary: Summary) -> dict[str, float | int]:
    """What `evaluate` writes to metrics.json."""
    metrics: dict[str, float | int] = {
        "eval/avg_reward": summary.reward.mean,
        "eval/avg_reward_low": summary.reward.low,
        "eval/avg_reward_high": summary.reward.high,
        "eval/items": summary.items,
        "eval/scored_rollouts": summary.scored,
        "eval/left_out_rollouts": summary.rollouts - summary.scored,
        "eval/avg_turns": summary.turns,
        "eval/avg_tool_calls": summary.tool_calls,
        "eval/tool_use_rate": summary.tool_use_rate,
        "eval/avg_tool_errors": summary.tool_errors,
    }
    metrics.update({f"eval/outcome/{name}": count for name, count in summary.outcomes.items()})
    metrics.update({f"eval/{name}": value for name, value in summary.metrics.items()})
    return metrics


def training_metrics(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is logged for the groups that were finished since the last time."""
    if not groups:
        return {}
    summary = summarise(groups)
    metrics: dict[str, Any] = {
        "train/total_rollouts": summary.rollouts,
        "train/items_rejected": summary.rollouts - summary.scored,
        "train/avg_turns": summary.turns,
        "train/avg_tool_calls": summary.tool_calls,
        "train/tool_use_rate": summary.tool_use_rate,
        "train/tool_errors_count": sum(len(r["tool_errors"]) for group in groups for r in group["rollouts"]),
        "train/discarded_completions": summary.discarded,
    }
    if summary.scored:
        metrics["train/avg_reward"] = summary.reward.mean
    metrics.update({f"train/outcome/{name}": count for name, count in summary.outcomes.items()})
    metrics.update({f"train/{name}": value for name, value in summary.metrics.items()})
    return metrics
