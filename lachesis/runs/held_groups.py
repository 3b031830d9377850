"""Groups in doubt: other rollouts must show whether an exception of their reward is the agent's doing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from backends.text import counted
from lachesis.runs.failures import ItemJob, RunStopped
from lachesis.runs.sink import Flight

G = TypeVar("G")
MOST_HELD = 4
"""Groups that wait for evidence before the run stops; `max_failed_groups` where that is more."""

NEXT_STEP = (
    "nothing shows whether the agents or the reward are at fault, so nothing is scored: correct the reward, let it "
    "accept whatever an agent may leave (`ctx.read_json`), or write a reference_policy that passes this line"
)

Finish = Callable[[ItemJob, G, Flight], Awaitable[None]]
"""Decides about a group and hands it to the sink."""


class HeldGroups(Generic[G]):
    """They wait for evidence.

    Args:
        ask_again: see `Pipeline`.
        most: groups without a score after which the run stops.
    """

    def __init__(self, ask_again: Callable[..., G] | None, finish: Finish[G], most: int) -> None:
        self._ask_again = ask_again
        self._finish = finish
        self._most = max(MOST_HELD, most)
        self._waiting: list[tuple[ItemJob, G, Flight]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """So many wait that no other group begins before they are settled."""
        return len(self._waiting) >= self._most

    def put(self, job: ItemJob, group: G, flight: Flight) -> None:
        self._waiting.append((job, group, flight))

    async def ask(self, *, last: bool = False) -> None:
        """Finish those that are settled by now; the last time all of them."""
        assert self._ask_again is not None or not self._waiting
        for entry in list(self._waiting):
            job, group, flight = entry
            if entry not in self._waiting or self._ask_again is None:  # another task has it by now
                continue
            settled: Any = self._ask_again(group, last=last)
            if not settled.in_doubt:
                self._waiting.remove(entry)
                await self._finish(job, settled, flight)

    async def give_up(self) -> None:
        """Finish all of them, since nothing else plays that could tell. Raises `RunStopped` where they are too many."""
        count = len(self._waiting)
        stops = self.full
        doubts = [doubt for _, group, _ in self._waiting for doubt in _doubts(group)]
        await self.release()
        if stops:
            raise RunStopped(
                f"the reward raised in {counted(count, 'group')}; "
                f"the last one: {doubts[-1].what}\n{doubts[-1].trace}{NEXT_STEP}"
            )

    async def release(self) -> None:
        """Finish all of them, at the end of a run."""
        while self._waiting:
            with suppress(RunStopped):  # for the number of groups without a score: these are counted otherwise
                await self.ask(last=True)


def _doubts(group: Any) -> list[Any]:
    return [rollout.doubt for rollout in group.rollouts if rollout.doubt is not None]
