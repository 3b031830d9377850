"""The figures of a batch run, from the records of its groups, and the caps that end it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lachesis.figures.costs import Prices
from lachesis.figures.figures import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Limits that end a run early. Samples in flight then get `grace_period` to finish."""

    seconds: float | None = None
    """Of this start."""
    tokens: int | None = None
    """Completion tokens of the run, earlier starts included; so is the cost."""
    cost: float | None = None
    prices: Prices | None = None

    def reached(self, totals: BatchTotals, started: float) -> str:
        """Why the run must end; empty if it need not."""
        if self.seconds is not None and time.monotonic() - started >= self.seconds:
            return f"--max-seconds {self.seconds:g} is reached; start again to continue"
        if (self.tokens is not None or self.cost is not None) and totals.all.counts["uncounted_requests"]:
            return "the server reports no token counts, so --max-total-tokens and --max-cost cannot be enforced"
        if self.tokens is not None and totals.all.sampled >= self.tokens:
            return f"--max-total-tokens {self.tokens} is reached; start again with more to continue"
        if self.cost is not None and (cost := self.cost_of(totals) or 0.0) >= self.cost:
            return f"--max-cost {self.cost:g} is reached ({cost:.4f}); start again with more to continue"
        return ""

    def cost_of(self, totals: BatchTotals) -> float | None:
        """The cost of the tokens; None without prices, or where the server did not count all of them."""
        if self.prices is None or totals.all.counts["uncounted_requests"]:
            return None
        return self.prices.of_tokens(totals.all.prompts, totals.all.counts["cached_tokens"], totals.all.sampled)


class BatchTotals:
    """The figures of the samples of a run, earlier starts included."""

    def __init__(self) -> None:
        self.all, self.finished, self.kept, self.failed = (Figures(items=0, whole=False) for _ in range(4))
        """Finished are the kept and the discarded ones. A failed one has the outcome `bad_input` where its row names an
        image that does not exist."""
        self.reasoning = Counter[str]()

    def add(self, kind: str, record: Mapping[str, Any]) -> None:
        """Count a sample. `kind`: `kept`, `discarded`, `failed`, or `again` for one that failed and is played again,
        whose tokens were spent."""
        if record.get("bad_input"):
            record = {**record, "rollouts": [{**rollout, "outcome": "bad_input"} for rollout in record["rollouts"]]}
        of = {"kept": [self.finished, self.kept], "discarded": [self.finished], "failed": [self.failed], "again": []}
        for figures in [self.all, *of[kind]]:
            figures.add(record)
        if (reasoning := record.get("reasoning")) is not None and kind in ("kept", "discarded"):
            self.reasoning.update({"turns": reasoning[1], "turns_with_reasoning": reasoning[0]})

    @property
    def discarded(self) -> int:
        return self.finished.groups - self.kept.groups

    @property
    def done(self) -> int:
        return self.finished.groups + self.failed.groups

    def statistics(self, all_tools: Iterable[str]) -> dict[str, Any]:
        """The fields of `statistics.json` that follow from the samples."""
        tools: dict[str, dict[str, float]] = {}
        calls, failures = self.finished.tool_failures.calls, self.finished.tool_failures.failed
        for name in dict.fromkeys([*all_tools, *calls]):
            count, failure = calls[name], failures[name]
            tools[name] = {"count": count, "success": count - failure, "failure": failure}
            for kind in ("success", "failure"):
                tools[name][f"{kind}_rate"] = round(100 * tools[name][kind] / (count or 1), 2)
        counted = not self.all.counts["uncounted_requests"]
        turns, thinking = self.reasoning["turns"], self.reasoning["turns_with_reasoning"]
        return {
            "samples": self.kept.groups,
            "completed": self.kept.counts["completed"],
            "discarded_no_reasoning": self.discarded,
            "failed": self.failed.groups,
            "failed_outcomes": dict(self.failed.outcomes),
            "prompt_tokens": self.all.prompts if counted else None,
            "completion_tokens": self.all.sampled if counted else None,
            "mean_reward": self.kept.mean_reward,
            "repaired_call_rate": self.finished.repaired.share,
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
