"""The state of every group in the outbox.

    waiting -> posting -> accepted by the API -> delivered (in one of the trainer's batches)
                  |-> waiting again, or refused       |-> waiting again (the API lost its memory)

Groups are posted one after the other, so at most one is in the state `posting`: the group in doubt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from lachesis_train.rollout_api import EnvDescription

WAITING: Final = "waiting"
POSTING: Final = "posting"
ACCEPTED: Final = "accepted"
DELIVERED: Final = "delivered"
REFUSED: Final = "refused"

ON_THEIR_WAY: Final = (WAITING, POSTING, ACCEPTED)


@dataclass(frozen=True, slots=True)
class Entry:
    """One group without its content: a row of the table `groups`. The fields are its columns, in order."""

    seq: int
    """Position in the outbox, from 0."""
    group_id: str
    """Unique; sent as `group_overrides.group_id`, so that a trainer can recognise a second copy. Empty for a group that
    was never appended."""
    key: str
    """Of the item."""
    sequences: int
    tokens: int
    """Trained tokens in it."""
    undelivered: int = 0
    """Sampled tokens of its rollouts that are not in it."""
    step: int = 0
    """The trainer's step when the group was begun."""
    state: str = WAITING
    env_id: int | None = None
    """Where it was posted."""
    batch_step: int = 0
    """The trainer's step when the group was first seen to be in a batch."""
    requeued: int = 0
    """Times that it was posted again because the API may have lost it."""
    reason: str = ""
    """Why it is not sent."""

    @property
    def age(self) -> int:
        """Of a delivered group: batches that the trainer got after its begin and before its own."""
        return max(0, self.batch_step - 1 - self.step)

    def to_record(self) -> dict[str, Any]:
        """The description of the group, without its state."""
        names = ("seq", "group_id", "key", "sequences", "tokens", "undelivered", "step")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class KnownApi:
    """The registration in use, and what is known of the API process that holds it."""

    env_id: int
    env: EnvDescription
    batch_size: int
    step: int
    """The last `current_step` seen."""
    num_steps: int = -1
    connected: bool = True
    last_group_id: str | None = None
    """The last group that this process accepted from this environment."""
    buffer: int = 0
    """Sequences that the API holds back until they make up a whole group."""
    instance: str = ""
    """Of an API that keeps its groups on disk: the id of its memory. Empty: the API has none."""
    registrations: int = 0
    """Of trainers at such an API."""
    largest: int = 1
    """The largest group accepted, at least the registered size. The API counts its queue in units of at most this."""

    def most_held(self, queue_size: int) -> int:
        """The most sequences of ours that the API can hold. It reports whole groups, rounded down."""
        return queue_size * self.largest + self.largest - 1 + self.buffer


class OutboxState:
    """All groups on their way, and totals over the rest. Not thread-safe."""

    def __init__(self) -> None:
        self.known: KnownApi | None = None
        self.keys: set[str] = set()
        """Items that need not be played again."""
        self.delivered = 0
        """Groups that are in batches of the trainer."""
        self.delivered_tokens = 0
        self.ages: Counter[int] = Counter()
        """Delivered groups by age."""
        self.oldest: Entry | None = None
        """The delivered group with the greatest age."""
        self.sequences = 0
        """Of the groups on their way."""
        self.undelivered_tokens = 0
        self.refused: Counter[str] = Counter()
        """Groups that are not sent, by reason."""
        self.requeued = 0
        """Times that a group was posted again because the API may have lost it: the trainer may have it twice."""
        self._states: dict[int, str] = {}
        self._groups: dict[str, dict[int, Entry]] = {state: {} for state in ON_THEIR_WAY}

    def put(self, entry: Entry) -> None:
        """Add a group, or replace its previous entry."""
        if (before := self._states.pop(entry.seq, None)) is not None:
            previous = self._groups[before].pop(entry.seq)
            self.sequences -= previous.sequences
            self.requeued -= previous.requeued
        self.keys.add(entry.key)
        self.requeued += entry.requeued
        if entry.state in self._groups:
            self._states[entry.seq] = entry.state
            self._groups[entry.state][entry.seq] = entry
            self.sequences += entry.sequences
            return
        self.undelivered_tokens += entry.undelivered
        if entry.state == DELIVERED:
            self.delivered += 1
            self.delivered_tokens += entry.tokens
            self.ages[entry.age] += 1
            if self.oldest is None or (entry.age, -entry.seq) > (self.oldest.age, -self.oldest.seq):
                self.oldest = entry
        else:
            self.undelivered_tokens += entry.tokens
            self.refused[entry.reason] += 1

    @property
    def waiting(self) -> list[Entry]:
        """In the order in which they are posted."""
        return _in_order(self._groups[WAITING])

    @property
    def first_waiting(self) -> Entry | None:
        waiting = self._groups[WAITING]
        return waiting[min(waiting)] if waiting else None

    @property
    def in_doubt(self) -> Entry | None:
        """The group that was being posted when this process last knew."""
        return next(iter(self._groups[POSTING].values()), None)

    @property
    def accepted(self) -> dict[int, list[Entry]]:
        """Groups in the API's memory by the env_id under which they were posted, the oldest first."""
        queues: dict[int, list[Entry]] = {}
        for entry in _in_order(self._groups[ACCEPTED]):
            if entry.env_id is not None:
                queues.setdefault(entry.env_id, []).append(entry)
        return queues

    @property
    def in_api(self) -> Counter[int]:
        """Sequences in the API's memory, by env_id."""
        return Counter({env_id: sum(entry.sequences for entry in queue) for env_id, queue in self.accepted.items()})

    @property
    def undelivered(self) -> int:
        """Groups on their way: waiting, in doubt or in the API's memory."""
        return len(self._states)

    @property
    def unsent(self) -> int:
        """Groups that the API has not acknowledged."""
        return len(self._groups[WAITING]) + len(self._groups[POSTING])

    def begun_after(self, step: int) -> Iterator[Entry]:
        """The groups on their way that were begun after this step of the trainer: before it went back to it."""
        return (entry for groups in self._groups.values() for entry in groups.values() if entry.step > step)

    def lost_by_restart(self) -> list[Entry]:
        """The groups that a restarted API cannot have, in the order in which they were posted."""
        return _in_order(self._groups[ACCEPTED]) + _in_order(self._groups[POSTING])


def _in_order(entries: dict[int, Entry]) -> list[Entry]:
    return [entries[seq] for seq in sorted(entries)]
