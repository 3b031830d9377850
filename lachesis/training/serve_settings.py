"""The settings of `serve`, and its decision about a finished group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lachesis.training.groups import RejectedGroup, TrainingGroup
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
    """Sampled tokens that are therefore not delivered."""
    rewards: Sequence[float | None] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its line in `refused.jsonl`."""
    again: bool = False
    """The infrastructure broke it, which says nothing about the item: the item is played again."""


Decision = Sendable | Unsendable

PlayGroup = Callable[[Any, str], Awaitable[G]]
"""Plays the group of an item and its key. Its exceptions, except `RunStopped`, count as broken infrastructure."""

BuildGroup = Callable[[G, TrainerInfo], Decision]
"""Decides about a finished group. It runs in a thread and may take long."""


def decide(
    built: TrainingGroup | RejectedGroup,
    *,
    rewards: Sequence[float | None],
    record: Mapping[str, Any] | None = None,
    again: bool = False,
) -> Decision:
    """The decision that follows from `build_group`. `record` and `again` are for a group that is not sent."""
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
    """The pace of a run. Nothing here decides the content of groups."""

    max_workers: int
    """Groups in flight."""
    max_batches_offpolicy: int = 3
    """Batches that may be on their way: in flight, in the outbox and at the API, in sum."""
    total_steps: int = -1
    """The step of the trainer at which the run ends; -1 takes it from the trainer."""
    steps_per_eval: int = 100
    """0 or less: no evaluation."""
    eval_handling: Literal["STOP_TRAIN", "LIMIT_TRAIN", "NONE"] = "STOP_TRAIN"
    """While an evaluation runs: begin no groups, begin `eval_limit_ratio` of them, or begin all."""
    eval_limit_ratio: float = 0.5
    worker_timeout: float = -1.0
    """Seconds for one group; 0 or less: no limit. A last resort: rollouts have a timeout themselves."""
    grace_period: float = 60.0
    """Seconds for groups in flight to finish after the run is stopped."""
    item_pause: float = 5.0
    """Seconds before an item whose group failed is played again; each further pause is four times as long."""
    window: int = 1
    """Batches that may wait at the API (see `lachesis.training.relay`)."""
