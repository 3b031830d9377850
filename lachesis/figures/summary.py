"""The figures of a run: for the table that it ends with, the report, W&B and metrics.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from backends.text import counted
from lachesis.figures.exclusion import Exclusion
from lachesis.figures.intervals import Mean, Scores, mean_over_items
from lachesis.figures.repaired_calls import RepairedCalls
from lachesis.figures.tool_failures import ToolFailures

BUILTIN_FIGURES = frozenset(
    {
        *("avg_reward", "avg_reward_low", "avg_reward_high", "items", "scored_rollouts", "left_out_rollouts"),
        *("avg_reward_worst_case", "avg_reward_best_case"),
        *("avg_turns", "avg_tool_calls", "tool_use_rate", "avg_tool_errors"),
        *("total_rollouts", "items_rejected", "tool_errors_count", "discarded_completions"),
        *("agent_faults", "avg_seconds_own", "avg_seconds_waiting", "compressions", "failed_compressions"),
        *("prompt_tokens", "completion_tokens", "total_cost", "avg_cost"),
        *("unscored_alarm", "unscored_items", "repaired_call_rate", "repaired_calls_alarm"),
    }
)
"""Names that metrics of an environment cannot have: they are keys of W&B and of metrics.json."""

BUILTIN_PREFIXES = ("pass@", "pass^", "category/", "reward/", "outcome/", "unscored/", "unscored_p/", "scored_by_rule/")
"""Beginnings of such names."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Rewards are over scored rollouts only; everything else is over all of them."""

    items: int
    groups: int
    """Further ones of an item included: those that its environment returned, or its samples in an evaluation."""
    rollouts: int
    scored: int
    reward: Mean
    outcomes: Mapping[str, int]
    turns: float
    """Mean per rollout; the same for the next one."""
    tool_calls: float
    failed_calls: int
    """Of all rollouts together."""
    tool_use_rate: float
    """Share of rollouts with at least one tool call."""
    completion_tokens: int
    """Without those of lost attempts."""
    uncounted_requests: int
    discarded: int
    """Completions that were rolled back."""
    prompt_tokens: int = 0
    """Of all requests, lost attempts included; so are `cached_tokens`, those of them that servers had in caches."""
    cached_tokens: int = 0
    lost_completion_tokens: int = 0
    """Of attempts that broke and were played again."""
    cost: float | None = None
    """By the prices of the run, lost attempts included, as far as it is known; None without prices."""
    without_cost: int = 0
    """Rollouts whose cost is unknown."""
    agent_faults: int = 0
    """Rollouts whose score was decided by damage that the agent did to its own sandbox."""
    seconds_own: float = 0.0
    """Mean per rollout of the agent's own time; the same of the time that servers and sandboxes took."""
    seconds_waiting: float = 0.0
    in_place: int = 0
    """Rollouts that were graded in their agent's sandbox, where the agent can forge everything."""
    branched: int = 0
    """Rollouts that branched off another one: not independent of it."""
    inherited_tokens: int = 0
    """Completion tokens that these did not sample again; not included in `completion_tokens`."""
    beside: int = 0
    """Completion tokens that the environment sampled outside its rollouts; not included in the other numbers."""
    interrupts: int = 0
    """How often a completion was aborted and went on."""
    compressions: int = 0
    """How often a context was compressed; the next two: how often it failed, and why the last time."""
    failed_compressions: int = 0
    uncompressed_because: str = ""
    versions: float = 0.0
    """Mean versions of the weights in a rollout of which they are known; 0 where there is none."""
    most_versions: int = 0
    repaired: RepairedCalls = field(default_factory=RepairedCalls)
    unlearns_calls: str = ""
    """The alarm about `repaired`, of a run in which the weights changed."""
    tool_failures: ToolFailures = field(default_factory=ToolFailures)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of reward components and of the environment's metrics, over the rollouts that have them: as of the reward,
    of each item first. So the mean reward is the sum of its components' means, each times its weight."""
    metric_scores: Mapping[str, Iterable[Sequence[float]]] = field(default_factory=dict)
    """What these are the means of: the values of each item's rollouts."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the components in the reward, by name, where it is their sum."""
    exclusion: Exclusion = field(default_factory=Exclusion)
    """Which rollouts have no score, and whether that depends on something."""
    scores: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Key of an item -> the scores of its rollouts; None for one that has none."""
    category_of: Mapping[str, str] = field(default_factory=dict)
    """Key of an item -> its category, where it has one."""

    @property
    def tool_errors(self) -> float:
        """Failed calls, mean per rollout."""
        return self.failed_calls / (self.rollouts or 1)

    def cost_rows(self) -> Iterator[tuple[str, str]]:
        """Tokens and their cost. What a server did not count is said, and is never 0."""
        if self.uncounted_requests:
            yield "tokens", f"unknown: those of {counted(self.uncounted_requests, 'request')} were not counted"
        elif self.prompt_tokens or self.completion_tokens:
            cached = f" ({self.cached_tokens:,} cached)" if self.cached_tokens else ""
            sampled = self.completion_tokens + self.lost_completion_tokens
            lost = f", {self.lost_completion_tokens:,} of them lost with broken attempts"
            yield (
                "tokens",
                f"{self.prompt_tokens:,} of prompts{cached}, {sampled:,} sampled"
                + (lost if self.lost_completion_tokens else ""),
            )
        if self.cost is None:
            return
        unknown = f"unknown for {self.without_cost} of {counted(self.rollouts, 'rollout')}"
        each = f"{self.cost:.4f}, {self.cost / (self.rollouts or 1):.4f} a rollout"
        yield (
            "cost",
            each if not self.without_cost else f"at least {self.cost:.4f}; {unknown}" if self.cost else unknown,
        )

    def cost_metrics(self) -> dict[str, float]:
        """Tokens and cost, as far as they are known as a whole."""
        found: dict[str, float] = {}
        if not self.uncounted_requests:
            found["prompt_tokens"] = self.prompt_tokens
            found["completion_tokens"] = self.completion_tokens + self.lost_completion_tokens
        if self.cost is not None and not self.without_cost:
            found |= {"total_cost": self.cost, "avg_cost": self.cost / (self.rollouts or 1)}
        return found

    def call_metrics(self) -> dict[str, float]:
        """The share of calls that the parser repaired; empty where it read none."""
        return {} if self.repaired.share is None else {"repaired_call_rate": self.repaired.share}

    def compression_metrics(self) -> dict[str, int]:
        """The figures of compressions; empty where there was none."""
        counts = {"compressions": self.compressions, "failed_compressions": self.failed_compressions}
        return counts if any(counts.values()) else {}

    @property
    def categories(self) -> dict[str, Scores]:
        """The scores of the items of each category."""
        found: dict[str, list[Sequence[float | None]]] = {}
        for item, scores in self.scores.items():
            if (category := self.category_of.get(item)) is not None:
                found.setdefault(category, []).append(scores)
        return dict(sorted(found.items()))

    @property
    def rewards(self) -> set[float]:
        """The different rewards that were given."""
        return {score for scores in self.scores.values() for score in scores if score is not None}

    def figures(self) -> dict[str, tuple[Mean, float, float]]:
        """The figures of an evaluation by name. Each with its worst and its best case: what it would be if the samples
        without a score had failed, and if they had passed."""
        from lachesis.figures.passes import bounds, ks, pass_at_k, pass_hat_k  # late: of evaluations only

        scores = list(self.scores.values())
        of: dict[str, Callable[[Scores], Mean]] = {"avg_reward": mean_over_items}
        for k in ks(max(map(len, scores), default=0)):
            if k > 1:
                of |= {f"pass@{k}": partial(pass_at_k, k=k), f"pass^{k}": partial(pass_hat_k, k=k)}
        cases = {name: bounds(scores, figure) for name, figure in of.items()}
        return {name: (figure(scores), cases[name].worst, cases[name].best) for name, figure in of.items()}


def evaluation_metrics(summary: Summary) -> dict[str, float | int]:
    """The metrics that `eval` writes to metrics.json. Undefined ones are absent: NaN is not JSON."""
    figures: dict[str, float] = {}
    for name, (mean, worst, best) in summary.figures().items():
        figures |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high}
        figures |= {f"{name}_worst_case": worst, f"{name}_best_case": best}
    figures |= {f"category/{name}": mean_over_items(scores).mean for name, scores in summary.categories.items()}
    metrics: dict[str, float | int] = {
        **{name: value for name, value in figures.items() if math.isfinite(value)},
        "items": summary.items,
        "scored_rollouts": summary.scored,
        "left_out_rollouts": summary.rollouts - summary.scored,
        "avg_tool_errors": summary.tool_errors,
        **summary.exclusion.test_metrics(),
    }
    return {f"eval/{name}": value for name, value in (metrics | _of_every_run(summary)).items()}


def training_metrics(summary: Summary) -> dict[str, Any]:
    """The metrics of the groups that were finished since the last log."""
    if not summary.groups:
        return {}
    metrics: dict[str, Any] = {
        "total_rollouts": summary.rollouts,
        "items_rejected": summary.rollouts - summary.scored,
        "tool_errors_count": summary.failed_calls,
        "discarded_completions": summary.discarded,
        **({"avg_reward": summary.reward.mean} if summary.scored else {}),
    }
    return {f"train/{name}": value for name, value in (metrics | _of_every_run(summary)).items()}


def _of_every_run(summary: Summary) -> dict[str, float | int]:
    return {
        "avg_turns": summary.turns,
        "avg_tool_calls": summary.tool_calls,
        "tool_use_rate": summary.tool_use_rate,
        "agent_faults": summary.agent_faults,
        "avg_seconds_own": summary.seconds_own,
        "avg_seconds_waiting": summary.seconds_waiting,
        **{f"outcome/{name}": count for name, count in summary.outcomes.items()},
        **summary.cost_metrics(),
        **summary.call_metrics(),
        **summary.compression_metrics(),
        **summary.exclusion.shares(),
        **summary.metrics,
    }
