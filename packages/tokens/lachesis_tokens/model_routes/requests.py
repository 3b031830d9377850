"""A request for completions, whatever the API, and the reading of its sampling parameters."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lachesis_client.sampling import Sampling


class ImagePlace(Protocol):
    """The tokens of an image in a prompt."""

    @property
    def start(self) -> int: ...

    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True)
class SamplingRequest:
    """A request for completions, independent of its API."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    n: int = 1
    """CompletionsRoute of each prompt."""
    stop_ids: Collection[int] = ()
    """Further ids that end a completion."""
    ignore_end: bool = False
    """Whether an end-of-turn id does not end the completion."""
    keep_stop: bool = False
    """Whether the stop text stays in the text of a completion."""
    skip_special: bool = True
    """Whether special tokens stay out of the text of a completion."""
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    images: Sequence[Any] = ()
    """Those in its only prompt, each an `ImagePlace`."""


class Rejected(Exception):
    """An error answer: its status and message, and the field that vLLM's errors name."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        self.param = param
        self.headers = headers
        super().__init__(message)


class PromptTooLong(Rejected):
    """The prompt leaves no room for a completion."""


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
    """Whether this is a list of token ids, and not of prompts. `check_ids` looks at all of them."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def check_ids(ids: Sequence[int], vocabulary_size: float = math.inf) -> None:
    """Raises `ValueError` for what is no list of ids of the vocabulary."""
    try:
        array("q", ids)
        least, most = min(ids, default=0), max(ids, default=0)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are whole numbers from 0 on: {error}") from None
    if least < 0:
        raise ValueError(f"token ids are whole numbers from 0 on, got {least}")
    if most >= vocabulary_size:
        raise ValueError(f"Token id {most} is out of vocabulary")


def read_request(
    body: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    default_max_tokens: int,
    least: int = 1,
    max_tokens: str = "max_tokens",
    seed: str = "seed",
    keep_stop: str = "include_stop_str_in_output",
    top_k_off: tuple[int, ...] = (0, -1),
) -> SamplingRequest:
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
        seed=None if body.get(seed) is None else whole(body, seed, 0),
    )
    stop_ids = body.get("stop_token_ids") or ()
    if stop_ids and not (is_ids(stop_ids) and all(type(index) is int for index in stop_ids)):
        raise ValueError("stop_token_ids must be a list of token ids.")
    n = whole(body, "n", 1)
    if sampling.max_tokens < least:
        raise ValueError(f"{max_tokens} must be at least {least}, got {sampling.max_tokens}.")
    if not 0 <= sampling.temperature < math.inf:
        raise ValueError(f"temperature must be non-negative and finite, got {sampling.temperature}.")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {sampling.top_p}.")
    if top_k not in top_k_off and top_k < 1:
        raise ValueError(f"top_k must be {top_k_off[0]} (disable), or at least 1, got {top_k}.")
    if not 0 <= sampling.min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1], got {sampling.min_p}.")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    return SamplingRequest(
        prompts=prompts,
        sampling=sampling,
        n=n,
        stop_ids=tuple(stop_ids),
        ignore_end=bool(body.get("ignore_eos")),
        keep_stop=bool(body.get(keep_stop)),
        skip_special=body.get("skip_special_tokens") is not False,
    )
