"""Which sampling records a trainer can compute the logprobs of: an allow-list of the fields of requests.

An unknown field may affect what is sampled, or what the logprobs show. It is rejected by name until somebody who knows
the server declares it harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

OTHER_FIELDS: Final = "other_fields"
"""Key of a record: the names of sent fields that are not known here. Their values may be secrets."""
HARMLESS_FIELDS: Final = "harmless_fields"
"""Key of a record: those of them that `openai.harmless_fields` names."""
NOT_SAMPLED: Final = "none"
"""The kind of logprobs of tokens that no model sampled, such as a reference policy's."""


def sampling_problem(sampling: Mapping[str, Any]) -> str | None:
    """Why these logprobs differ from those that a trainer computes, and the setting to change; else None.

    `sampling` holds the parameters that were sent to the engine (absent: off) and, under `logprobs`, what the engine
    reports: "raw" for logits at temperature 1, "temperature" for logits divided by the temperature, "processed" for the
    final distribution. A trainer computes the softmax of all logits, divided by the temperature of the sample; if the
    tokens come with `sampling_mask`, that of the logits of the ids in it.
    """
    reported = sampling.get("logprobs")
    if reported == NOT_SAMPLED:
        return "no model sampled it: train on it with cross-entropy (lachesis train --sft)"
    if reported not in ("raw", "temperature", "processed"):
        return f"the sampling record names no kind of logprobs (got {reported!r}); set openai.logprobs_mode"
    temperature = sampling.get("temperature")
    if not isinstance(temperature, (int, float)) or not -_ABSURD < temperature < _ABSURD:
        return "the temperature was not sent, so it is unknown; set env.agent_temperature"
    if temperature <= 0:
        return f"temperature {temperature:g} does not sample; set env.agent_temperature to 1.0"
    if temperature != 1 and reported == "raw":
        return (
            f"sampled at temperature {temperature:g}, but the server reports logprobs at temperature 1; set "
            "env.agent_temperature to 1.0, or have the server report processed logprobs (vLLM: --logprobs-mode "
            "processed_logprobs) and set openai.logprobs_mode to processed"
        )
    replayed = _REPLAYED if sampling.get("sampling_mask") and reported == "processed" else ()
    for name, off in _OFF.items():
        value = sampling.get(name)
        if value is not None and value not in off and name not in replayed:
            return f"{name} = {value!r} samples from another distribution than the trainer's; set it to {off[0]!r}"
    for name in _CONSTRAINTS:
        if sampling.get(name):
            return f"{name} samples from another distribution than the trainer's; leave it out of extra_body"
    for name in _PROMPT:
        if sampling.get(name):
            return f"{name} puts into the prompt what its ids do not show; leave it out of extra_body"
    return _unknown_problem(sampling)


