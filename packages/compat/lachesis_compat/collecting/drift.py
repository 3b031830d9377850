"""Where the tokens that an environment returned differ from those that the model sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from lachesis_compat.collecting.returned import ReturnedSample
from lachesis_messages.tokens import MASKED
from lachesis_tokens.samples.samples import TokenSample

_SHOWN = 12
"""Tokens of each side that are shown."""


class DriftKind(StrEnum):
    """The first thing that differs."""

    NONE = "none"
    """The same ids are trained, after the same prefix."""
    NO_IDS = "no ids"
    """The environment returned something else than lists of token ids."""
    PROMPT = "prompt"
    """Before the first sampled token: the model saw another prompt."""
    COMPLETION = "completion"
    """Within a completion: its text was encoded to other ids than were sampled, or changed."""
    BETWEEN = "between turns"
    """Between two completions: the template writes an earlier turn in another way than it was sampled."""
    END = "end"
    """After the last sampled token, or missing before it: an end of turn, a newline of the template."""
    MASKS = "masks"
    """The ids are the same, but other positions are trained."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The comparison of one sample."""

    kind: DriftKind
    position: int | None = None
    """The first position that differs."""
    sampled: str = ""
    """The text from there on as it was sampled, cut."""
    returned: str = ""
    """The same as the environment returned it."""
    masks: int = 0
    """Positions that are trained in one of the two only, up to the shorter one's end."""
    unsampled: int = 0
    """Trained positions of the environment beyond those that were sampled."""
    logprobs_missing: bool = False
    zeros_and_ones: bool = False
    """The masks are 0 and 1, so that a trainer of Atropos would train on these two ids."""

    @property
    def differs(self) -> bool:
        return self.kind is not DriftKind.NONE

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value}

    def describe(self) -> str:
        """One line, without a name."""
        logprobs = "; no logprobs" if self.logprobs_missing else ""
        if self.kind is DriftKind.NONE:
            return f"the sampled tokens{logprobs}"
        if self.kind is DriftKind.NO_IDS:
            return f"no lists of token ids{logprobs}"
        where = f"{self.kind.value} differs from token {self.position} on: "
        texts = f"sampled {self.sampled!r}, returned {self.returned!r}"
        masks = f"; {self.masks} mask positions differ" if self.masks else ""
        zeros = "; the masks are 0 and 1" if self.zeros_and_ones else ""
        return f"{where}{texts}{masks}{zeros}{logprobs}"


def drift_of(returned: ReturnedSample, sample: TokenSample, decode: Callable[[Sequence[int]], str]) -> Drift:
    """Compare a returned sample with the sampled tokens that replace it."""
    missing = not returned.logprobs
    if returned.tokens is None or returned.masks is None:
        return Drift(DriftKind.NO_IDS, logprobs_missing=missing)
    theirs, ours = returned.tokens, sample.tokens
    trained = [False] * len(theirs)
    for start, end in returned.runs():
        trained[start:end] = [True] * (end - start)
    sampled = [mask != MASKED for mask in sample.masks]
    masks = sum(one != other for one, other in zip(trained, sampled, strict=False))
    position = next(
        (at for at, (one, other) in enumerate(zip(theirs, ours, strict=False)) if one != other),
        min(len(theirs), len(ours)),
    )
    tail = any(trained[len(ours) :])
    same_ids = position == len(ours) and not tail
    if same_ids and not masks and not returned.zeros_and_ones:
        return Drift(DriftKind.NONE, logprobs_missing=missing)
    kind = DriftKind.MASKS if same_ids else _kind(position, theirs, sample)
    if same_ids:
        position = next((at for at, (one, other) in enumerate(zip(trained, sampled, strict=False)) if one != other), 0)
    return Drift(
        kind,
        position,
        decode(ours[position : position + _SHOWN]),
        decode(theirs[position : position + _SHOWN]),
        masks,
        max(0, sum(trained) - sum(sampled)),
        missing,
        returned.zeros_and_ones,
    )


def _kind(position: int, theirs: Sequence[int], sample: TokenSample) -> DriftKind:
    first, last = sample.spans[0], sample.spans[-1]
    if position < first.start:
        return DriftKind.PROMPT
    if position >= last.end or (position == last.end - 1 and sample.tokens[-1] in sample.end_of_turn):
        return DriftKind.END
    if any(span.start <= position < span.end for span in sample.spans):
        return DriftKind.COMPLETION
    return DriftKind.BETWEEN


@dataclass(slots=True)
class DriftTotals:
    """The comparison of all samples of a run."""

    samples: int = 0
    differing: int = 0
    refused: int = 0
    without_logprobs: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: Drift | None = None
    """The first that differs."""

    def add(self, drift: Drift) -> None:
        self.samples += 1
        self.differing += drift.differs
        self.without_logprobs += drift.logprobs_missing
        if drift.differs:
            self.kinds[drift.kind.value] += 1
            self.first = self.first or drift

    def to_record(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "differing": self.differing,
            "refused": self.refused,
            "without_logprobs": self.without_logprobs,
            "kinds": dict(self.kinds),
            "first": self.first.to_record() if self.first is not None else None,
        }

    def describe(self) -> str:
        if not self.samples and not self.refused:
            return "no sample was compared"
        share = f"{self.differing} of {self.samples} samples have other tokens than were sampled"
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common())
        parts = [f"{share} ({kinds})" if kinds else share]
        if self.without_logprobs:
            parts.append(f"{self.without_logprobs} without logprobs")
        if self.refused:
            parts.append(f"{self.refused} refused")
        return "; ".join(parts)
