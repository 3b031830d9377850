"""The age of groups, and a cap on it.

The age of a group is the number of batches that the trainer got after the group began and before the group's own: 0 if
it is in the very next batch. It is counted in steps of the rollout API, one for each batch. No token of a group is
older than the group, and a trainer makes at most one version of the policy in a step.

The cap holds by back-pressure. Groups are posted in the order in which they finish, so in the worst case all groups on
their way reach the trainer before the oldest one in flight. They must fit, together with it, into the batches that the
trainer may still get before the oldest one is too old. What is delivered makes room, so a trainer that can get no more
batches without the oldest group waits for it, and no longer: with an empty outbox there is room for one batch at any
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class WhenStale(StrEnum):
    """How to treat groups that take too long."""

    WAIT = "wait"
    """No group begins that could make an older one too old: the trainer waits for that one. Nothing is lost."""
    DROP = "drop"
    """A group that is too old is ended and left out. Slow items are trained less often than others."""
    REPLAY = "replay"
    """Its item is played again, a few times, and then left out. The time until then is lost as well."""
    MARK = "mark"
    """It is sent like any other, and counted."""


@dataclass(frozen=True, slots=True)
class StalenessCap:
    """`most` is the largest age, None for any."""

    most: int | None
    policy: WhenStale = WhenStale.WAIT

    @property
    def ends_groups(self) -> bool:
        """Whether a group that is too old is not sent."""
        return self.most is not None and self.policy in (WhenStale.DROP, WhenStale.REPLAY)

    def holding(self, step: int, begun: Iterable[int]) -> int:
        """The step from which the cap counts: the oldest begin in flight, else `step`, where new groups begin.

        A group that is too old already holds nothing back: to wait for it would help nobody.
        """
        if self.most is None or self.policy is not WhenStale.WAIT:
            return step
        return min((first for first in begun if step - first <= self.most), default=step)

    def room(self, *, step: int, holding: int, waiting: int, busy: int, share: float, group_size: int) -> float:
        """Groups that may begin without making one in flight too old; infinite without a cap.

        Args:
            step: of the trainer.
            holding: the result of `holding`.
            waiting: sequences in the outbox and at the API.
            busy: groups in flight, those that are about to begin included.
            share: sequences of a batch that may come from this environment.
        """
        if self.most is None or self.policy is WhenStale.MARK:
            return math.inf
        batches = holding + 1 + self.most - step
        return math.ceil((share * batches - waiting) / group_size) - busy

    def too_old(self, begun: int, *, step: int, sequences: int, batch_size: int) -> str:
        """Why a group cannot reach a batch in time, if `sequences`, its own included, are to be delivered until then.

        Empty if it can, or if groups are sent whatever their age.
        """
        if self.most is None or not self.ends_groups:
            return ""
        age = step + math.ceil(sequences / batch_size) - 1 - begun
        if age <= self.most:
            return ""
        return f"begun at the trainer's step {begun}, it would be {age} batches old; max_staleness is {self.most}"
