"""Figures over many rollouts, from their records: for the table, the report, W&B and metrics.json."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from lachesis.evaluation import Mean, Scores, bounds, ks, mean_over_items, pass_at_k, pass_hat_k
from lachesis.evaluation.intervals import mean_of
from lachesis.evaluation.repaired_calls import RepairedCalls
from lachesis.other_packages import PAGES
from lachesis.runs.exclusion import Exclusion, Exclusions, of_record
from lachesis.runs.item_keys import whole_and_part
from lachesis.runs.tool_failures import ToolFailures

BUILTIN_FIGURES = frozenset(
    {
        *("avg_reward", "avg_reward_low", "avg_reward_high", "items", "scored_rollouts", "left_out_rollouts"),
        *("avg_reward_worst_case", "avg_reward_best_case"),
        *("avg_turns", "avg_tool_calls", "tool_use_rate", "avg_tool_errors"),
        *("total_rollouts", "items_rejected", "tool_errors_count", "discarded_completions"),
        *("agent_faults", "avg_seconds_own", "avg_seconds_waiting", "compressions", "failed_compressions"),
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
    """Mean per rollout; the same for the next two."""
    tool_calls: float
    tool_errors: float
    tool_use_rate: float
    """Share of rollouts with at least one tool call."""
    completion_tokens: int
    uncounted_requests: int
    discarded: int
    """Completions that were rolled back."""
    agent_faults: int = 0
    """Rollouts whose score was decided by what the agent broke in its own sandbox."""
    seconds_own: float = 0.0
    """Mean per rollout of the agent's own time; the same of the time that servers and sandboxes took."""
    seconds_waiting: float = 0.0
    in_place: int = 0
    """Rollouts that were graded in the sandbox of their agent, which can forge what it finds there."""
    beside: int = 0
    """Completion tokens that the environment sampled beside its rollouts; in none of the other figures."""
    interrupts: int = 0
    """How often a completion was aborted and went on."""
    compressions: int = 0
    """How often a context was compressed; the next: how often it was tried in vain, and why the last time."""
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
    """Means of reward components and of the environment's metrics, over the rollouts that have them."""
    exclusion: Exclusion = field(default_factory=Exclusion)
    """Which rollouts have no score, and whether that depends on something."""
    scores: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Key of an item -> the scores of its rollouts; None for one that has none."""
    category_of: Mapping[str, str] = field(default_factory=dict)
    """Key of an item -> its category, where it has one."""

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
        scores = list(self.scores.values())
        of: dict[str, Callable[[Scores], Mean]] = {"avg_reward": mean_over_items}
        for k in ks(max(map(len, scores), default=0)):
            if k > 1:
                of |= {f"pass@{k}": partial(pass_at_k, k=k), f"pass^{k}": partial(pass_hat_k, k=k)}
        cases = {name: bounds(scores, figure) for name, figure in of.items()}
        return {name: (figure(scores), cases[name].worst, cases[name].best) for name, figure in of.items()}


class Summariser:
    """Takes group records (`group_record`) one at a time, and keeps none of their messages."""

    def __init__(self) -> None:
        self._groups = 0
        self._scores: dict[str, list[float | None]] = {}
        self._categories: dict[str, str] = {}
        self._outcomes: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._seconds = [0.0, 0.0]
        self._most_versions = 0
        self._first_version: str | None = None
        self._trains = False
        """Whether other weights than the first ones sampled something."""
        self._repaired = RepairedCalls()
        self._tool_failures = ToolFailures()
        self._metrics: dict[str, list[float]] = {}
        self._exclusions = Exclusions()
        self._uncompressed_because = ""

    def add(self, group: Mapping[str, Any]) -> None:
        rollouts: list[Mapping[str, Any]] = group["rollouts"]
        item, _ = whole_and_part(group["item_key"])
        self._groups += 1
        self._scores.setdefault(item, []).extend(rollout["reward"] for rollout in rollouts)
        if (category := group.get("category")) is not None:
            self._categories[item] = category
        self._exclusions.add(group["item_key"], map(of_record, rollouts))
        self._repaired.add(rollout.get("repaired_calls", (0, 0)) for rollout in rollouts)
        self._totals.update(beside=(group.get("beside") or {}).get("completion_tokens", 0))
        for rollout in rollouts:
            self._tool_failures.add_record(rollout)
            self._outcomes[rollout["outcome"]] += 1
            self._totals.update(
                rollouts=1,
                scored=rollout["reward"] is not None,
                turns=rollout["turns"],
                tool_calls=rollout["tool_calls"],
                tool_errors=len(rollout["tool_errors"]),
                tool_users=rollout["tool_calls"] > 0,
                completion_tokens=rollout.get("completion_tokens", 0),
                uncounted_requests=rollout.get("uncounted_requests", 0),
                discarded=_completions(rollout["discarded"]),
                agent_faults=bool(rollout.get("agent_fault")),
                in_place=(rollout.get("verifier") or {}).get("grading") == "in_place",
                interrupts=rollout.get("interrupts", 0),
                versions=(versions := len(rollout.get("policy_versions", ()))),
                versioned=versions > 0,
            )
            self._most_versions = max(self._most_versions, versions)
            for version in rollout.get("policy_versions", ()):
                self._first_version = self._first_version or version
                self._trains = self._trains or version != self._first_version
            for edit in rollout.get("context_edits", ()):
                self._totals.update(["compressions" if edit["error"] is None else "failed_compressions"])
                self._uncompressed_because = edit["error"] or self._uncompressed_because
            for place, name in enumerate(("seconds_own", "seconds_waiting")):
                self._seconds[place] += rollout.get(name, 0.0)
            for name, value in rollout["metrics"].items():
                self._metrics.setdefault(name, []).append(value)

    @property
    def groups(self) -> int:
        """Groups that were added."""
        return self._groups

    @property
    def tool_errors(self) -> int:
        """Calls that failed, over all rollouts."""
        return self._totals["tool_errors"]

    @property
    def rewards(self) -> list[float]:
        """Every reward that was given, in order."""
        return [score for scores in self._scores.values() for score in scores if score is not None]

    def summary(self, *, tests: bool = True) -> Summary:
        """The figures of all groups that were added; `tests`: with those of `Summary.exclusion`, which take time."""
        totals = self._totals
        count = totals["rollouts"] or 1
        return Summary(
            items=len(self._scores),
            groups=self._groups,
            rollouts=totals["rollouts"],
            scored=totals["scored"],
            reward=mean_over_items(list(self._scores.values())),
            outcomes=dict(sorted(self._outcomes.items(), key=lambda each: (-each[1], each[0]))),
            turns=totals["turns"] / count,
            tool_calls=totals["tool_calls"] / count,
            tool_errors=totals["tool_errors"] / count,
            tool_use_rate=totals["tool_users"] / count,
            completion_tokens=totals["completion_tokens"],
            uncounted_requests=totals["uncounted_requests"],
            discarded=totals["discarded"],
            agent_faults=totals["agent_faults"],
            seconds_own=self._seconds[0] / count,
            seconds_waiting=self._seconds[1] / count,
            in_place=totals["in_place"],
            beside=totals["beside"],
            interrupts=totals["interrupts"],
            compressions=totals["compressions"],
            failed_compressions=totals["failed_compressions"],
            uncompressed_because=self._uncompressed_because,
            versions=totals["versions"] / (totals["versioned"] or 1),
            most_versions=self._most_versions,
            repaired=self._repaired,
            tool_failures=self._tool_failures,
            unlearns_calls=self._repaired.alarm if self._trains else "",
            metrics={name: mean_of(values) for name, values in sorted(self._metrics.items())},
            exclusion=self._exclusions.result() if tests else self._exclusions.rates(),
            scores=dict(sorted(self._scores.items())),
            category_of=dict(self._categories),
        )


def evaluation_metrics(summary: Summary) -> dict[str, float | int]:
    """The metrics that `evaluate` writes to metrics.json. Undefined ones are absent: NaN is not JSON."""
    figures: dict[str, float] = {}
    for name, (mean, worst, best) in summary.figures().items():
        figures |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high}
        figures |= {f"{name}_worst_case": worst, f"{name}_best_case": best}
    figures |= {f"category/{name}": mean_over_items(scores).mean for name, scores in summary.categories.items()}
    metrics: dict[str, float | int] = {
        **{f"eval/{name}": value for name, value in figures.items() if math.isfinite(value)},
        "eval/items": summary.items,
        "eval/scored_rollouts": summary.scored,
        "eval/left_out_rollouts": summary.rollouts - summary.scored,
        "eval/avg_turns": summary.turns,
        "eval/avg_tool_calls": summary.tool_calls,
        "eval/tool_use_rate": summary.tool_use_rate,
        "eval/avg_tool_errors": summary.tool_errors,
        "eval/agent_faults": summary.agent_faults,
        "eval/avg_seconds_own": summary.seconds_own,
        "eval/avg_seconds_waiting": summary.seconds_waiting,
    }
    metrics.update({f"eval/outcome/{name}": count for name, count in summary.outcomes.items()})
    metrics.update({f"eval/{name}": value for name, value in summary.call_metrics().items()})
    metrics.update({f"eval/{name}": count for name, count in summary.compression_metrics().items()})
    exclusion = summary.exclusion
    metrics.update({f"eval/{name}": value for name, value in (exclusion.shares() | exclusion.test_metrics()).items()})
    metrics.update({f"eval/{name}": value for name, value in summary.metrics.items()})
    return metrics


def write_report(path: Path, *, title: str, groups: Iterable[Mapping[str, Any]]) -> Summary:
    """The figures of group records, and their page at `path`, which takes the package lachesis-view."""
    if "report" in PAGES.names():
        return cast(Summary, PAGES.load("report")(path, title=title, groups=groups))
    summariser = Summariser()
    for group in groups:
        summariser.add(group)
    return summariser.summary()


def training_metrics(finished: Summariser) -> dict[str, Any]:
    """The metrics of the groups that were finished since the last log."""
    if not finished.groups:
        return {}
    summary = finished.summary(tests=False)
    metrics: dict[str, Any] = {
        "train/total_rollouts": summary.rollouts,
        "train/items_rejected": summary.rollouts - summary.scored,
        "train/avg_turns": summary.turns,
        "train/avg_tool_calls": summary.tool_calls,
        "train/tool_use_rate": summary.tool_use_rate,
        "train/tool_errors_count": finished.tool_errors,
        "train/discarded_completions": summary.discarded,
        "train/agent_faults": summary.agent_faults,
        "train/avg_seconds_own": summary.seconds_own,
        "train/avg_seconds_waiting": summary.seconds_waiting,
    }
    if summary.scored:
        metrics["train/avg_reward"] = summary.reward.mean
    metrics.update({f"train/outcome/{name}": count for name, count in summary.outcomes.items()})
    metrics.update({f"train/{name}": value for name, value in summary.call_metrics().items()})
    metrics.update({f"train/{name}": count for name, count in summary.compression_metrics().items()})
    metrics.update({f"train/{name}": share for name, share in summary.exclusion.shares().items()})
    metrics.update({f"train/{name}": value for name, value in summary.metrics.items()})
    return metrics


def _completions(discarded: Sequence[Mapping[str, Any]]) -> int:
    """Completions that were taken back: those in discarded branches, except in what an edit left."""
    taken_back = [branch["messages"] for branch in discarded if not branch.get("edit")]
    return sum(message["role"] == "assistant" for messages in taken_back for message in messages)
