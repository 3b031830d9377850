"""What a call of `chat` takes, and how servers answered such calls."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence, Set
from contextvars import ContextVar
from typing import Any, Final, Literal, TypeAlias, TypedDict

Split: TypeAlias = Literal["train", "eval"]
"""Evaluations have limits and metrics of their own."""


PROMPTED_BY_A_MODEL: Final[ContextVar[bool]] = ContextVar("prompted by a model", default=False)
"""Whether a model wrote the first prompt of a conversation, as it does for a sub-agent."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of every `chat`. None and missing arguments are off."""

    tools: Tools | None
    tool_choice: str | Mapping[str, Any] | None
    temperature: float | None
    max_tokens: int | None
    top_p: float | None
    stop: str | Sequence[str] | None
    seed: int | None
    extra_body: Mapping[str, Any] | None


def check_arguments(given: Mapping[str, Any], known: Set[str], call: str) -> None:
    """Raise `TypeError` for arguments that would have no effect. None and False never have one."""
    if given.keys() <= known:
        return
    unknown = sorted(name for name, value in given.items() if name not in known and value not in (None, False))
    if unknown:
        raise TypeError(f"{call}() does not take {', '.join(unknown)}; fields of the server go into extra_body")


_METRICS: Final[Mapping[Split, tuple[str, str]]] = {
    "train": ("request_time", "average_num_attempts"),
    "eval": ("eval_request_time", "eval_retry_rate"),
}
"""The names of latencies and attempts."""


class AnswerTimes:
    """The last thousand answers of a server: the seconds that each took, and its attempts."""

    __slots__ = ("attempts", "latencies")

    def __init__(self) -> None:
        self.latencies: dict[Split, deque[float]] = {split: deque(maxlen=1000) for split in _METRICS}
        self.attempts: dict[Split, deque[int]] = {split: deque(maxlen=1000) for split in _METRICS}

    def add(self, split: Split, latency: float, attempts: int) -> None:
        """Count an answer."""
        self.latencies[split].append(latency)
        self.attempts[split].append(attempts)

    def metrics(self, index: int) -> dict[str, float]:
        """Those of the server number `index`, such as `server/server_0_request_time_avg`; none without answers."""
        report: dict[str, float] = {}
        for split, (request_time, attempts) in _METRICS.items():
            if times := self.latencies[split]:
                name = f"server/server_{index}_{request_time}"
                report[f"{name}_avg"] = statistics.fmean(times)
                report[f"{name}_std"] = statistics.pstdev(times)
                report[f"{name}_99p"] = sorted(times)[math.ceil(0.99 * len(times)) - 1]
                report[f"server/server_{index}_{attempts}"] = statistics.fmean(self.attempts[split])
        return report
