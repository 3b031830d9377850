"""The decision about a finished group: it is kept, or it is left out for a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Kept:
    """A group that goes to its destination."""

    content: Mapping[str, Any]
    """A record, or a training group in Atropos' shape without `env_id`."""
    tokens: int = 0
    """Trained tokens in it."""
    undelivered: int = 0
    """Sampled tokens of its rollouts that are not in it, on purpose."""
    of_split: int = 0
    """Those of them that are in further samples of its rollouts, which `split_rollouts` leaves out."""
    rewards: Sequence[float | None] = ()
    tracebacks: Sequence[str] = ()
    """Exceptions in the environment's own code."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A group that does not go to its destination."""

    reason: str
    """One of a few, so that groups can be counted by it."""
    detail: str
    tokens: int = 0
    """Sampled tokens that are lost with it."""
    rewards: Sequence[float | None] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    """The recorded details."""
    again: bool = False
    """The infrastructure broke it, which says nothing about the item: play it again."""
    declined: bool = False
    """The environment itself made no group of the item, as it may: nothing failed."""
    left_to_agents: bool = False
    """Its rollouts have no reward by what their agents did, and by the settings for that: nothing failed."""
    unscored_because: str = ""
    """Why the last rollout without a reward has none."""
    of_every_group: bool = False
    """The reason lies in the server and the settings: the next groups would be left out as well."""
    tracebacks: Sequence[str] = ()
    broken_item: bool = False
    """Its item fails in the same way in every attempt while others are answered: the run continues without it."""
    too_old: bool = False
    """It took too long for the trainer: nothing failed."""

    @property
    def blameless(self) -> bool:
        """Whether it says nothing about the environment, the servers and the settings."""
        return self.declined or self.left_to_agents or self.too_old or self.broken_item


Decision = Kept | LeftOut
