"""What `serve` decides about a finished group, and its settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lachesis.training.groups import Refused, TrainingGroup
from lachesis.training.rollout_api import TrainerInfo

G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Sendable:
    """A finished group that a trainer can use."""

    payload: Mapping[str, Any]
    """In Atropos' shape, without `env_id`."""
    tokens: int
    """Trained tokens in it."""
    undelivered: int = 0
    """Sampled tokens of its rollouts that are not in it, on purpose."""
    rewards: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Unsendable:
    """A finished group that is not sent."""

    reason: str
    """One of a few, to be counted."""
    detail: str
    tokens: int = 0
    """Sampled tokens that are thereby not delivered."""
    rewards: Sequence[float | None] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    """What is written down of it."""
    again: bool = False
    """The infrastructure broke it, which says nothing about the item: it is played again."""


Verdict = Sendable | Unsendable

PlayGroup = Callable[[Any, str], Awaitable[G]]
"""Plays the group of an item (and its key). What it raises is taken for broken infrastructure, but for `RunStopped`."""

BuildGroup = Callable[[G, TrainerInfo], Verdict]
"""Looks at a finished group, in a thread: it may take its time."""


def verdict_of(
    built: TrainingGroup | Refused,
    *,
    rewards: Sequence[float | None],
    record: Mapping[str, Any] | None = None,
    again: bool = False,
) -> Verdict:
    """What `build_group` says, in the words of `ServeRun`; `record` and `again` are about a group that is refused."""
    if isinstance(built, TrainingGroup):
        return Sendable(
            payload=built.to_atropos(),
            tokens=built.delivered,
            undelivered=sum(built.undelivered.values()),
            rewards=[reward for reward in rewards if reward is not None],
        )
    return Unsendable(
        reason=built.reason.value.replace("_", " "),
        detail=built.detail,
        tokens=sum(built.undelivered.values()),
        rewards=rewards,
        record=record or {},
        again=again,
    )


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How a run goes on; nothing here decides the content of groups."""

    max_workers: int
    """Groups in flight."""
    max_batches_offpolicy: int = 3
    """Batches that may be on their way: in flight, in the outbox and at the API together."""
    total_steps: int = -1
    """The trainer's step at which the run ends; -1 asks the trainer."""
    steps_per_eval: int = 100
    """0 or less: no evaluation."""
    eval_handling: Literal["STOP_TRAIN", "LIMIT_TRAIN", "NONE"] = "STOP_TRAIN"
    """What an evaluation does to training: no new groups, `eval_limit_ratio` of them, or nothing."""
    eval_limit_ratio: float = 0.5
    worker_timeout: float = -1.0
    """Seconds for one group, 0 or less for any. A last resort: a rollout should have ended itself before."""
    grace_period: float = 60.0
    """Seconds that groups in flight get to finish when the run is stopped."""
    item_pause: float = 5.0
    """Seconds before an item whose group failed is played again; four times as long the next time."""
    window: int = 1
    """Batches that may lie at the API (see `lachesis.training.relay`)."""
