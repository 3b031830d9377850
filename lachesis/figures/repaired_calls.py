"""The tool calls of a run whose form the parser had to repair, and an alarm when their share rises in training.

A rising share means that the model unlearns the form of its calls: other parsers, and this one in strict mode, reject
them. A group is a cluster: the calls of rollouts of one item are alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import Final

from lachesis.figures.intervals import mean_of_values

NAME: Final = "calls repaired by the parser"
LEAST, MOST = 4, 32
"""Groups at each end of the run that are compared: a third of all, within these bounds."""
ERRORS: Final = 2.8
"""By simulation, of runs whose share stays up to 1 in 10 raise the alarm at some time and 1 in 100 at the end."""
DISAGREEMENT: Final = 0.03


class RepairedCalls:
    """Counts them in the order of time. Its memory does not grow."""

    def __init__(self) -> None:
        self.repaired = 0
        self.parsed = 0
        """Calls that a parser of ours read. Calls that a server parsed are in none of the figures."""
        self._groups = 0
        self._raised = False
        self._first: list[tuple[int, int]] = []
        self._last: deque[tuple[int, int]] = deque(maxlen=MOST)

    def add(self, counts: Iterable[tuple[int, int]]) -> str:
        """Count the calls of a group: of each rollout, how many were repaired and how many were parsed.

        Returns the alarm where this group is the first to raise it.
        """
        repaired = parsed = 0
        for of_rollout in counts:
            repaired += of_rollout[0]
            parsed += of_rollout[1]
        if not parsed:
            return ""
        self.repaired += repaired
        self.parsed += parsed
        self._groups += 1
        if len(self._first) < MOST:
            self._first.append((repaired, parsed))
        self._last.append((repaired, parsed))
        if self._raised or not self.alarm:
            return ""
        self._raised = True
        return self.alarm

    @property
    def share(self) -> float | None:
        """Of all calls that were parsed; None where there was none."""
        return self.repaired / self.parsed if self.parsed else None

    def __str__(self) -> str:
        return f"{self.repaired:,} of {self.parsed:,}, {self.repaired / max(1, self.parsed):.1%}"

    @property
    def alarm(self) -> str:
        """The alarm in a sentence, empty where there is none.

        It is raised while the share at the end is by more than `ERRORS` standard errors above that at the beginning.
        """
        window = min(MOST, self._groups // 3)
        if window < LEAST:
            return ""
        first, last = _shares(self._first[:window]), _shares(list(self._last)[-window:])
        if fmean(last) - fmean(first) <= ERRORS * math.hypot(_error(first), _error(last)):
            return ""
        return (
            f"{NAME}: from {_shown(first)} in the first {window} groups to {_shown(last)} in the last {window}. The "
            "model unlearns the form of its calls; a reward that looks at calls should count `result.ok_calls` only"
        )


def _shares(groups: list[tuple[int, int]]) -> list[float]:
    return [repaired / parsed for repaired, parsed in groups]


def _error(shares: list[float]) -> float:
    """The standard error of their mean; where hardly a group differs it is not 0."""
    mean = fmean(shares)
    squares = sum((share - mean) ** 2 for share in shares) + DISAGREEMENT
    return math.sqrt(squares / (len(shares) - 1) / len(shares))


def _shown(shares: list[float]) -> str:
    found = mean_of_values(shares)
    return f"{found.mean:.1%} (95 % interval {found.low:.1%} to {found.high:.1%})"
