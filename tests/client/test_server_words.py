"""What servers mean by their errors and finish reasons: the wordings of many, and those that mean something else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_client.errors import ContextExhausted, ConversationRefused, NothingThere, RequestRejected
from lachesis_client.finish_words import Ending, ending
from lachesis_client.rejections import names_no_part, rejection
from lachesis_messages.messages import FinishReason

FULL = {
    "openai": (400, "This model's maximum context length is 128000 tokens. However, your messages resulted in 130112."),
    "openai responses": (400, "Your input exceeds the context window of this model. Please adjust your input."),
    "openai, one message": (400, "Invalid 'messages[7].content': string too long. Expected a maximum of 10485760."),
    "openai, many messages": (400, "Invalid 'messages': array too long. Expected an array with maximum length 2048."),
    "openai, above the limit of a minute": (
        429,
        "Request too large for gpt-4o in organization org-1 on tokens per min (TPM): Limit 30000, Requested 41337. The "
        "input or output tokens must be reduced in order to run successfully.",
    ),
    "anthropic": (400, "prompt is too long: 208310 tokens > 200000 maximum"),
    "anthropic, with its answer": (400, "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000"),
    "anthropic, bytes": (413, "Request exceeds the maximum size"),
    "gemini": (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
    "vertex": (400, "Unable to submit request because the input token count is 32775 but model only supports up to 1."),
    "gemini, bytes": (400, "Request payload size exceeds the limit: 20971520 bytes."),
    "bedrock": (400, "Input is too long for requested model."),
    "mistral": (400, "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context"),
    "cohere": (400, "too many tokens: size limit exceeded by 11326 tokens. Try using shorter or fewer inputs."),
    "xai": (400, "This model's maximum prompt length is 131072 but the request contains 537812 tokens."),
    "groq": (400, "Please reduce the length of the messages or completion."),
    "groq, a small plan": (413, "Request too large for model `llama-3.1-8b-instant` on tokens per minute (TPM)"),
    "together, tgi": (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097. Given: 4000"),
    "tgi": (422, "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000"),
    "fireworks": (400, "The prompt is too long: 40000, model maximum context length: 32768"),
    "openrouter": (400, "This endpoint's maximum context length is 131072 tokens. However, you requested about 140000"),
    "zhipu": (400, "Prompt exceeds max length"),
    "zhipu, chinese": (400, "Prompt 超长"),
    "tencent": (400, "输入长度超限"),
    "moonshot": (400, "Invalid request: Your request exceeded model token limit: 131072"),
    "moonshot, older": (400, "Input token length too long"),
    "dashscope": (400, "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 98304]"),
    "minimax": (400, "invalid params, context window exceeds limit (2013)"),
    "ark": (400, "Total tokens of image and text exceed max message tokens. Request id: 02174"),
    "baidu": (400, "prompt tokens too long"),
    "stepfun": (400, "the total message token length exceed model limit"),
    "siliconflow": (400, "length of prompt_tokens (37882) must be less than max_seq_len (32768)."),
    "deepinfra": (400, "Requested input length 40000 exceeds maximum input length 32768"),
    "copilot": (400, "prompt token count of 130000 exceeds the limit of 128000"),
    "github models": (413, "Request body too large for gpt-4o-mini model. Max size: 8000 tokens."),
    "vllm": (
        400,
        "You passed 5000 input tokens and requested 10 output tokens. However, the model's context length is",
    ),
    "vllm, older": (400, "The decoder prompt (length 9) is longer than the maximum model length of 4."),
    "sglang": (400, "Input length (9 tokens) exceeds the maximum allowed length (8 tokens)."),
    "tensorrt": (400, "The sum of prompt length (5000), query length (0) and max_tokens (1) should not exceed max_num"),
    "llama.cpp": (400, "the request exceeds the available context size (4096 tokens), try increasing it"),
    "llama.cpp, while it writes": (500, "Context size has been exceeded."),
    "ollama": (500, "prompt too long; exceeded max context length by 24 tokens"),
    "lm studio": (400, "The number of tokens to keep from the initial prompt is greater than the context length."),
    "litellm": (400, "litellm.ContextWindowExceededError: litellm.BadRequestError: OpenAIException - too much"),
    "bedrock, titan": (400, "Malformed input request: expected maxLength: 2048, actual: 9000, please reformat it."),
    "snowflake": (400, "max tokens of 9000 exceeded"),
    "writer": (400, "This model's maximum context is 8192 tokens"),
    "perplexity": (400, "Prompt tokens limit reached"),
    "in japanese": (400, "入力トークン数が上限を超えています"),
    "nginx": (413, "<html><head><title>413 Request Entity Too Large</title></head></html>"),
}
NOT_FULL = {
    "the room for an answer": (
        400,
        "max_tokens is too large: 5000. This model supports at most 4096 completion tokens",
    ),
    "another name of it": (400, "Invalid input: max_tokens must be less than 8192"),
    "a range": (400, "Range of max_tokens should be [1, 8192]"),
    "tgi, a setting": (422, "Input validation error: `max_new_tokens` must be <= 512. Given: 600"),
    "an id": (400, "Invalid 'messages[3].tool_calls[0].id': string too long. Expected a string with maximum length 40"),
    "tools": (400, "Invalid 'tools': array too long. Expected an array with maximum length 128, but got one of 200."),
    "a description": (400, "Invalid 'tools[0].function.description': string too long. Maximum length 1024."),
    "roles": (400, "messages: roles must alternate between user and assistant, but found multiple user roles"),
    "temperature": (400, "temperature 3.0 exceeds the maximum of 2.0"),
    "a deadline": (500, "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"),
    "a queue": (500, "request queue length exceeds the limit of 512"),
    "memory": (500, "failed to allocate the KV cache for a context length of 131072"),
    "a quota": (400, "Token quota of this month exceeded for the prompt tokens of your project"),
    "a rate": (429, "This request would exceed your rate limit of 40,000 input tokens per minute"),
    "another rate": (
        429,
        "Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000, Used 29000, Requested 9000",
    ),
    "money": (402, "This request requires more credits, or fewer max_tokens. You requested up to 65536 tokens"),
}
REFUSED = {
    "openai": (400, {"code": "content_policy_violation", "message": "Your request was rejected by our safety system."}),
    "openai, a prompt": (
        400,
        {"code": "invalid_prompt", "message": "your prompt was flagged as potentially violating"},
    ),
    "azure": (
        400,
        {
            "code": "content_filter",
            "message": "The response was filtered due to the prompt triggering content management policy.",
            "innererror": {"code": "ResponsibleAIPolicyViolation"},
        },
    ),
    "openrouter": (403, {"code": 403, "message": "Your input was flagged", "metadata": {"reasons": ["violence"]}}),
    "openrouter, its provider": (
        400,
        {"code": 400, "message": "Provider returned error", "metadata": {"raw": '{"error": "content_filter"}'}},
    ),
    "xai": (403, {"message": "Content violates usage guidelines. Failed check: SAFETY_CHECK_TYPE_BIO"}),
    "bedrock": (400, {"message": "The guardrail blocked the request: guardrail_intervened"}),
    "deepseek": (400, {"message": "Content Exists Risk", "type": "invalid_request_error"}),
    "moonshot": (400, {"type": "content_filter", "message": "The request was rejected: it was considered high risk"}),
    "zhipu": (400, {"code": "1301", "message": "系统检测到输入或生成内容可能包含不安全或敏感内容"}),
    "dashscope": (400, {"code": "data_inspection_failed", "message": "Input data may contain inappropriate content."}),
    "minimax": (400, {"message": "input new_sensitive (1026)"}),
    "ark": (
        400,
        {"code": "InputTextSensitiveContentDetected", "message": "The input may contain sensitive information."},
    ),
    "stepfun": (451, {"type": "censorship_blocked", "message": "The content you provided is unsafe."}),
    "a gateway": (500, {"message": "sensitive_words_detected", "type": "new_api_error"}),
    "litellm": (400, {"message": "litellm.ContentPolicyViolationError: AzureException"}),
}
NOT_REFUSED = {
    "an account": (403, {"message": "Your account was suspended for violating our usage policies."}),
    "a key": (401, {"message": "Incorrect API key provided: moderation"}),
    "a model": (404, {"message": "The model `text-moderation-9` does not exist"}),
    "a policy about data": (404, {"message": "No endpoints found matching your data policy (Free model publication)."}),
    "a setting": (400, {"message": "Unknown parameter: 'content_filter'"}),
    "a region": (403, {"message": "Country, region, or territory not supported"}),
    "money": (402, {"message": "Insufficient credits"}),
    "roles": (400, {"message": "messages: text content blocks must be non-empty"}),
}


def read(status: int, error: dict[str, Any]) -> RequestRejected:
    return rejection("http://s/v1", status, json.dumps({"error": error}), error, has_key=True)


@pytest.mark.parametrize("who", FULL)
def test_a_full_context_is_recognised_in_every_wording(who: str) -> None:
    status, message = FULL[who]
    for body, error in (
        (json.dumps({"error": {"message": message}}), {"message": message}),
        (json.dumps({"error": message}, ensure_ascii=False), {"message": message}),
        (json.dumps({"detail": message}, ensure_ascii=False), {}),
        (json.dumps({"message": message}), {}),
        (json.dumps([{"error": {"code": status, "message": message}}]), {}),
    ):
        assert type(rejection("s", status, body, error, has_key=True)) is ContextExhausted, body


@pytest.mark.parametrize("who", NOT_FULL)
def test_other_limits_are_no_full_context(who: str) -> None:
    status, message = NOT_FULL[who]
    assert type(read(status, {"message": message})) is RequestRejected


@pytest.mark.parametrize("who", REFUSED)
def test_a_refusal_of_what_a_conversation_says_is_recognised(who: str) -> None:
    found = read(*REFUSED[who])
    assert type(found) is ConversationRefused and "api_key" not in str(found)


@pytest.mark.parametrize("who", NOT_REFUSED)
def test_other_rejections_are_no_refusal_of_a_conversation(who: str) -> None:
    found = read(*NOT_REFUSED[who])
    assert not isinstance(found, ConversationRefused | ContextExhausted)
    assert isinstance(found, NothingThere) == (NOT_REFUSED[who][0] == 404)


def shapes(said: str, param: str | None = None) -> dict[str, Any]:
    """The body of a 400 with these words, as each server sends it."""
    openai = {"message": said, "type": "invalid_request_error", "param": param, "code": None}
    old = {"object": "error", "message": said, "type": "BadRequestError", "param": param, "code": 400}
    wrapped = f"litellm.BadRequestError: OpenAIException - {json.dumps({'error': openai})}. Received Model Group=m\n"
    raw = {"raw": json.dumps({"error": openai}), "provider_name": "Image Models"}
    return {
        "OpenAI": {"error": openai},
        "vLLM": {"error": {"message": said, "type": "BadRequestError", "param": param, "code": 400}},
        "vLLM before 0.10": old,
        "SGLang": old,
        "llama.cpp": {"error": {"code": 400, "message": said, "type": "invalid_request_error"}},
        "Azure": {"error": {**openai, "status": 400}, "model": "m"},
        "OpenRouter": {"error": {"message": "Provider returned error", "code": 400, "metadata": raw}, "user_id": "u"},
        "LiteLLM": {"error": {**openai, "message": f"{wrapped}Available Model Group Fallbacks=None", "code": "400"}},
        "no JSON object": said,
    }


@pytest.mark.parametrize("server", shapes(""))
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Unterminated string starting at: line 1 column 10 (char 9)", True),
        ("Could not process the request.", True),
        ("Invalid schema for function 'f': [] is not of type 'object'.", False),
        ("Invalid 'tools[0].function.name': string does not match pattern.", False),
        ("The model `n` does not exist.", False),
        ("temperature must be non-negative, got -1.0.", False),
        ("max_tokens must be at least 1, got -5.", False),
        ("[{'type': 'less_than_equal', 'loc': ('body', 'n'), 'msg': 'Input should be at most 2'}]", False),
    ],
)
def test_whether_a_400_names_a_part_is_told_by_its_words_in_every_shape(server: str, said: str, expected: bool) -> None:
    body = shapes(said)[server]
    found = RequestRejected("s", 400, body if isinstance(body, str) else json.dumps(body))
    assert names_no_part(found) is expected


@pytest.mark.parametrize("server", ["OpenAI", "vLLM", "SGLang", "Azure", "OpenRouter", "LiteLLM"])
def test_a_400_with_the_name_of_a_part_names_one_whatever_it_says(server: str) -> None:
    assert not names_no_part(RequestRejected("s", 400, json.dumps(shapes("Invalid value.", "n")[server])))


def test_fields_that_pydantic_names_are_named() -> None:
    body = {"detail": [{"loc": ["body", "n"], "msg": "Input should be at most 2", "ctx": {}}]}
    assert not names_no_part(RequestRejected("s", 422, json.dumps(body)))
    assert names_no_part(RequestRejected("s", 422, json.dumps({"detail": "Bad Request"})))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (
            "stop STOP <|im_end|> FinishReason.STOP stop_str eos_token end_turn stop_sequence COMPLETE "
            "FINISH_REASON_STOP",
            FinishReason.STOP,
        ),
        ("tool_calls function_call tool_use tool-calls", FinishReason.TOOL_CALLS),
        ("length max_tokens MAX_TOKENS model_length model_context_window_exceeded repetition", FinishReason.LENGTH),
        (
            "content_filter sensitive SAFETY PROHIBITED_CONTENT refusal guardrail_intervened",
            FinishReason.CONTENT_FILTER,
        ),
        ("MALFORMED_FUNCTION_CALL unexpected_tool_call malformed_model_output", Ending.MALFORMED),
        ("network_error insufficient_system_resource error OTHER user_cancel load pause_turn", Ending.BROKEN),
    ],
)
def test_a_finish_reason_means_the_same_in_every_spelling(words: str, meant: FinishReason | Ending) -> None:
    assert {word: ending(word) for word in words.split()} == dict.fromkeys(words.split(), meant)


def test_a_server_that_gives_no_reason_is_believed() -> None:
    assert {ending(None), ending(""), ending("null")} == {FinishReason.UNKNOWN}


@given(st.text(min_size=1))
def test_only_a_listed_word_says_that_an_answer_is_complete(word: str) -> None:
    known = ending(word) is not Ending.BROKEN
    assert not known or ending(word.upper()) is ending(word.lower())
    assert ending(f"{word} and more") is Ending.BROKEN
