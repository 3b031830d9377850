"""What is counted of rollouts: one fold over the records of their groups.

The table at the end, the live line, the report, W&B, `metrics.json` and `statistics.json` are views of it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from lachesis.figures.exclusion import Exclusions, of_record
from lachesis.figures.intervals import mean_of, mean_over_items
from lachesis.figures.item_keys import whole_and_part
from lachesis.figures.repaired_calls import RepairedCalls
from lachesis.figures.summary import Summary
from lachesis.figures.tool_failures import ToolFailures

_SUMS = (
    *("scored", "completion_tokens", "uncounted_requests", "discarded", "agent_faults", "in_place"),
    *("branched", "inherited_tokens", "beside", "interrupts", "compressions", "failed_compressions"),
    "cached_tokens",
)
"""Counts that are in `Summary` as they are."""


class Figures:
    """Takes group records (`group_record`) one at a time, and keeps none of their messages.

    Args:
        items: the scores are kept of so many of the latest items; None for all.
        whole: False keeps counts and rewards only, so that a run of a million rollouts takes a few megabytes.
    """

    def __init__(self, *, items: int | None = None, whole: bool = True) -> None:
        self.groups = 0
        self.counts = Counter[str]()
        """`rollouts`, `scored`, `turns`, `completion_tokens` and others: sums over the rollouts."""
        self.outcomes = Counter[str]()
        self.unscored = Counter[str]()
        """Rollouts without a score, by kind."""
        self.rewards = array("d")
        """Every reward that was given, in order."""
        self.scores: dict[str, list[float | None]] = {}
        """Key of an item -> the scores of its rollouts; None for one that has none."""
        self.forgot = False
        """Whether there were more items than `items`."""
        self.repaired = RepairedCalls()
        self.tool_failures = ToolFailures()
        self._items = items
        self._whole = whole
        self._categories: dict[str, str] = {}
        self._seconds = [0.0, 0.0]
        self._most_versions = 0
        self._first_version: str | None = None
        self._trains = False
        """Whether other weights than the first ones sampled something."""
        self._metrics: dict[str, ItemValues] = {}
        self._numbers: dict[str, int] = {}
        """The number of each item, by its key."""
        self._weights: dict[str, float] = {}
        self._exclusions = Exclusions()
        self._priced, self._cost, self._without_cost = False, 0.0, 0
        self._uncompressed_because = ""

    def add(self, group: Mapping[str, Any], *, earlier: bool = False) -> None:
        """Count a group, or a part of one: its `item_key` and the records of its `rollouts`.

        `earlier`: an earlier start played it. Its scores and outcomes count, and not what it took.
        """
        rollouts: list[Mapping[str, Any]] = group["rollouts"]
        item, _ = whole_and_part(group["item_key"])
        self.groups += 1
        if self._items != 0:
            self.scores.setdefault(item, []).extend(rollout["reward"] for rollout in rollouts)
            if self._items is not None and len(self.scores) > self._items:
                self.forgot = True
                del self.scores[next(iter(self.scores))]
        for rollout in rollouts:
            self.outcomes[rollout["outcome"]] += 1
            if rollout["reward"] is not None:
                self.rewards.append(rollout["reward"])
            elif kind := of_record(rollout).kind:
                self.unscored[kind] += 1
        if earlier:
            return
        self.repaired.add([rollout.get("repaired_calls", (0, 0)) for rollout in rollouts])
        beside = group.get("beside") or {}
        self.counts["beside"] += beside.get("completion_tokens", 0)
        for rollout in rollouts:
            self._count(rollout, item)
        for each in (*rollouts, *([beside] if beside else ())):
            self._priced = self._priced or "cost" in each
            self._cost += each.get("cost") or 0.0
            self._without_cost += each.get("cost") is None
        if self._whole:
            if (category := group.get("category")) is not None:
                self._categories[item] = category
            self._exclusions.add_group(group)

    def _count(self, rollout: Mapping[str, Any], item: str) -> None:
        self.tool_failures.add_record(rollout)
        self.counts.update(
            rollouts=1,
            scored=rollout["reward"] is not None,
            completed=bool(rollout.get("completed")),
            turns=rollout["turns"],
            tool_calls=rollout["tool_calls"],
            tool_errors=len(rollout["tool_errors"]),
            tool_users=rollout["tool_calls"] > 0,
            prompt_tokens=rollout.get("prompt_tokens", 0),
            completion_tokens=rollout.get("completion_tokens", 0),
            cached_tokens=rollout.get("cached_tokens", 0) + rollout.get("lost_cached_tokens", 0),
            lost_prompt_tokens=rollout.get("lost_prompt_tokens", 0),
            lost_completion_tokens=rollout.get("lost_completion_tokens", 0),
            uncounted_requests=rollout.get("uncounted_requests", 0) + rollout.get("lost_uncounted_requests", 0),
            branched="inherited_tokens" in rollout,
            inherited_tokens=rollout.get("inherited_tokens", 0),
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
            self.counts.update(["compressions" if edit["error"] is None else "failed_compressions"])
            self._uncompressed_because = edit["error"] or self._uncompressed_because
        for place, name in enumerate(("seconds_own", "seconds_waiting")):
            self._seconds[place] += rollout.get(name, 0.0)
        for name, value in rollout["metrics"].items() if self._whole else ():
            number = self._numbers.setdefault(item, len(self._numbers))
            self._metrics.setdefault(name, ItemValues()).add(number, value)
        self._weights |= rollout.get("reward_weights") or {}

    @property
    def rollouts(self) -> int:
        """Rollouts that were added, without those of earlier starts."""
        return self.counts["rollouts"]

    @property
    def mean_reward(self) -> float | None:
        """Over all rollouts, whichever their items; None where none has a score."""
        return fmean(self.rewards) if self.rewards else None

    @property
    def sampled(self) -> int:
        """Completion tokens, those of lost attempts included."""
        return self.counts["completion_tokens"] + self.counts["lost_completion_tokens"]

    @property
    def prompts(self) -> int:
        """Prompt tokens, those of lost attempts included."""
        return self.counts["prompt_tokens"] + self.counts["lost_prompt_tokens"]

    def summary(self, *, tests: bool = True) -> Summary:
        """The figures of all groups that were added; `tests`: with those of `Summary.exclusion`, which take time."""
        counts = self.counts
        count = self.rollouts or 1
        return Summary(
            items=len(self.scores),
            groups=self.groups,
            rollouts=self.rollouts,
            **{name: counts[name] for name in _SUMS},
            prompt_tokens=self.prompts,
            lost_completion_tokens=counts["lost_completion_tokens"],
            cost=self._cost if self._priced else None,
            without_cost=self._without_cost,
            reward=mean_over_items(list(self.scores.values())),
            outcomes=dict(sorted(self.outcomes.items(), key=lambda each: (-each[1], each[0]))),
            turns=counts["turns"] / count,
            tool_calls=counts["tool_calls"] / count,
            failed_calls=counts["tool_errors"],
            tool_use_rate=counts["tool_users"] / count,
            seconds_own=self._seconds[0] / count,
            seconds_waiting=self._seconds[1] / count,
            uncompressed_because=self._uncompressed_because,
            versions=counts["versions"] / (counts["versioned"] or 1),
            most_versions=self._most_versions,
            repaired=self.repaired,
            tool_failures=self.tool_failures,
            unlearns_calls=self.repaired.alarm if self._trains else "",
            metrics={name: mean_of([*map(mean_of, of)]) for name, of in sorted(self._metrics.items())},
            metric_scores=dict(self._metrics),
            weights=dict(self._weights),
            exclusion=self._exclusions.result() if tests else self._exclusions.rates(),
            scores=dict(sorted(self.scores.items())),
            category_of=dict(self._categories),
        )


class ItemValues:
    """Values of rollouts in 16 bytes each. Iterating gives those of each item: there may be many metrics of many."""

    def __init__(self) -> None:
        self._items, self._values = array("L"), array("d")

    def add(self, item: int, value: float) -> None:
        self._items.append(item)
        self._values.append(value)

    def __iter__(self) -> Iterator[list[float]]:
        found: dict[int, list[float]] = {}
        for item, value in zip(self._items, self._values, strict=True):
            found.setdefault(item, []).append(value)
        return iter(found.values())


def _completions(discarded: Sequence[Mapping[str, Any]]) -> int:
    """Completions that were taken back: those in discarded branches, except in what an edit left."""
    taken_back = [branch["messages"] for branch in discarded if not branch.get("edit")]
    return sum(message["role"] == "assistant" for messages in taken_back for message in messages)
