"""How long a run still takes, by the pace of its last units."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from itertools import combinations

RECENT, LEAST = 20, 3
"""Moments at which something was done that the pace is taken from, and how many there must be after the first look."""
GRAINS = 50
"""A part of a unit counts where it is this share of the run: a run of few large units gets an estimate early too."""


class TimeLeft:
    """Takes the pace as the median between any two of the recent moments: units that are done at the same time do not
    make it fast, and a long wait does not make it slow, unless it is how the run goes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float]] = deque(maxlen=RECENT + 1)
        self._rises = 0

    def seconds(self, done: float, total: float) -> float | None:
        """Estimate after another look at the run; None: too little is done to say."""
        now = self._clock()
        if not self._seen:
            self._seen.append((now, done))
        elif done - self._seen[-1][1] >= min(1.0, total / GRAINS) > 0:
            self._seen.append((now, done))
            self._rises += 1
        if self._rises < LEAST or total <= done:
            return None
        paces = [(late - early) / (more - less) for (early, less), (late, more) in combinations(self._seen, 2)]
        pace, (last, reached) = statistics.median(paces), self._seen[-1]
        return pace * (total - reached) - min(now - last, pace)
