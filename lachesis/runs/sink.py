"""Where the finished groups of a run go: the interface of its sinks."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lachesis.runs.decisions import Decision, LeftOut
from lachesis.runs.failures import ItemJob
from lachesis.runs.progress import Standing

G = TypeVar("G")


@dataclass(slots=True, eq=False)
class Flight:
    """A group in flight."""

    job: ItemJob
    step: int
    """The sink's when it began, or an earlier one that the trainer has gone back to since."""
    alone: bool = False
    """Begun while groups failed, to see whether one succeeds again."""
    limit: asyncio.Timeout | None = None
    """Around `play`; None before and after it."""
    ended: LeftOut | None = None
    """Why it was ended early."""

    def end(self, decision: LeftOut) -> None:
        """Cancel it, if it still plays."""
        if self.limit is not None and self.ended is None and not self.limit.expired():
            self.ended = decision
            self.limit.reschedule(asyncio.get_running_loop().time())


class RunCounts(Protocol):
    """What a run has done since this start, as far as sinks show it."""

    @property
    def groups(self) -> int:
        """Finished, kept or left out."""

    @property
    def rollouts(self) -> int:
        """Of these groups."""

    @property
    def rewards(self) -> Sequence[float]:
        """Of these rollouts."""

    @property
    def replayed(self) -> Mapping[str, int]:
        """Times that an item was played again because its group became too old, by key."""

    @property
    def playing(self) -> int:
        """Groups in flight."""

    @property
    def reason(self) -> str:
        """Why the run ends; empty while it continues."""


class Sink(ABC, Generic[G]):
    """Where finished groups go, and how fast they are wanted."""

    done: Container[str]
    """Keys of items that are not to be played again."""
    workers: int
    """Groups in flight at most."""
    limit: int | None = None
    """Groups that this start begins at most; None for any number. Known once the sink is open."""
    step: int = 0
    """The trainer's step, for groups that begin now."""
    ends_groups = False
    """Whether groups in flight may become too old."""
    retry_pause: float | None = None
    """Seconds before a broken group is played again (`Retries`); None leaves it to the next start."""

    @abstractmethod
    def opened(self, changed: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Around the run. `changed` wakes the loop."""

    @abstractmethod
    def decide(self, group: G) -> Decision:
        """Whether the group is kept, and as what. Runs in a thread where the group is large: it may take its time."""

    @abstractmethod
    async def accept(self, job: ItemJob, decision: Decision, step: int) -> Decision:
        """Write the group down; when this returns, it survives `kill -9`. `step` is that of its flight."""

    @abstractmethod
    def standing(self, counts: RunCounts) -> Standing:
        """How the run goes, for the progress display."""

    def room(self, busy: int, flights: Collection[Flight]) -> int:
        """Groups that may begin now, with `busy` in flight or about to be: `flights` are those that have begun."""
        return self.workers - busy

    def too_old(self, step: int) -> LeftOut | None:
        """The decision about a group that began at `step`, if it is too old even when it finishes now."""
        return None

    async def check(self) -> None:
        """Called once per turn of the loop. An exception ends the run."""

    def ending(self) -> str:
        """Why the run is to end although there are items; empty while it is not."""
        return ""

    @property
    def settled(self) -> bool:
        """Nothing that was accepted is still on its way."""
        return True

    @property
    def background(self) -> set[asyncio.Task[None]]:
        """Tasks that get the grace period to finish, as groups in flight do."""
        return set()
