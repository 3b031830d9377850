"""The protocol of token engines: token ids in, token ids and logprobs out, over a server's HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_messages.messages import FinishReason
from lachesis_messages.replay import RoutedExperts, SamplingMask
from lachesis_messages.tokens import PromptChecked, Versions

REPLAY: Final = ("routed_experts", "sampling_mask")
"""The settings for what a trainer needs to repeat a completion, and the names under which an engine says that its API
reports them (`HttpEngine.replays`)."""


@dataclass(slots=True)
class Generation:
    """One completion, token by token, and how it was made. Only the engine that makes it sets its fields."""

    ids: Sequence[int]
    """Every sampled id, the end-of-turn token included if one was sampled."""
    logprobs: Sequence[float]
    """Natural logarithms, one for each id, of the kind `TokenEngine.logprobs`."""
    finish_reason: FinishReason
    """STOP, LENGTH, CONTENT_FILTER or UNKNOWN, as the server reports it; ABORT for the beginning of a completion, which
    may be empty. `TokenServer.generate` goes on with it."""
    raw_finish_reason: str | None = None
    model: str | None = None
    """The model that the server reports."""
    model_version: str | None = None
    """The version of the weights if the server reports it; joined by "+" if the weights changed meanwhile."""
    server: str = ""
    """`base_url` of the engine; of the last one if several went on with it."""
    latency: float = 0.0
    """Seconds of the attempt that succeeded; of all parts if it was interrupted."""
    attempts: int = 1
    """Requests sent, failed ones included."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters, those in `extra_body` of the settings included; recorded with every span."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the server had in its prefix cache; None where it does not say."""
    experts: RoutedExperts | None = None
    """If `ServerSettings.routed_experts` is set: of prompt and completion but the last token, from where those that the
    caller has end (`PromptIds.known_experts`). `join_experts` joins the pieces of a completion."""
    sampling_mask: SamplingMask | None = None
    """If `ServerSettings.sampling_mask` is set: of the sampled ids. `join_masks` joins the pieces of a completion."""
    prompt_checked: PromptChecked = "none"
    """How the server confirmed the prompt."""
    completion_id: str = ""
    """The server's name for this answer, by which a repeated one is recognised; empty where it gives none."""
    versions: Versions = ()
    interrupts: int = 0
    """How often it was aborted and went on."""
    image_tokens: tuple[int, ...] = ()
    """How many tokens the server made of each image in the prompt."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """How likely the tokens of a prompt are, each after those before it."""

    positions: Sequence[Sequence[tuple[int, float]]]
    """For each token of the prompt: itself, then the likeliest ids there, with natural logarithms. Empty for the first
    token, which nothing precedes."""
    latency: float = 0.0
    attempts: int = 1


@runtime_checkable
class PromptScorer(Protocol):
    """A token engine whose server also scores a given prompt."""

    async def prompt_logprobs(
        self, prompt_ids: Sequence[int], top_k: int, *, max_retries: int | None = None
    ) -> PromptLogprobs:
        """The prompt's own tokens, and the `top_k` likeliest at each position."""
        ...


@runtime_checkable
class ServerTokenizer(Protocol):
    """A token engine whose server also encodes text, so that its tokenizer can be compared with the run's."""

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's ids of a text; None if it has no way to say them. The text of a special token is its id."""
        ...


@runtime_checkable
class TokenEngine(Protocol):
    """A server that samples from token ids and reports the ids and logprobs that it sampled.

    It raises the errors of `lachesis_client.errors`: `ServerUnavailable` after bounded retries, `ContextExhausted`
    if prompt and answer do not fit, `RequestRejected` at once for other rejections, and `BadResponse` for an answer
    whose tokens cannot be trusted (ids and logprobs of different lengths, no ids, an echoed prompt that differs).
    """

    kind: ClassVar[str]
    """Its name in messages, and in the registry for the project's own engines."""
    modes: ClassVar[tuple[LogprobsKind, ...]]
    """The kinds of logprobs that the server can report. The first is the server's default."""
    settings: ServerSettings

    @property
    def base_url(self) -> str: ...

    @property
    def logprobs(self) -> LogprobsKind:
        """The kind of the reported logprobs."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> list[Generation]:
        """Exactly `n` completions of the prompt. A cancelled call closes its connection, so that the server stops."""
        ...

    async def check(self) -> list[str]:
        """The names of the models, without any completion. Raises if the server cannot be used."""
        ...

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        ...
