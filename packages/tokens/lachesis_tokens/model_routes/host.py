"""What the routes ask of the server that they belong to, and what it gives them to write."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar, Protocol, TypeAlias

from lachesis_client.sampling import LogprobsKind
from lachesis_tokens.model_routes.requests import ImagePlace, SamplingRequest

JSON: TypeAlias = dict[str, Any]
ABORTED = "abort"
"""The finish reason of a completion that was stopped from outside, in vLLM and in SGLang."""


class SampledCompletion(Protocol):
    """One completion."""

    @property
    def prompt(self) -> int:
        """The index of its prompt in the request."""
        ...

    @property
    def index(self) -> int:
        """Its index among the completions of this prompt."""
        ...

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def text(self) -> str: ...

    @property
    def finish_reason(self) -> str: ...

    @property
    def stop_reason(self) -> int | str | None:
        """The stop id or text that ended it; None for an end-of-turn id and for "length", as in vLLM."""
        ...

    @property
    def versions(self) -> Sequence[tuple[str, int, int]]:
        """(version of the weights, start, end): contiguous ranges over all ids."""
        ...


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    """A completion as the server reports it. The fake server reports false ones too."""

    made: SampledCompletion
    prompt_ids: Sequence[int]
    ids: Sequence[int] | None
    logprobs: Sequence[float | None] | None
    cached: int | None = None
    """Tokens of the prompt that were cached; None if the server does not say it."""


class ModelHost(ABC):
    """A model server: its name, its tokenizer, and what it can report. Without an override it reports no more than the
    sampled tokens and their logprobs."""

    model_name: str
    weight_version: str
    context_length: int | None
    """Tokens of prompt and completion together; None: only the engine knows."""
    logprobs_mode: LogprobsKind
    """"raw" or "processed": vLLM's `--logprobs-mode`."""
    sampling_mask: bool = False
    """vLLM's `--return-sampling-mask`."""
    experts: tuple[int, int, int] | None = None
    """Layers, experts of a token in each, and experts of a layer, of a server with --enable-return-routed-experts."""

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Ids that a prompt may have."""

    @property
    @abstractmethod
    def end_ids(self) -> frozenset[int]:
        """Ids that end a turn."""

    @property
    def takes_images(self) -> bool:
        return False

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""

    @abstractmethod
    def token_text(self, index: int) -> str:
        """The text of one id alone."""

    def token_bytes(self, index: int) -> bytes:
        """The bytes that an id adds to the text."""
        return self.token_text(index).encode("utf-8", "replace")

    @abstractmethod
    def chat_prompt(self, body: Mapping[str, Any]) -> list[int]:
        """The ids of a conversation's prompt; none if the server makes them where it samples.

        Raises `ValueError` if the template raises.
        """

    @abstractmethod
    def message(self, request: SamplingRequest, made: SampledCompletion) -> JSON:
        """The assistant message of a completion, with the calls in it."""

    def version_of(self, made: SampledCompletion) -> str:
        """The version of the weights at the end of a completion."""
        return self.weight_version

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Tokens of a completion that sets no maximum."""
        return max(1, (self.context_length or 0) - len(prompt_ids))

    def with_images(
        self, ids: Sequence[int], urls: Sequence[object], *, strict: bool
    ) -> tuple[list[int], Sequence[ImagePlace]]:
        """The ids with every image expanded, and the places of the images. Placeholders that are left over stay, unless
        `strict`. Raises `ValueError` for other images than the server takes."""
        raise ValueError("At most 0 image(s) may be provided in one prompt.")

    def likeliest(
        self, request: SamplingRequest, made: SampledCompletion, count: int
    ) -> Iterable[Sequence[tuple[int, float]]]:
        """For each sampled token, the `count` likeliest ids with their logprobs. For a count of 0: empty ones,
        without end."""
        return repeat(())

    def prompt_scores(
        self, request: SamplingRequest, prompt_ids: Sequence[int], count: int
    ) -> tuple[list[float], Sequence[Sequence[tuple[int, float]]]]:
        """For each token of the prompt but the first: its logprob, and the `count` likeliest ids there."""
        raise ValueError("The tokens of prompts are not scored.")

    def experts_of(self, ids: Sequence[int]) -> list[int]:
        """For each token, the experts of all layers."""
        return []

    def sampling_masks(self, request: SamplingRequest, made: SampledCompletion) -> list[list[int]]:
        """For each sampled token, the ids that top-k, top-p and min-p left."""
        return []

    def mask_logprobs(self, request: SamplingRequest, made: SampledCompletion) -> list[float]:
        """The logprobs of the sampled tokens among these ids."""
        return []


