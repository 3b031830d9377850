"""Which fields of a request leave the distribution as a trainer computes it: those that are known to, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import read_sampling, recorded_fields
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_tokens.engines import create_engine
from tests.support.token_trees import SAMPLING

# The fields of the requests of vLLM 0.32 (`CompletionRequest`, `GenerateRequest`, `SamplingParams`), SGLang 0.5.6
# (`GenerateReqInput`, `SamplingParams`) and llama.cpp, without those that an engine sets itself.
HARMLESS = """
    user stream_options length_penalty stop_token_ids include_stop_str_in_output skip_special_tokens truncation_side
    spaces_between_special_tokens prompt_logprobs logprob_token_ids add_special_tokens priority request_id
    session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params repetition_detection
    stream_interval token_offsets reasoning_ended reasoning_parser_kwargs output_mode prompt_logprob_token_ids
    prompt_logprob_start flat_logprobs detokenize skip_reading_prefix_cache return_weight_versions rid no_stop_trim
    stop_regex sampling_seed token_ids_logprob top_logprobs_num logprob_start_len return_logprob
    return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 log_metrics
    return_hidden_states return_routed_experts routed_experts_start_len return_indexer_topk lora_path lora_id
    bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank
    disagg_prefill_dp_rank kv_router_hint routing_key conversation_id background extra_key no_logs custom_labels
    return_bytes return_entropy return_prompt_token_ids external_trace_header received_time cache_prompt id_slot
    n_keep t_max_predict_ms timings_per_token return_progress response_fields min_keep
"""
SHAPING = """
    logit_bias allowed_token_ids bad_words response_format structured_outputs thinking_token_budget watermarking
    ignore_eos min_tokens trace_decode_token_ids min_new_tokens json_schema regex ebnf structural_tag
    custom_logit_processor max_thinking_tokens beam_width grammar samplers mirostat top_n_sigma xtc_probability
    dry_multiplier dynatemp_range
"""
OTHER_PROMPT = """
    prompt_embeds features content_parts session_params input_embeds image_data video_data audio_data
    positional_embed_overrides
"""
OF_PLUGINS = ["vllm_xargs", "extra_args", "custom_params", "typicality_v2"]


@pytest.mark.parametrize("name", HARMLESS.split())
def test_what_is_known_to_change_nothing_is_allowed(name: str) -> None:
    assert sampling_problem({**SAMPLING, **recorded_fields({name: "value"})}) is None


@pytest.mark.parametrize("name", SHAPING.split())
def test_what_shapes_the_distribution_is_refused_by_name(name: str) -> None:
    problem = sampling_problem({**SAMPLING, **recorded_fields({name: {"some": "value"}})})
    assert problem is not None
    assert name in problem and "another distribution" in problem
    assert sampling_problem({**SAMPLING, **recorded_fields({name: {"some": "value"}}, harmless=[name])}) == problem


@pytest.mark.parametrize("name", OTHER_PROMPT.split())
def test_what_is_in_the_prompt_beside_its_ids_is_refused_by_name(name: str) -> None:
    problem = sampling_problem({**SAMPLING, **recorded_fields({name: {"some": "value"}})})
    assert problem is not None
    assert name in problem and "prompt" in problem


@pytest.mark.parametrize("name", OF_PLUGINS)
def test_what_is_unknown_is_refused_unless_the_user_knows_it(name: str) -> None:
    record = recorded_fields({name: "s3cret"})
    assert "s3cret" not in str(record)
    problem = sampling_problem({**SAMPLING, **record})
    assert problem is not None
    assert f"extra_body has {name}," in problem and f"--openai.harmless_fields '[{name}]'" in problem
    assert sampling_problem({**SAMPLING, **recorded_fields({name: "s3cret"}, harmless=[name])}) is None
    assert sampling_problem({**SAMPLING, name: 1}) == problem  # a record of an engine that does not know the names


def test_a_field_of_chat_completions_names_what_to_use_instead() -> None:
    for name in ("chat_template_kwargs", "chat_template", "reasoning_effort"):
        problem = sampling_problem({**SAMPLING, **recorded_fields({name: {"enable_thinking": False}})})
        assert problem is not None and "env.chat_template" in problem


@pytest.mark.parametrize("kind", ["vllm", "vllm-generate", "sglang", "atropos", "llama.cpp"])
def test_the_record_of_a_request_names_the_unknown_fields_of_settings_and_request(kind: str) -> None:
    body = {"mystery": 1, "min_tokens": 2, "cache_salt": "s3cret", "known": 1}
    settings = ServerSettings("http://x/v1", "m", extra_body=body, harmless_fields=("known", "unused"))
    engine: Any = create_engine(kind, settings)
    record = engine.record(read_sampling({"extra_body": {"riddle": 3}}, default_max_tokens=9))
    assert (record["other_fields"], record["min_tokens"]) == (["known", "mystery", "riddle"], 2)
    assert record["harmless_fields"] == ["known"]
    assert "s3cret" not in str(record)
    problem = sampling_problem({**record, "min_tokens": 0})
    assert problem is not None and "mystery, riddle" in problem
