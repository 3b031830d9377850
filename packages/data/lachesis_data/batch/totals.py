"""The figures of a batch run, from the records of its groups, and the caps that end it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from lachesis.runs.tool_failures import ToolFailures

MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What ends a run early. Samples in flight then get `grace_period` to finish."""

    seconds: float | None = None
    """Of this start."""
    tokens: int | None = None
    """Completion tokens of the run, earlier starts included; so is the cost."""
    cost: float | None = None
    prices: tuple[float, float] | None = None
    """Of a million tokens of prompts and of completions."""

    def reached(self, totals: Totals, started: float) -> str:
        """Why the run has to end; empty while it need not."""
        if self.seconds is not None and time.monotonic() - started >= self.seconds:
            return f"--max_seconds {self.seconds:g} is reached; start again to continue"
        if (self.tokens is not None or self.cost is not None) and totals.uncounted:
            return "the server counts no tokens, so that --max_total_tokens and --max_cost cannot hold"
        if self.tokens is not None and totals.completion_tokens >= self.tokens:
            return f"--max_total_tokens {self.tokens} is reached; start again with more to continue"
        if self.cost is not None and (cost := self.cost_of(totals) or 0.0) >= self.cost:
            return f"--max_cost {self.cost:g} is reached ({cost:.4f}); start again with more to continue"
        return ""

    def cost_of(self, totals: Totals) -> float | None:
        """What the tokens cost; None without prices."""
        if self.prices is None:
            return None
        return (totals.prompt_tokens * self.prices[0] + totals.completion_tokens * self.prices[1]) / MILLION


@dataclass(slots=True)
class Totals:
    """Counts over the samples of a run, earlier starts included."""

    kept: int = 0
    discarded: int = 0
    failed: int = 0
    completed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Attempts that were lost included, as far as they are known."""
    uncounted: int = 0
    """Requests of which the server counted no tokens."""
    repaired_calls: int = 0
    """Calls that the parser repaired, of `parsed_calls` that it read."""
    parsed_calls: int = 0
    tools: dict[str, Counter[str]] = field(default_factory=dict)
    tool_failures: ToolFailures = field(default_factory=ToolFailures)
    reasoning: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    """Of the failures; `bad_input` where a row names an image that does not exist."""
    rewards: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.kept + self.discarded + self.failed

    def add(self, kind: str, record: Mapping[str, Any]) -> None:
        """Count a sample. `kind`: `kept`, `discarded` or `failed`."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.completion_tokens += completion_tokens(record)
        for rollout in record["rollouts"]:
            self.prompt_tokens += rollout.get("prompt_tokens", 0)
            self.uncounted += rollout.get("uncounted_requests", 0)
            if kind == "failed":
                self.outcomes["bad_input" if record.get("bad_input") else rollout["outcome"]] += 1
                continue
            repaired, parsed = rollout.get("repaired_calls", (0, 0))
            self.repaired_calls += repaired
            self.parsed_calls += parsed
            for name, stats in rollout["tool_stats"].items():
                self.tools.setdefault(name, Counter()).update(stats)
            self.tool_failures.add_record(rollout)
            if kind == "kept":
                self.completed += bool(rollout["completed"])
                if rollout["reward"] is not None:
                    self.rewards.append(rollout["reward"])
        if (reasoning := record.get("reasoning")) is not None:
            self.reasoning.update({"turns": reasoning[1], "turns_with_reasoning": reasoning[0]})

    @property
    def calls(self) -> Counter[str]:
        """`count`, `success` and `failure` over all tools."""
        return sum(self.tools.values(), Counter())

    def statistics(self, all_tools: Iterable[str]) -> dict[str, Any]:
        """The fields of `statistics.json` that follow from the samples."""
        tools: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys([*all_tools, *self.tools]):
            counts = self.tools.get(name, Counter())
            tools[name] = {kind: counts[kind] for kind in ("count", "success", "failure")}
            for kind in ("success", "failure"):
                tools[name][f"{kind}_rate"] = round(100 * counts[kind] / (counts["count"] or 1), 2)
        turns, thinking = self.reasoning["turns"], self.reasoning["turns_with_reasoning"]
        return {
            "samples": self.kept,
            "completed": self.completed,
            "discarded_no_reasoning": self.discarded,
            "failed": self.failed,
            "failed_outcomes": dict(self.outcomes),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "mean_reward": fmean(self.rewards) if self.rewards else None,
            "repaired_call_rate": self.repaired_calls / self.parsed_calls if self.parsed_calls else None,
            "tool_statistics": tools,
            "reasoning_statistics": {
                "total_assistant_turns": turns,
                "turns_with_reasoning": thinking,
                "turns_without_reasoning": turns - thinking,
            },
        }


def completion_tokens(record: Mapping[str, Any]) -> int:
    """Completion tokens of a record, those of its lost attempts included."""
    return sum(each.get("completion_tokens", 0) + each["lost_completion_tokens"] for each in record["rollouts"])
