"""The fields of a request without those that have no effect, and how its answer is written."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lachesis.inference.sampling import Sampling, read_sampling
from lachesis.inference.wire.request import JSON, ChatRequest, Refused, TextRequest, is_ids, take
from lachesis.trajectories.sampling_record import has_effect

_WRITING: Final = frozenset(
    {"return_token_ids", "return_tokens_as_token_ids", "return_prompt_token_ids", "skip_special_tokens"}
    | {"include_stop_str_in_output", "no_stop_trim", "stop_token_ids", "ignore_eos"}
)
"""Fields of vLLM and SGLang that `Wanted` holds."""
_WITHOUT_EFFECT: Final = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "timeout", "verbosity"}
)
"""Fields that OpenAI's clients send."""
_NOT_REPORTED: Final = frozenset(
    {"logprob_token_ids", "prompt_logprob_start", "prompt_logprob_token_ids", "prompt_logprobs", "return_entropy"}
    | {"return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_hidden_states"}
    | {"return_indexer_topk", "return_routed_experts", "token_ids_logprob", "top_logprobs_num", "lora_id", "lora_path"}
)
"""They do not change what is sampled. Their answer would lack what they ask for, or be of another policy."""
_ZERO_ASKS: Final = ("prompt_logprob_start", "prompt_logprobs")
"""Those of them that are switched off by null, and not by 0."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The fields of vLLM and SGLang that shape an answer."""

    return_ids: bool = False
    """Whether the answer repeats the ids of the prompt and lists those of the completion."""
    ids_as_tokens: bool = False
    """Whether the tokens of logprobs are named by their ids."""
    skip_special: bool = True
    """Whether special tokens stay out of a text completion."""
    keep_stop: bool = False
    """Whether the stop text stays in it."""
    extra: JSON = field(default_factory=dict)
    """For `Sampling.extra`."""


def wanted(body: Mapping[str, Any]) -> Wanted:
    """Raises `Refused` for fields of another type."""

    def flag(*names: str, default: bool = False) -> bool:
        return any(take(body, name, bool, default=default) for name in names)

    extra: JSON = {"ignore_eos": True} if flag("ignore_eos") else {}
    if ids := take(body, "stop_token_ids", list):
        if not is_ids(ids):
            raise Refused(400, "stop_token_ids is not a list of token ids", param="stop_token_ids")
        extra["stop_token_ids"] = ids
    return Wanted(
        return_ids=flag("return_token_ids", "return_prompt_token_ids"),
        ids_as_tokens=flag("return_tokens_as_token_ids"),
        skip_special=flag("skip_special_tokens", default=True),
        keep_stop=flag("include_stop_str_in_output", "no_stop_trim"),
        extra=extra,
    )


def meant(body: Mapping[str, Any], read: Collection[str], where: str = "") -> JSON:
    """The fields in `read` that have a value. Those of `Wanted`, and those without an effect, are left out.

    Raises:
        Refused: another field may change what is sampled, or asks for what no answer here has.
    """
    kept: JSON = {}
    for name, value in body.items():
        if name in _WRITING or name in _WITHOUT_EFFECT or (name == "best_of" and value == 1):
            continue
        if name in read:
            if value is not None:
                kept[name] = value
        elif has_effect(name, value) or (name in _NOT_REPORTED and (value or (value == 0 and name in _ZERO_ASKS))):
            if name == "stream":
                reason = "completions come whole; send it as false"
            elif name in _NOT_REPORTED:
                reason = "this server does not report it, and serves one policy; leave it out"
            else:
                reason = "tokens are sampled from the policy's own distribution, and it may change this; leave it out"
            raise Refused(400, f"{where}{name}: {reason}", code="unsupported_parameter", param=name)
    return kept


def sampling_of(request: ChatRequest | TextRequest, asked: Wanted, *, default_max_tokens: int) -> Sampling:
    """Raises `Refused` for values that no distribution has."""
    given = request.sampling
    for name, fits, wanted in (
        ("temperature", lambda value: 0 <= value < math.inf, "0 or more, and finite"),
        ("top_p", lambda value: 0 < value <= 1, "above 0 and at most 1"),
        ("top_k", lambda value: isinstance(value, int) and value >= -1, "a whole number; 0 and -1 are off"),
        ("seed", lambda value: isinstance(value, int), "a whole number"),
    ):
        if name in given and not fits(given[name]):
            raise Refused(400, f"{name} is {given[name]!r}, not {wanted}", param=name)
    arguments = {**given, "stop": request.stop, "max_tokens": request.max_tokens, "extra_body": asked.extra}
    return read_sampling(arguments, default_max_tokens=default_max_tokens)
