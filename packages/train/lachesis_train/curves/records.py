"""The trainer's report of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SOUND: Final = ("same_scores", "duplicate")
"""Why groups are not trained that are not refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """The fate of one sequence of a group."""

    skipped: str | None = None
    """Why it was not trained, as a short name that can be counted (`unproven`, `too_long`); None: it was."""
    detail: str = ""
    """The reason in a sentence."""
    advantage: float = 0.0
    """Of its trained tokens; their mean where they differ."""
    token_advantages: Sequence[float] = ()
    """Of each of them, where they differ."""
    sampler_logprobs: Sequence[float] = ()
    """Of its trained tokens, in order, as the sampler reported them."""
    trainer_logprobs: Sequence[float] = ()
    """Of the same tokens, as the engine computed them before the update."""
    staleness: int | None = None
    """Versions between the oldest weights that sampled a token of it and those of the step. None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One group of the batch."""

    body: Mapping[str, Any]
    """As received from `GET /batch`."""
    samples: Sequence[SampleRecord] = ()
    """One for each sequence of the body, in its order; empty where nothing is known of them but `skipped`."""
    skipped: str | None = None
    """Why the group as a whole was not trained, as a short name (`same_scores`, `unproven`); None: each sequence of it
    says whether it was."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of the trainer. It is recorded before the checkpoint that contains it."""

    step: int
    version: str
    """The weights after the step (`RUN:STEP`)."""
    batch_id: int | None = None
    """None from a rollout API that does not number its batches."""
    groups: Sequence[GroupRecord] = ()
    loss: Mapping[str, float] = field(default_factory=dict)
    """Figures of the engine: `loss`, `grad_norm` and any others, by name; each becomes `train/NAME`, without the kind
    of sum that Tinker's names end with (`loss:sum`)."""
    evaluation: Mapping[str, float] = field(default_factory=dict)
    """Figures on held-out data; each becomes `eval/NAME`."""
    tokens: int | None = None
    samples: int | None = None
    """Trained tokens and sequences, where there are no groups to count them in."""
    learning_rate: float | None = None
    ratio_bounds: tuple[float, float] | None = None
    """The smallest and largest importance ratio beyond which the loss clips or truncates; None: it does neither."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by phase: `wait` (for a batch), `check`, `forward_backward`, `optim`, `publish`, ..."""
    queue: int | None = None
    """Groups that wait at the rollout API."""
