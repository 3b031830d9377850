"""Parts that all APIs share: reading a request into a `Call`, writing completions in the server's fields."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, ClassVar, TypeVar

from lachesis.inference.sampling import LogprobsKind, Sampling
from lachesis_testing.fake_server.completions import Call, Completion
from lachesis_testing.fake_server.model import FakeModel
from lachesis_testing.fake_server.tokenizer import Codec

JSON = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    """The server's state that an API needs."""

    codec: Codec
    model: FakeModel
    model_name: str
    weight_version: str
    context_length: int
    """Tokens of prompt and completion together."""
    logprobs_mode: LogprobsKind
    """"raw" or "processed": vLLM's `--logprobs-mode`."""
    tool_call_parser: str | None
    """Reads calls from the text on the chat route. None leaves them in the text."""
    experts: tuple[int, int, int] | None = None
    """Layers, experts of a token in each, and experts of a layer: the server has --enable-return-routed-experts."""
    sampling_mask: bool = False
    """vLLM's --return-sampling-mask."""
    image_token: int | None = None
    """The placeholder of a model that takes images."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A completion as the server reports it, with or without wire faults."""

    made: Completion
    prompt_ids: Sequence[int]
    ids: Sequence[int] | None
    logprobs: Sequence[float | None] | None
    cached: int | None = None
    """Tokens of the prompt that were cached; None if the server does not say it."""


class Rejected(Exception):
    """An error answer: its status and message, and the field that vLLM's errors name."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.param = param
        self.headers = headers
        super().__init__(message)


class Api(ABC):
    """One route for completions."""

    name: ClassVar[str]
    rejects_with: ClassVar[int] = 400
    """The status for a request that `read` rejects."""

    def logprobs(self, host: Host) -> LogprobsKind:
        """The kind of its logprobs."""
        return host.logprobs_mode

    def rank(self, body: JSON, headers: Mapping[str, str]) -> object:
        """The data-parallel rank that the request names; None: it names none."""
        return headers.get("X-Data-Parallel-Rank")

    @abstractmethod
    def read(self, host: Host, body: JSON) -> Call:
        """The request. Raises `Rejected`, or `ValueError` with the message of the imitated server."""

    @abstractmethod
    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> Any:
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


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    """A number of the request; `default` for null. Raises `ValueError` for other types."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return value


def whole(body: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of the request; `default` for null. Raises `ValueError` for other types."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    return value


def stop_texts(value: Any) -> tuple[str, ...]:
    """`stop`: a text or a list of texts."""
    if not value:
        return ()
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in found):
        raise ValueError("stop must be a string, or a list of strings that are not empty.")
    return found


def is_ids(value: Any) -> bool:
    """Whether this is a list of token ids, and not of prompts."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def by_model(
    call: Call, made: Completion, ask: Callable[[FakeModel, Sequence[int], Sequence[int]], Iterable[T]]
) -> list[T]:
    """One value for each sampled token, from the model that sampled it: `ask` gets the ids before and its ids."""
    prompt = call.prompts[made.prompt]
    parts = (ask(model, [*prompt, *made.ids[:start]], made.ids[start:end]) for model, _, start, end in made.weights)
    return list(chain.from_iterable(parts))


def top_logprobs(host: Host, call: Call, made: Completion, count: int) -> Iterable[Sequence[tuple[int, float]]]:
    """For each sampled token, the `count` likeliest ids with their logprobs. Without a count: empty ones, no end."""
    if not count:
        return repeat(())
    kind = host.logprobs_mode
    return by_model(call, made, lambda model, before, ids: model.top(before, ids, call.sampling, kind, count))


def usage(shown: Sequence[Shown]) -> JSON:
    """Token counts. Each prompt counts once."""
    prompt = sum({each.made.prompt: len(each.prompt_ids) for each in shown}.values())
    completion = sum(len(each.made.ids) for each in shown)
    counts: JSON = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    cached = {each.made.prompt: each.cached for each in shown if each.cached is not None}
    # As vLLM with --enable-prompt-tokens-details.
    return {**counts, "prompt_tokens_details": {"cached_tokens": sum(cached.values())}} if cached else counts


def version_spans(each: Shown) -> list[JSON]:
    """The version of the weights of each range of sampled tokens, as vLLM and SGLang list them."""
    return [{"version": version, "start": start, "end": end} for version, start, end in each.made.versions]


def read_call(
    body: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    default_max_tokens: int,
    least: int = 1,
    max_tokens: str = "max_tokens",
    seed: str = "seed",
    keep_stop: str = "include_stop_str_in_output",
    top_k_off: tuple[int, ...] = (0, -1),
) -> Call:
    """The sampling parameters of a request, with the range checks and messages of vLLM and SGLang.

    Args:
        least: the smallest allowed `max_tokens`.
        max_tokens, seed, keep_stop: the server's names of these fields.
        top_k_off: the values that switch top-k off; the first is the default.

    Raises:
        ValueError: a parameter has another type or is out of range.
    """
    top_k = whole(body, "top_k", top_k_off[0])
    sampling = Sampling(
        max_tokens=whole(body, max_tokens, default_max_tokens),
        temperature=number(body, "temperature", 1.0),
        top_p=number(body, "top_p", 1.0),
        top_k=0 if top_k in top_k_off else top_k,
        min_p=number(body, "min_p", 0.0),
        presence_penalty=number(body, "presence_penalty", 0.0),
        frequency_penalty=number(body, "frequency_penalty", 0.0),
        repetition_penalty=number(body, "repetition_penalty", 1.0),
        stop=stop_texts(body.get("stop")),
        seed=body.get(seed),
    )
    n = whole(body, "n", 1)
    if sampling.max_tokens < least:
        raise ValueError(f"{max_tokens} must be at least {least}, got {sampling.max_tokens}.")
    if sampling.temperature < 0:
        raise ValueError(f"temperature must be non-negative, got {sampling.temperature}.")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {sampling.top_p}.")
    if top_k not in top_k_off and top_k < 1:
        raise ValueError(f"top_k must be {top_k_off[0]} (disable), or at least 1, got {top_k}.")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1], got {sampling.min_p}.")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    return Call(
        prompts=prompts,
        sampling=sampling,
        n=n,
        stop_ids=tuple(body.get("stop_token_ids") or ()),
        ignore_end=bool(body.get("ignore_eos")),
        keep_stop=bool(body.get(keep_stop)),
        skip_special=body.get("skip_special_tokens") is not False,
    )


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def now() -> int:
    return int(time.time())
