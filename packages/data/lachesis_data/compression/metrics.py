"""The figures of a whole compression, under the names of the removed implementation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from lachesis_messages.records.jsonl import replacing


@dataclass(slots=True)
class CompressionTotals:
    """Sums over the metrics of entries."""

    started: datetime = field(default_factory=datetime.now)
    sums: Counter[str] = field(default_factory=Counter)
    """Name of a metric -> its sum; of a flag, the entries that have it. `failed` are those with an error."""
    ratios: float = 0.0
    over: list[int] = field(default_factory=list)
    """Of each entry that is still over the limit, the tokens that no summary may replace."""
    errors: Counter[str] = field(default_factory=Counter)
    """Kind of error -> entries. The kind is what an error begins with."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add an entry."""
        self.sums["entries"] += 1
        for name, value in metrics.items():
            if isinstance(value, int):
                self.sums[name] += value
        if metrics["was_compressed"]:
            self.ratios += metrics["compression_ratio"]
        if metrics["still_over_limit"] and metrics["error"] is None and "protected_tokens" in metrics:
            self.over.append(metrics["protected_tokens"])
        if (error := metrics["error"]) is not None:
            self.sums["failed"] += 1
            self.errors[str(error).partition(":")[0]] += 1

    def to_record(self) -> dict[str, Any]:
        """Plain JSON."""
        ended, sums = datetime.now(), self.sums
        compressed, calls = sums["was_compressed"], sums["summarization_api_calls"]
        return {
            "summary": {
                "total_trajectories": sums["entries"],
                "trajectories_compressed": compressed,
                "trajectories_skipped_under_target": sums["skipped_under_target"],
                "trajectories_still_over_limit": sums["still_over_limit"],
                "trajectories_failed": sums["failed"],
                "compression_rate": _share(compressed, sums["entries"]),
            },
            "tokens": {
                "total_before": sums["original_tokens"],
                "total_after": sums["compressed_tokens"],
                "total_saved": sums["tokens_saved"],
                "overall_compression_ratio": _share(sums["compressed_tokens"], sums["original_tokens"]),
            },
            "turns": {
                "total_before": sums["original_turns"],
                "total_after": sums["compressed_turns"],
                "total_removed": sums["turns_removed"],
            },
            "averages": {
                "avg_compression_ratio": _share(self.ratios, compressed),
                "avg_tokens_saved_per_compressed": _share(sums["tokens_saved"], compressed),
                "avg_turns_removed_per_compressed": _share(sums["turns_removed"], compressed),
            },
            "summarization": {
                "total_api_calls": calls,
                "total_errors": sums["summarization_errors"],
                "success_rate": _share(calls - sums["summarization_errors"], calls),
            },
            "processing": {
                "start_time": self.started.isoformat(),
                "end_time": ended.isoformat(),
                "duration_seconds": round((ended - self.started).total_seconds(), 3),
            },
            "errors": self.errors,
        }


def write_metrics(path: Path, totals: CompressionTotals, entries: Iterable[Mapping[str, Any]] | None) -> None:
    """Write the figures, and those of each entry, one at a time. Replaces `path` as a whole. Raises NotReplaced."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(totals.to_record(), indent=2, ensure_ascii=False).removesuffix("\n}"))
        if entries is not None:
            file.write(',\n  "trajectories": [')
            for place, entry in enumerate(entries):
                file.write((",\n    " if place else "\n    ") + json.dumps(entry, ensure_ascii=False))
            file.write("\n  ]")
        file.write("\n}\n")


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
