"""How many groups have a signal: rewards that differ, without which every advantage is 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from backends.text import counted
from lachesis.runs.results import Row

WINDOW: Final = 256
"""Groups of which the rate is, for the policy changes."""


@dataclass(slots=True)
class SignalRates:
    """Of one start, over the run and by item."""

    target: float | None = None
    """The wanted rate, for the display."""
    last: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    items: dict[str, list[int]] = field(default_factory=dict)
    """By digest: groups, and those with a signal."""

    def add(self, key: str, rewards: Sequence[float | None]) -> None:
        """Count a finished group with at least two rewards."""
        scored = [reward for reward in rewards if reward is not None]
        if len(scored) > 1:
            signal = len(set(scored)) > 1
            self.last.append(signal)
            counts = self.items.setdefault(key.partition("-")[0], [0, 0])
            counts[0] += 1
            counts[1] += signal

    @property
    def rate(self) -> float | None:
        """Over the last groups; None before the first."""
        return sum(self.last) / len(self.last) if self.last else None

    def __str__(self) -> str:
        target = "" if self.target is None else f" (target {self.target:.2f})"
        return f"signal in {self.rate or 0.0:.2f} of groups{target}"

    def rows(self) -> Iterator[Row]:
        if not self.last:
            return
        yield "signal", f"{self}, the last {len(self.last)} of this start"
        never = sorted((-groups, key) for key, (groups, signals) in self.items.items() if not signals)
        always = sum(groups == signals for groups, signals in self.items.values())
        shown = ", ".join(f"{key} 0 of {-groups}" for groups, key in never[:3])
        text = f"{always} of {counted(len(self.items), 'item')} had a signal in every group, {len(never)} in none"
        yield "by item", f"{text} ({shown})" if never else text
