"""The tool calls of a run whose form the parser had to repair, and an alarm when their share rises in training.

A rising share means that the model unlearns the form of its calls: other parsers, and this one in strict mode, reject
them. A group is a cluster: the calls of rollouts of one item are alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from lachesis.evaluation.intervals import Mean, mean_of_shares

NAME: Final = "calls repaired by the parser"
LEAST, MOST = 4, 32
"""Groups at each end of the run that are compared: a third of all, within these bounds."""


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
        return f"{self.repaired} of {self.parsed}, {self.repaired / max(1, self.parsed):.1%}"

    @property
    def alarm(self) -> str:
        """The alarm in a sentence, empty where there is none.

        It is raised while the 95 % interval of the share at the end lies above that of the share at the beginning.
        """
        window = min(MOST, self._groups // 3)
        if window < LEAST:
            return ""
        first, last = _share(self._first[:window]), _share(list(self._last)[-window:])
        if last.low <= first.high:
            return ""
        return (
            f"{NAME}: from {_shown(first)} in the first {window} groups to {_shown(last)} in the last {window}. The "
            "model unlearns the form of its calls; a reward that looks at calls should count `result.ok_calls` only"
        )


def _share(groups: list[tuple[int, int]]) -> Mean:
    return mean_of_shares([repaired / parsed for repaired, parsed in groups], most=sum(parsed for _, parsed in groups))


def _shown(share: Mean) -> str:
    return f"{share.mean:.1%} (95 % interval {share.low:.1%} to {share.high:.1%})"
