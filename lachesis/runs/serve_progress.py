"""How a `serve` run goes: one line while it runs, a table at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.table import Table

from lachesis.runs.progress import PLAIN_INTERVAL
from lachesis.training.outbox_state import OutboxState


@dataclass(slots=True)
class Tally:
    """What this start has finished."""

    groups: int = 0
    rollouts: int = 0
    scored: int = 0
    rewards: float = 0.0

    def add(self, rewards: Sequence[float | None]) -> None:
        """One more group, sent or not."""
        scored = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
        self.groups += 1
        self.rollouts += len(rewards)
        self.scored += len(scored)
        self.rewards += sum(scored)


@dataclass(frozen=True, slots=True)
class ServeResult:
    """A run's figures at one moment, earlier starts included but for `groups`, `rollouts` and `reward`."""

    step: int
    """The trainer's."""
    total: int
    """-1 where it is not known."""
    delivered: int
    """Groups that are in batches of the trainer's."""
    at_api: int
    """Groups in the API's queue."""
    waiting: int
    """Groups in the outbox that the API has not acknowledged."""
    refused: Mapping[str, int]
    """Groups that are not sent, by reason."""
    delivered_tokens: int
    undelivered_tokens: int
    """Sampled tokens that are in no group that was or will be sent."""
    steps_late: float
    """Mean steps of the trainer between a group's begin and its batch; nan before the first."""
    requeued: int
    """Groups that were posted again because a restarted API had lost them."""
    maybe_doubled: int
    """Groups that were posted again although they may have arrived."""
    groups: int
    rollouts: int
    reward: float
    """Mean; nan before the first."""
    playing: int
    trouble: str
    reason: str
    """Why the run ended; empty while it runs."""

    @classmethod
    def of(
        cls, state: OutboxState, tally: Tally, *, step: int, total: int, playing: int, trouble: str, reason: str
    ) -> Self:
        return cls(
            step=step,
            total=total,
            delivered=state.delivered,
            at_api=state.undelivered - state.unsent,
            waiting=state.unsent,
            refused=dict(state.refused),
            delivered_tokens=state.delivered_tokens,
            undelivered_tokens=state.undelivered_tokens,
            steps_late=state.steps_late / state.delivered if state.delivered else math.nan,
            requeued=state.requeued,
            maybe_doubled=state.maybe_doubled,
            groups=tally.groups,
            rollouts=tally.rollouts,
            reward=tally.rewards / tally.scored if tally.scored else math.nan,
            playing=playing,
            trouble=trouble,
            reason=reason,
        )

    @property
    def sent(self) -> int:
        """Groups that the API has taken."""
        return self.delivered + self.at_api

    def line(self) -> str:
        """All of it in few words."""
        step = f"step {self.step}/{self.total}" if self.total >= 0 else f"step {self.step}"
        parts = [
            step,
            f"groups {self.sent} sent, {self.waiting} waiting, {sum(self.refused.values())} refused{self._why()}",
            f"{self.rollouts} rollouts, {self.playing} groups playing",
            f"tokens {self.delivered_tokens} delivered, {self.undelivered_tokens} not",
        ]
        if not math.isnan(self.reward):
            parts.append(f"reward {self.reward:.3f}")
        if not math.isnan(self.steps_late):
            parts.append(f"{self.steps_late:.1f} steps off-policy")
        return "; ".join(parts + ([f"waiting: {self.trouble}"] if self.trouble else []))

    def table(self) -> Table:
        """What a run ends with."""
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("ended", self.reason)
        table.add_row("step", f"{self.step}" + (f" of {self.total}" if self.total >= 0 else ""))
        table.add_row("groups sent", f"{self.sent}, {self.at_api} of them in the API's queue")
        table.add_row("waiting", f"{self.waiting}")
        table.add_row("refused", f"{sum(self.refused.values())}{self._why()}")
        if self.requeued:
            table.add_row("posted again", f"{self.requeued}, which a restarted API had lost")
        if self.maybe_doubled:
            table.add_row("maybe doubled", f"{self.maybe_doubled}; group_overrides.group_id tells them")
        table.add_row("rollouts", f"{self.rollouts} in {self.groups} groups of this start")
        table.add_row("tokens", f"{self.delivered_tokens} delivered, {self.undelivered_tokens} undelivered")
        table.add_row("mean reward", "none was scored" if math.isnan(self.reward) else f"{self.reward:.3f}")
        if not math.isnan(self.steps_late):
            table.add_row("off-policy", f"{self.steps_late:.2f} steps between a group's begin and its batch")
        return table

    def _why(self) -> str:
        named = ", ".join(f"{reason} {count}" for reason, count in sorted(self.refused.items()))
        return f" ({named})" if named else ""


class ServeProgress:
    """A live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self._status: Status | None = None
        self._next = 0.0
        self._shown = ""

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._status = self.console.status(self.title)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, result: ServeResult) -> None:
        line = f"{self.title}: {result.line()}"
        if self._status is not None:
            self._status.update(line.replace("[", r"\["))
        elif time.monotonic() >= self._next and line != self._shown:
            self._next = time.monotonic() + PLAIN_INTERVAL
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._shown = line
