"""What the rollout API knows, but for the contents of groups."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lachesis_train.api.packing import Sized
from lachesis_train.rollout_api import EnvDescription, TrainerRegistration

RECENT = 20


RECENT_AGES = 1000


@dataclass(frozen=True, slots=True)
class Group(Sized):
    """A group without its content."""

    id: int
    """In the order of arrival."""
    group_id: str | None
    """As the environment calls it."""
    tokens: int
    size: int
    """Bytes."""
    begin_step: int | None
    scores: tuple[float, ...]
    received: float
    """Seconds since 1970."""
    batch_id: int | None = None


@dataclass(slots=True)
class PendingBatch:
    """A batch that is not acknowledged."""

    id: int
    groups: Sequence[Group]
    holder: str | None = None
    """The trainer that it was handed to; empty for one that gives no name."""
    given: bool = False
    """It was sent completely to a trainer that cannot acknowledge: its next request does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredEnv(EnvDescription):
    """An environment that has registered."""

    env_id: int
    real_name: str
    connected: bool = True


@dataclass(slots=True)
class ApiState:
    """Everything but contents."""

    instance: str = ""
    """A new one for each database, and after each reset."""
    trainer: TrainerRegistration | None = None
    registrations: int = 0
    """Of trainers, one after the other: each may begin at another step, with other settings."""
    started: bool = False
    """A trainer has asked for a batch."""
    begun: bool = False
    """The trainer has asked for one since its registration."""
    first_step: int = 0
    """The trainer's step minus the id of the last batch."""
    environments: list[RegisteredEnv] = field(default_factory=list)
    waiting: dict[int, Group] = field(default_factory=dict)
    batches: dict[int, PendingBatch] = field(default_factory=dict)
    """Not acknowledged, by id, in order."""
    last_batch: int = 0
    acknowledged: int = 0
    """The largest id of an acknowledged batch."""
    acknowledged_by: dict[str, int] = field(default_factory=dict)
    """The same of the batches that a trainer got by its name."""
    received: int = 0
    """Groups, without copies."""
    stored: int = 0
    """Bytes of groups that are not acknowledged."""
    recent: deque[Group] = field(default_factory=lambda: deque(maxlen=RECENT))
    ages: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_AGES))
    """Of groups in the latest batches, where environments send `begin_step`; since the start of the process."""

    @property
    def step(self) -> int:
        """The trainer's: batches formed, from its `starting_step`."""
        return self.first_step + self.last_batch

    @property
    def held(self) -> dict[int, int | None]:
        """The batches of groups that are not acknowledged, by id of the group; None in the queue."""
        of_batches = {group.id: batch.id for batch in self.batches.values() for group in batch.groups}
        return {**dict.fromkeys(self.waiting), **of_batches}

    @property
    def waiting_sequences(self) -> int:
        return sum(group.sequences for group in self.waiting.values())

    def waiting_of(self, env_id: int | None) -> list[Group]:
        return [group for group in self.waiting.values() if group.env_id == env_id]

    def sequences_by_env(self) -> Counter[int | None]:
        counts: Counter[int | None] = Counter()
        for group in self.waiting.values():
            counts[group.env_id] += group.sequences
        return counts
