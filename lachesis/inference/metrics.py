"""Latencies and attempts of one server, the last thousand of each kind."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

_KEPT = 1000


def _window() -> deque[float]:
    return deque(maxlen=_KEPT)


@dataclass(slots=True)
class ServerMetrics:
    """Totals of the process, and windows for the averages."""

    requests: int = 0
    failures: int = 0
    """Requests that ended in an error, without cancelled ones."""
    latencies: deque[float] = field(default_factory=_window)
    eval_latencies: deque[float] = field(default_factory=_window)
    attempts: deque[float] = field(default_factory=_window)
    eval_attempts: deque[float] = field(default_factory=_window)

    def record(self, latency: float, attempts: int, *, evaluation: bool) -> None:
        """Count an answered request: the seconds of its last attempt, and its attempts."""
        self.requests += 1
        (self.eval_latencies if evaluation else self.latencies).append(latency)
        (self.eval_attempts if evaluation else self.attempts).append(attempts)

    def as_wandb(self, server: str) -> dict[str, float]:
        """The metrics under the names of Atropos' dashboards. Metrics without a value are absent."""
        report: dict[str, float] = {}
        for prefix, times in (("", self.latencies), ("eval_", self.eval_latencies)):
            if times:
                name = f"server/{server}_{prefix}request_time"
                report[f"{name}_avg"] = statistics.fmean(times)
                report[f"{name}_std"] = statistics.pstdev(times)
                report[f"{name}_99p"] = sorted(times)[math.ceil(0.99 * len(times)) - 1]
        if self.attempts:
            report[f"server/{server}_average_num_attempts"] = statistics.fmean(self.attempts)
        if self.eval_attempts:
            report[f"server/{server}_eval_retry_rate"] = statistics.fmean(self.eval_attempts)
        return report
