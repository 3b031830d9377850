"""What became of every spooled group, as a function of events: the events are the spool's marks, replayed at a start.

    waiting -> in doubt (being posted) -> accepted by the API -> delivered (in a batch of the trainer's)
                       |-> back to waiting, or refused             |-> back to waiting (the API lost its memory)

At most one group is in doubt at any time, because groups are posted one after the other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from lachesis.training.rollout_api import EnvDescription

REGISTERED: Final = "registered"
DISCONNECTED: Final = "disconnected"
POSTING: Final = "posting"
ACCEPTED: Final = "accepted"
BACK: Final = "back"
REFUSED: Final = "refused"
LEFT_OUT: Final = "left out"
SEEN: Final = "seen"


@dataclass(frozen=True, slots=True)
class Entry:
    """One spooled group: what is kept of it in memory."""

    seq: int
    """Place in the spool, from 0."""
    group_id: str
    """Unique; travels as `group_overrides.group_id`, so that a trainer can recognise a group that it has seen."""
    key: str
    """Of the item."""
    sequences: int
    tokens: int
    """Trained tokens in it."""
    undelivered: int = 0
    """Sampled tokens of its rollouts that are not in it, on purpose."""
    step: int = 0
    """The trainer's step when the group was begun."""

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Entry:
        return cls(**{name: record[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Doubt:
    """The group that was being posted, and what the API's status was right before."""

    entry: Entry
    env_id: int
    step: int


@dataclass(slots=True)
class Known:
    """The registration in use, and what is known of the API's process that holds it."""

    env_id: int
    env: EnvDescription
    batch_size: int
    step: int
    """The last `current_step` seen."""
    num_steps: int = -1
    connected: bool = True
    last_group_id: str | None = None
    """The last group that this process has accepted from this environment."""
    buffer: int = 0
    """Sequences that the API holds back until they make up a whole group."""
    alone: bool = False
    """No other environment had a weight when the last group was posted: every batch is made of ours."""
    largest: int = 1
    """The largest group accepted, at least the registered size: the unit of the API's queue sizes is not above it."""


class SpoolState:
    """The state after some events. Not thread-safe, and O(1) an event but for a restart of the API."""

    def __init__(self) -> None:
        self.waiting: deque[Entry] = deque()
        self.doubt: Doubt | None = None
        self.accepted: dict[int, deque[Entry]] = {}
        """By the env_id that they were posted under, in order."""
        self.in_api: Counter[int] = Counter()
        """Sequences in `accepted`, by env_id."""
        self.known: Known | None = None
        self.keys: set[str] = set()
        """Items that are dealt with."""
        self.delivered = 0
        """Groups that are in batches of the trainer's."""
        self.delivered_tokens = 0
        self.steps_late = 0
        """Sum over delivered groups of the steps between their begin and their batch."""
        self.undelivered_tokens = 0
        self.refused: Counter[str] = Counter()
        """Groups that are not sent, by reason."""
        self.maybe_doubled = 0
        """Groups that were posted again although they may have arrived."""
        self.requeued = 0
        """Groups that were posted again because a restarted API had lost them."""

    @property
    def undelivered(self) -> int:
        """Groups on their way: waiting, in doubt or in the API's queue."""
        return self.unsent + sum(map(len, self.accepted.values()))

    @property
    def unsent(self) -> int:
        """Groups that the API has not acknowledged."""
        return len(self.waiting) + (self.doubt is not None)

    def add(self, entry: Entry) -> None:
        """A group was appended to the spool."""
        self.waiting.append(entry)
        self.keys.add(entry.key)

    def apply(self, event: Mapping[str, Any]) -> list[Entry]:
        """Take one event in; the groups that are settled by it (delivered or refused)."""
        match event["do"]:
            case "registered":
                return self._registered(event)
            case "disconnected":
                if self.known is not None:
                    self.known.connected = False
            case "posting":
                self._posting(event)
            case "accepted" if self.doubt is not None:
                self._accepted(self.doubt, int(event["buffer"]))
            case "back" if self.doubt is not None:
                self.waiting.appendleft(self.doubt.entry)
                self.doubt = None
                self.maybe_doubled += bool(event.get("unsure"))
            case "refused" if self.doubt is not None:
                entry, self.doubt = self.doubt.entry, None
                self._left_out(entry.key, event["reason"], entry.tokens + entry.undelivered)
                return [entry]
            case "left out":
                self._left_out(event["key"], event["reason"], int(event["tokens"]))
            case "seen":
                return self._seen(int(event["env_id"]), int(event["step"]), int(event["sequences"]))
        return []

    def lost_by_restart(self) -> list[Entry]:
        """What a restarted API cannot have, in the order in which it was posted: accepted groups, then the doubt."""
        lost = sorted((entry for queue in self.accepted.values() for entry in queue), key=lambda entry: entry.seq)
        return [*lost, *([self.doubt.entry] if self.doubt is not None else ())]

    def _registered(self, event: Mapping[str, Any]) -> list[Entry]:
        taken: list[Entry] = []
        if event["restarted"]:
            lost = self.lost_by_restart()
            taken, again = lost[: event["taken"]], lost[event["taken"] :]
            self.accepted, self.doubt, self.in_api = {}, None, Counter()
            self.waiting.extendleft(reversed(again))
            self.requeued += len(again)
            for entry in taken:
                self._deliver(entry, int(event["step"]))
        env = EnvDescription(**event["env"])
        self.known = Known(
            env_id=event["env_id"],
            env=env,
            batch_size=event["batch_size"],
            step=event["step"],
            num_steps=event["num_steps"],
            largest=env.group_size,
        )
        return taken

    def _posting(self, event: Mapping[str, Any]) -> None:
        # The mark holds the whole entry: the file that held the group may be gone by the time this is replayed.
        entry = Entry.from_record(event["entry"])
        if self.waiting and self.waiting[0].seq == entry.seq:
            self.waiting.popleft()
        self.keys.add(entry.key)
        self.doubt = Doubt(entry, int(event["env_id"]), int(event["step"]))
        if self.known is not None:
            self.known.alone = bool(event["alone"])

    def _accepted(self, doubt: Doubt, buffer: int) -> None:
        entry, self.doubt = doubt.entry, None
        self.accepted.setdefault(doubt.env_id, deque()).append(entry)
        self.in_api[doubt.env_id] += entry.sequences
        if self.known is not None and self.known.env_id == doubt.env_id:
            self.known.last_group_id = entry.group_id
            self.known.buffer = buffer
            self.known.largest = max(self.known.largest, entry.sequences)

    def _seen(self, env_id: int, step: int, sequences: int) -> list[Entry]:
        """The API holds at most `sequences` of this environment: the older ones went into batches, first in first."""
        if self.known is not None:
            self.known.step = max(self.known.step, step)
        settled = []
        queue = self.accepted.get(env_id, deque())
        while queue and self.in_api[env_id] > sequences:
            entry = queue.popleft()
            self.in_api[env_id] -= entry.sequences
            self._deliver(entry, step)
            settled.append(entry)
        if not queue:
            self.accepted.pop(env_id, None)
            del self.in_api[env_id]
        return settled

    def _deliver(self, entry: Entry, step: int) -> None:
        self.delivered += 1
        self.delivered_tokens += entry.tokens
        self.undelivered_tokens += entry.undelivered
        self.steps_late += max(0, step - entry.step)

    def _left_out(self, key: str, reason: str, tokens: int) -> None:
        self.refused[reason] += 1
        self.undelivered_tokens += tokens
        self.keys.add(key)
