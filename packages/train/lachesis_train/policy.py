"""The policy that a trainer and its policy server share: versions of the weights, of which one is current.

A completion keeps the version that was current when it began. Publishing another one changes what later completions
are sampled with, never one that has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from lachesis_client.sampling import LogprobsKind

StopReason: TypeAlias = Literal["stop", "length"]
"""Why a sampler ended: an end-of-turn token or a stop was sampled, or `max_tokens` was reached."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion of a sampler."""

    tokens: Sequence[int]
    """Every sampled id, with the end-of-turn token and the tokens of a stop text if they were sampled."""
    logprobs: Sequence[float]
    """Natural logarithms, one for each token, of the kind `CurrentPolicy.logprobs`."""
    stop_reason: StopReason


class Sampler(Protocol):
    """The weights of one version, as something that can be sampled. Several calls may run at the same time."""

    async def sample(
        self,
        prompt_ids: list[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int | None,
        stop: list[str] | list[int] | None,
    ) -> list[Sampled]:
        """Exactly `n` completions of the prompt.

        Args:
            top_k: -1 is off.
            stop: None ends at the end of a turn. Texts and ids end there instead, or there as well: both are accepted.
                An empty list disables every stop.

        Raises:
            ValueError: the engine refuses the request: the prompt does not fit, for example. The message says why.
            Exception: anything else is a failure of the engine.
        """
        ...

    async def logprobs(self, ids: list[int]) -> list[float]:
        """The logprob of each id after those before it, of raw logits; the first one is not used."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One version of the weights."""

    step: int
    """Steps of the trainer that made it; 0 before the first one."""
    name: str
    """`RUN:STEP`, what completions report as the version of their weights."""
    sampler: Sampler


class CurrentPolicy:
    """The current version, and the place where a trainer puts the next one.

    Args:
        logprobs: the distribution that the samplers' logprobs belong to, which matters at another temperature than 1.
    """

    def __init__(self, version: PolicyVersion, *, logprobs: LogprobsKind = "raw") -> None:
        self._current = version
        self.logprobs: LogprobsKind = logprobs

    @property
    def current(self) -> PolicyVersion:
        """The version that new completions are sampled with."""
        return self._current

    def publish(self, version: PolicyVersion) -> None:
        """Make `version` the current one.

        Raises:
            ValueError: another version with its name was published: nobody could tell which of them made a completion.
        """
        if version.name == self._current.name and version is not self._current:
            raise ValueError(f"policy version {version.name!r} is published already; give each version its own name")
        self._current = version

    def restore(self, version: PolicyVersion) -> None:
        """Make `version` the current one, whose weights were loaded again: its name may have been published."""
        self._current = version
