"""The figures of a batch run, from the records of its groups, and the caps that end it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lachesis.evaluation.repaired_calls import RepairedCalls
from lachesis.runs.figures import Figures
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


class Totals:
    """Counts over the samples of a run, earlier starts included."""

    def __init__(self) -> None:
        self._kept, self._finished, self._failed, self._again = (Figures(items=0, whole=False) for _ in range(4))
        self.reasoning = Counter[str]()

    def add(self, kind: str, record: Mapping[str, Any]) -> None:
        """Count a sample. `kind`: `kept`, `discarded`, `failed`, or `again` for one that failed and is played again,
        whose tokens were spent."""
        if record.get("bad_input"):
            record = {**record, "rollouts": [{**rollout, "outcome": "bad_input"} for rollout in record["rollouts"]]}
        if kind in ("failed", "again"):
            (self._failed if kind == "failed" else self._again).add(record)
            return
        self._finished.add(record)
        if kind == "kept":
            self._kept.add(record)
        if (reasoning := record.get("reasoning")) is not None:
            self.reasoning.update({"turns": reasoning[1], "turns_with_reasoning": reasoning[0]})

    @property
    def kept(self) -> int:
        return self._kept.groups

    @property
    def discarded(self) -> int:
        return self._finished.groups - self._kept.groups

    @property
    def failed(self) -> int:
        return self._failed.groups

    @property
    def done(self) -> int:
        return self._finished.groups + self._failed.groups

    @property
    def completed(self) -> int:
        """Of those that are kept."""
        return self._kept.counts["completed"]

    @property
    def prompt_tokens(self) -> int:
        return sum(each.counts["prompt_tokens"] for each in self._all)

    @property
    def completion_tokens(self) -> int:
        """Attempts that were lost included, as far as they are known."""
        return sum(each.sampled for each in self._all)

    @property
    def uncounted(self) -> int:
        """Requests of which the server counted no tokens."""
        return self._finished.counts["uncounted_requests"] + self._failed.counts["uncounted_requests"]

    @property
    def repaired(self) -> RepairedCalls:
        return self._finished.repaired

    @property
    def tool_failures(self) -> ToolFailures:
        return self._finished.tool_failures

    @property
    def outcomes(self) -> Counter[str]:
        """Of the failures; `bad_input` where a row names an image that does not exist."""
        return self._failed.outcomes

    @property
    def mean_reward(self) -> float | None:
        """Of those that are kept."""
        return fmean(self._kept.rewards) if self._kept.rewards else None

    @property
    def _all(self) -> tuple[Figures, ...]:
        return self._finished, self._failed, self._again

    def statistics(self, all_tools: Iterable[str]) -> dict[str, Any]:
        """The fields of `statistics.json` that follow from the samples."""
        tools: dict[str, dict[str, float]] = {}
        calls, failures = self.tool_failures.calls, self.tool_failures.failed
        for name in dict.fromkeys([*all_tools, *calls]):
            count, failure = calls[name], failures[name]
            tools[name] = {"count": count, "success": count - failure, "failure": failure}
            for kind in ("success", "failure"):
                tools[name][f"{kind}_rate"] = round(100 * tools[name][kind] / (count or 1), 2)
        turns, thinking = self.reasoning["turns"], self.reasoning["turns_with_reasoning"]
        return {
            "samples": self.kept,
            "completed": self.completed,
            "discarded_no_reasoning": self.discarded,
            "failed": self.failed,
            "failed_outcomes": dict(self.outcomes),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "mean_reward": self.mean_reward,
            "repaired_call_rate": self.repaired.share,
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
