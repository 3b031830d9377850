"""What a request may ask of the policy: its fields without those that change nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from lachesis_messages.records.sampling_record import has_effect
from lachesis_tokens.model_routes.atropos import AtroposRoute
from lachesis_tokens.model_routes.chat import ChatRoute
from lachesis_tokens.model_routes.host import ModelRoute
from lachesis_tokens.model_routes.sglang import SGLangRoute
from lachesis_tokens.model_routes.vllm import GenerateRoute
from lachesis_tokens.wire.openai_chat import WISHES
from lachesis_tokens.wire.request import JSON, Refused, answers, take

_SAMPLING: Final = frozenset(
    {"n", "max_tokens", "stop", "seed", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos"}
    | {"skip_special_tokens", "include_stop_str_in_output"}
)
_TEXT: Final = _SAMPLING | {"model", "prompt", "logprobs"}
_CHAT: Final = (
    _SAMPLING
    | {"model", "messages", "tools", "tool_choice", "max_completion_tokens", "logprobs", "top_logprobs"}
    | frozenset(WISHES)
)
_GENERATE: Final = frozenset({"model", "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"})
_PARAMETERS: Final = _SAMPLING - {"seed", "max_tokens", "include_stop_str_in_output"} | {
    *("max_new_tokens", "sampling_seed", "no_stop_trim"),
}
_IDS: Final = frozenset({"model", "token_ids", "sampling_params"})
_IDS_PARAMETERS: Final = _SAMPLING | {"logprobs", "routed_experts_prompt_start"}
_WRITING: Final = frozenset(
    {"return_token_ids", "return_tokens_as_token_ids", "return_prompt_token_ids", "return_text_in_logprobs"}
)
"""Fields that only the answer shows."""
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


def allowed(route: ModelRoute, body: Mapping[str, Any], model_name: str) -> JSON:
    """The fields of a request for this route that have a value.

    Raises:
        Refused: another field may change what is sampled, or asks for what no answer here has; another model is meant.
    """
    if isinstance(route, (GenerateRoute, SGLangRoute)):
        of_vllm = isinstance(route, GenerateRoute)
        given = _meant(body, _IDS if of_vllm else _GENERATE)
        asked = take(body, "sampling_params", dict, default={})
        parameters = _meant(asked, _IDS_PARAMETERS if of_vllm else _PARAMETERS, "sampling_params.")
        given["sampling_params"] = parameters
        answers(parameters)
        _check_logprobs(parameters)
        if (start := given.pop("logprob_start_len", -1)) != -1:
            reason = f"logprob_start_len {start!r}: those of the prompt are not reported; send -1"
            raise Refused(400, reason, code="unsupported_parameter", param="logprob_start_len")
    else:
        more = frozenset() if isinstance(route, AtroposRoute) else frozenset({"add_special_tokens", "prompt_logprobs"})
        given = _meant(body, _CHAT if isinstance(route, ChatRoute) else _TEXT | more)
        answers(given)
        if given.get("top_logprobs"):
            raise Refused(400, "top_logprobs: only the logprobs of sampled tokens are known", param="top_logprobs")
        _check_logprobs(given)
        if take(given, "prompt_logprobs", int, default=0):
            raise Refused(400, "prompt_logprobs: the likeliest tokens are not known; send 0", param="prompt_logprobs")
        take(given, "tools", list)
        take(given, "tool_choice", str, dict)
        for name in WISHES:
            if given.pop(name, True) not in ({"type": "text"}, True):
                reason = f"{name} is not supported; leave it out"
                raise Refused(400, reason, code="unsupported_parameter", param=name)
    if (name := given.pop("model", None)) and name != model_name:
        raise Refused(
            404,
            f"there is no model {name!r} here, only {model_name!r}; set model_name to that",
            code="model_not_found",
            param="model",
        )
    return given


def _check_logprobs(given: Mapping[str, Any]) -> None:
    if take(given, "logprobs", int, bool, default=0) > 1:
        raise Refused(400, "logprobs: only those of sampled tokens are known; send 0 or 1", param="logprobs")


def _meant(body: Mapping[str, Any], read: Collection[str], where: str = "") -> JSON:
    """The fields in `read` that have a value. Raises `Refused` for others that matter."""
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
