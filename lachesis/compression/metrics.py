"""The figures of a whole compression, under the names of the removed implementation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Totals:
    """Sums over the metrics of entries."""

    started: datetime = field(default_factory=datetime.now)
    entries: int = 0
    compressed: int = 0
    skipped: int = 0
    over_limit: int = 0
    failed: int = 0
    """Entries that stayed as they were for a reason: `EntryMetrics.error`."""
    tokens_before: int = 0
    tokens_after: int = 0
    turns_before: int = 0
    turns_after: int = 0
    api_calls: int = 0
    summary_errors: int = 0
    ratios: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    """Kind of error -> entries. The kind is what an error begins with."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add an entry."""
        self.entries += 1
        self.compressed += metrics["was_compressed"]
        self.skipped += metrics["skipped_under_target"]
        self.over_limit += metrics["still_over_limit"]
        self.tokens_before += metrics["original_tokens"]
        self.tokens_after += metrics["compressed_tokens"]
        self.turns_before += metrics["original_turns"]
        self.turns_after += metrics["compressed_turns"]
        self.api_calls += metrics["summarization_api_calls"]
        self.summary_errors += metrics["summarization_errors"]
        if metrics["was_compressed"]:
            self.ratios += metrics["compression_ratio"]
        if (error := metrics["error"]) is not None:
            self.failed += 1
            kind = str(error).partition(":")[0]
            self.errors[kind] = self.errors.get(kind, 0) + 1

    def to_record(self) -> dict[str, Any]:
        """Plain JSON."""
        ended = datetime.now()
        saved, removed = self.tokens_before - self.tokens_after, self.turns_before - self.turns_after
        return {
            "summary": {
                "total_trajectories": self.entries,
                "trajectories_compressed": self.compressed,
                "trajectories_skipped_under_target": self.skipped,
                "trajectories_still_over_limit": self.over_limit,
                "trajectories_failed": self.failed,
                "compression_rate": _share(self.compressed, self.entries),
            },
            "tokens": {
                "total_before": self.tokens_before,
                "total_after": self.tokens_after,
                "total_saved": saved,
                "overall_compression_ratio": _share(self.tokens_after, self.tokens_before),
            },
            "turns": {"total_before": self.turns_before, "total_after": self.turns_after, "total_removed": removed},
            "averages": {
                "avg_compression_ratio": _share(self.ratios, self.compressed),
                "avg_tokens_saved_per_compressed": _share(saved, self.compressed),
                "avg_turns_removed_per_compressed": _share(removed, self.compressed),
            },
            "summarization": {
                "total_api_calls": self.api_calls,
                "total_errors": self.summary_errors,
                "success_rate": _share(self.api_calls - self.summary_errors, self.api_calls),
            },
            "processing": {
                "start_time": self.started.isoformat(),
                "end_time": ended.isoformat(),
                "duration_seconds": round((ended - self.started).total_seconds(), 3),
            },
            "errors": self.errors,
        }


def write_metrics(path: Path, totals: Totals, entries: Iterable[Mapping[str, Any]] | None) -> None:
    """Write the figures, and those of each entry, one at a time. Replaces `path` as a whole. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(totals.to_record(), indent=2, ensure_ascii=False).removesuffix("\n}"))
            if entries is not None:
                file.write(',\n  "trajectories": [')
                for place, entry in enumerate(entries):
                    file.write((",\n    " if place else "\n    ") + json.dumps(entry, ensure_ascii=False))
                file.write("\n  ]")
            file.write("\n}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