def sampling_without_problem(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The values that solve the problem of such a record; empty if there is none, or other values do not help."""
    same = {"logprobs": sampling.get("logprobs"), "temperature": 1.0}
    found: dict[str, Any] = {}
    if sampling_problem({**same, "temperature": sampling.get("temperature")}):
        found["temperature"] = 1.0
    for name, value in sampling.items():
        if name in _OFF and sampling_problem({**same, name: value}):
            found[name] = _OFF[name][0]
    needed = sampling_problem(sampling) is not None and sampling_problem({**sampling, **found}) is None
    return found if needed else {}


def is_sampling_field(name: str) -> bool:
    """Whether the value of this field of a request is recorded: it decides what is sampled, or where it ends."""
    return name == "temperature" or name in _OFF or name in _CONSTRAINTS or name in _PROMPT or name in _STOPS


def has_effect(name: str, value: Any) -> bool:
    """Whether this field of a request may change what is sampled or where it ends; a field that is not known may."""
    if name in _OFF:
        return value is not None and value not in _OFF[name]
    if name in _HARMLESS or value is None or value is False:
        return False
    return type(value) in (int, float) or bool(value)


def unknown_fields(fields: Mapping[str, Any]) -> list[str]:
    """The names of fields that may change anything, sorted. A null is not sent."""
    return sorted(
        name
        for name, value in fields.items()
        if value is not None and not is_sampling_field(name) and name not in _HARMLESS and name not in _OF_RECORD
    )


def _unknown_problem(sampling: Mapping[str, Any]) -> str | None:
    listed: Collection[str] = sampling.get(OTHER_FIELDS) or ()
    harmless: Collection[str] = sampling.get(HARMLESS_FIELDS) or ()
    unknown = sorted({*map(str, listed), *unknown_fields(sampling)}.difference(map(str, harmless)))
    if not unknown:
        return None
    names = ", ".join(unknown)
    instead = "".join(
        f"{name} has no effect on prompts of ids: use {_INSTEAD[name]}; " for name in unknown if name in _INSTEAD
    )
    return (
        f"extra_body has {names}, which may change what is sampled; {instead}leave it out, or name it with "
        f"--openai.harmless_fields '[{names}]' if you know that it does not"
    )


_ABSURD: Final = 1e6
_OFF: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "top_n_sigma": (-1.0,),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "dynatemp_range": (0.0,),
    "adaptive_target": (-1.0,),
    "beam_width": (1,),
}
_REPLAYED: Final = ("top_p", "top_k", "min_p")
"""What a sampling mask describes."""
_CONSTRAINTS: Final = (
    "allowed_token_ids",
    "bad_words",
    "custom_logit_processor",
    "ebnf",
    "grammar",
    "guided_choice",
    "guided_decoding",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "json_schema",
    "logit_bias",
    "logits_processors",
    "max_thinking_tokens",
    "min_new_tokens",
    "min_tokens",
    "mirostat",
    "regex",
    "response_format",
    "samplers",
    "structural_tag",
    "structured_outputs",
    "thinking_budget",
    "thinking_token_budget",
    "trace_decode_token_ids",
    "watermark",
    "watermarking",
)
_PROMPT: Final = (
    *("audio_data", "content_parts", "features", "image_data", "input_embeds", "positional_embed_overrides"),
    *("prompt_embeds", "session_params", "video_data"),
)
_STOPS: Final = frozenset({"include_stop_str_in_output", "repetition_detection", "stop_regex", "stop_token_ids"})
"""They end a completion, as `stop` does: its tokens are sampled from the same distribution."""
_INSTEAD: Final[Mapping[str, str]] = {
    "chat_template": "env.chat_template",
    "chat_template_kwargs": "env.chat_template_kwargs",
    "reasoning_effort": "env.chat_template_kwargs",
}
"""Fields of chat completions, whose prompts the server renders."""
_OF_RECORD: Final = frozenset(
    {
        HARMLESS_FIELDS,
        OTHER_FIELDS,
        "logprobs",
        "max_completion_tokens",
        "max_new_tokens",
        "max_tokens",
        "n",
        "sampling_mask",
        "seed",
        "stop",
    }
)
_KNOWN: Final = """
    add_special_tokens background bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room cache_prompt
    cache_salt conversation_id custom_labels data_parallel_rank decode_tp_size detokenize disagg_prefill_dp_rank
    ec_transfer_params external_trace_header extra_key flat_logprobs id_slot kv_router_hint kv_transfer_params
    length_penalty log_metrics logprob_start_len logprob_token_ids lora_id lora_path min_keep mm_payload model
    n_keep no_logs no_stop_trim output_mode priority prompt_logprob_start prompt_logprob_token_ids prompt_logprobs
    reasoning_ended reasoning_parser_kwargs received_time request_id response_fields return_bytes return_entropy
    return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states return_indexer_topk
    return_logprob return_mm_kwargs return_progress return_prompt_token_ids return_routed_experts
    return_text_in_logprobs return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions
    rid routed_dp_rank routed_experts_prompt_start routed_experts_start_len routing_key sampling_seed session_id
    skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens stream_interval stream_options
    t_max_predict_ms timings_per_token token_ids_logprob token_offsets top_logprobs_num truncation_side user
"""
_HARMLESS: Final = frozenset(_KNOWN.split())
"""Fields of vLLM 0.32, SGLang 0.5.6 and llama.cpp that say where a request runs, how it is logged and cached, and what
is reported besides the sampled ids; `lora_*` names the policy, as `model` does. `length_penalty` is of beam search, and
`truncation_side` of `truncate_prompt_tokens`, which the engines refuse."""
