"""An environment's knowledge of its trainer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """The registration of the trainer."""

    batch_size: int
    """Sequences a step."""
    max_token_len: int
    """A sequence of this many tokens is too long."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The answer of the API to the registration of an environment."""

    env_id: int
    starting_step: int
    num_steps: int
    checkpoint_dir: str = ""
    """The trainer's folder, in which environments may keep their own state."""
    checkpoint_interval: int = -1
    """Steps between two checkpoints of the trainer; -1 for none."""
