"""What a token engine is: token ids in, token ids and logprobs out, over somebody's HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from lachesis.inference.http_client import ServerSettings
from lachesis.inference.sampling import LogprobsKind, Sampling
from lachesis.trajectories.messages import FinishReason


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion, token by token."""

    ids: Sequence[int]
    """Every sampled id, the end-of-turn token included where one was sampled."""
    logprobs: Sequence[float]
    """Natural logarithms, one for each id, of the kind that the engine says (`TokenEngine.logprobs`)."""
    finish_reason: FinishReason
    """STOP, LENGTH, CONTENT_FILTER or UNKNOWN: what the engine said, never invented."""
    raw_finish_reason: str | None = None
    model_version: str | None = None
    """The weights, where the server names them for each completion; joined by "+" where they changed meanwhile."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The answer to one request."""

    generations: Sequence[Generation]
    """Exactly the `n` that were asked for."""
    model: str | None
    """The model that the server says answered."""
    model_version: str | None
    """The weights, where the server names them; joined by "+" where they changed while it sampled."""
    latency: float
    """Seconds of the attempt that brought it."""
    attempts: int
    """Requests that it took, failed ones included."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """How it was sampled, the settings' `extra_body` included: what is written down with every span."""


@runtime_checkable
class TokenEngine(Protocol):
    """A server that takes token ids and reports the ids and logprobs that it sampled.

    Errors are those of `lachesis.inference.errors`: `ServerUnavailable` after bounded retries, `ContextExhausted`
    where prompt and answer do not fit, other `RequestRejected` at once, `BadResponse` for an answer whose tokens
    cannot be trusted (ids and logprobs of different lengths, none at all, an echoed prompt that is not the one that
    was sent).
    """

    kind: ClassVar[str]
    """Its name in settings."""
    settings: ServerSettings

    @property
    def base_url(self) -> str: ...

    @property
    def logprobs(self) -> LogprobsKind:
        """What the reported logprobs are of."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> Generated:
        """`n` completions of the prompt. A cancelled call closes its connection, so that the server stops, too."""
        ...

    async def check(self) -> list[str]:
        """The names of the models, without any completion; raises where the server cannot be used."""
        ...

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        ...