class ModelRoute(ABC):
    """One route for completions."""

    name: ClassVar[str]
    rejects_with: ClassVar[int] = 400
    """The status for a request that `read` rejects."""

    def logprobs(self, host: ModelHost) -> LogprobsKind:
        """The kind of its logprobs."""
        return host.logprobs_mode

    def rank(self, body: JSON, headers: Mapping[str, str]) -> object:
        """The data-parallel rank that the request names; None: it names none."""
        return headers.get("X-Data-Parallel-Rank")

    @abstractmethod
    def read(self, host: ModelHost, body: JSON) -> SamplingRequest:
        """The request. Raises `Rejected`, or `ValueError` with the message of the server whose route it is."""

    @abstractmethod
    def write(self, host: ModelHost, body: JSON, request: SamplingRequest, shown: Sequence[ShownCompletion]) -> Any:
        """The answer, for JSON."""

    @abstractmethod
    def failure(self, status: int, message: str, param: str | None) -> JSON | str:
        """The body of an error."""


def openai_error(status: int, message: str, param: str | None = None) -> JSON:
    """An error in vLLM's form (`ErrorResponse`)."""
    kinds = {
        400: "BadRequestError",
        404: "NotFoundError",
        429: "Too Many Requests",
        500: "InternalServerError",
        503: "Service Unavailable",
    }
    return {"error": {"message": message, "type": kinds.get(status, "Error"), "param": param, "code": status}}


def usage(shown: Sequence[ShownCompletion]) -> JSON:
    """Token counts. Each prompt counts once."""
    prompt = sum({each.made.prompt: len(each.prompt_ids) for each in shown}.values())
    completion = sum(len(each.made.ids) for each in shown)
    counts: JSON = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    cached = {each.made.prompt: each.cached for each in shown if each.cached is not None}
    # As vLLM with --enable-prompt-tokens-details.
    return {**counts, "prompt_tokens_details": {"cached_tokens": sum(cached.values())}} if cached else counts


def version_spans(made: SampledCompletion) -> list[JSON]:
    """The version of the weights of each range of sampled tokens, as vLLM and SGLang list them."""
    return [{"version": version, "start": start, "end": end} for version, start, end in made.versions]


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def now() -> int:
    return int(time.time())


# The routes that sample nothing.


def model_list(host: ModelHost, **more: Any) -> JSON:
    """`GET /v1/models` of vLLM; `more` are further fields of the model's card."""
    card = {
        "id": host.model_name,
        "object": "model",
        "created": now(),
        "owned_by": "vllm",
        "root": host.model_name,
        "parent": None,
        "max_model_len": host.context_length,
        "permission": [{"id": new_id("modelperm-"), "object": "model_permission", "created": now()}],
    }
    return {"object": "list", "data": [{**card, **more}]}


def model_info(host: ModelHost) -> JSON:
    """`GET /model_info` of SGLang."""
    return {
        "model_path": host.model_name,
        "tokenizer_path": host.model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": host.weight_version,
    }


def tokenized(host: ModelHost, body: Mapping[str, Any]) -> JSON:
    """`POST /tokenize` of vLLM: the ids of a text, or of a conversation's prompt. Raises `ValueError`."""
    if "messages" in body:
        ids = host.chat_prompt(body)
    elif isinstance(body.get("prompt"), str):
        ids = host.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
    else:
        raise ValueError("prompt or messages: Field required")
    return {"count": len(ids), "max_model_len": host.context_length, "tokens": ids, "token_strs": None}
