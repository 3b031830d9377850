"""`/generate` of SGLang (`GenerateReqInput`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lachesis_client.sampling import LogprobsKind
from lachesis_tokens.model_routes.experts import sglang_experts
from lachesis_tokens.model_routes.host import (
    ABORTED,
    JSON,
    ModelHost,
    ModelRoute,
    ShownCompletion,
    new_id,
    version_spans,
)
from lachesis_tokens.model_routes.requests import (
    ImagePlace,
    PromptTooLong,
    SamplingRequest,
    check_ids,
    is_ids,
    read_request,
    whole,
)

_ALL_TOKENS = 1 << 30
"""SGLang's internal value for "top-k off", beside -1."""


class SGLangRoute(ModelRoute):
    """`POST /generate`: an object for one prompt, a list for many prompts or `n` > 1."""

    name: ClassVar[str] = "sglang"

    def logprobs(self, host: ModelHost) -> LogprobsKind:
        """SGLang's default: logits divided by the temperature, before any truncation."""
        return "temperature"

    def rank(self, body: JSON, headers: Mapping[str, str]) -> object:
        """From the body: this route of SGLang does not read the header."""
        named = body.get("routed_dp_rank")
        return body.get("data_parallel_rank") if named is None else named

    def failure(self, status: int, message: str, param: str | None) -> JSON | str:
        return {"error": {"message": message}}

    def read(self, host: ModelHost, body: JSON) -> SamplingRequest:
        if body.get("stream"):
            raise ValueError("This server does not stream.")
        prompts = self._prompts(host, body)
        images: Sequence[ImagePlace] = ()
        if (urls := body.get("image_data")) and host.takes_images:  # SGLang's models of text ignore them
            if len(prompts) > 1:
                raise ValueError("This server takes image_data for one prompt.")
            listed = urls if isinstance(urls, list) else [urls]
            prompts[0], images = host.with_images(prompts[0], listed, strict=True)
        parameters = body.get("sampling_params") or {}
        if not isinstance(parameters, Mapping):
            raise ValueError("This server takes one sampling_params for all prompts.")
        request = read_request(
            parameters,
            prompts,
            default_max_tokens=128,
            least=0,
            max_tokens="max_new_tokens",
            seed="sampling_seed",
            keep_stop="no_stop_trim",
            top_k_off=(-1, _ALL_TOKENS),
        )
        request = replace(request, images=images)
        for prompt in prompts:
            self._check(host, prompt, parameters.get("max_new_tokens"))
            if not 0 <= whole(body, "routed_experts_start_len", 0) <= len(prompt):
                raise ValueError(f"routed_experts_start_len should be in [0, prompt_tokens={len(prompt)}]")
        if body.get("return_sampling_mask") and request.sampling.top_k <= 0:
            raise ValueError("return_sampling_mask requires a finite top_k")
        return request

    def write(self, host: ModelHost, body: JSON, request: SamplingRequest, shown: Sequence[ShownCompletion]) -> Any:
        answers = [self._answer(host, body, request, each) for each in shown]
        single = len(request.prompts) == 1 and request.n == 1 and not _is_batch(body)
        return answers[0] if single else answers

    def _answer(self, host: ModelHost, body: JSON, request: SamplingRequest, each: ShownCompletion) -> JSON:
        made = each.made
        if made.finish_reason == ABORTED and not made.ids:
            return _aborted_in_queue(host)
        reason: JSON = {"type": made.finish_reason}
        if made.finish_reason == "length":
            reason["length"] = len(made.ids)
        elif made.finish_reason == ABORTED:
            reason["message"] = "Aborted"
        else:
            ended = made.ids[-1] if made.ids and made.ids[-1] in host.end_ids else None
            reason["matched"] = made.stop_reason if made.stop_reason is not None else ended
        meta: JSON = {
            "id": new_id(""),
            "finish_reason": reason,
            "prompt_tokens": len(each.prompt_ids),
            "weight_version": host.version_of(made),
            "weight_versions": version_spans(made),
            "total_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(made.ids),
            "cached_tokens": each.cached or 0,
            "e2e_latency": 0.0,
        }
        if body.get("return_logprob") and each.logprobs is not None:
            with_text = bool(body.get("return_text_in_logprobs"))
            # The triples hold the ids too: an answer without ids has none here either.
            listed = made.ids if each.ids is not None else [None] * len(made.ids)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [logprob, index, host.token_text(index) if with_text and index is not None else None]
                for logprob, index in zip(each.logprobs, listed, strict=False)
            ]
            meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
        if body.get("return_routed_experts"):
            meta["routed_experts"] = sglang_experts(host, each, whole(body, "routed_experts_start_len", 0))
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = host.sampling_masks(request, made)
            meta["output_token_sampling_logprobs"] = host.mask_logprobs(request, made)
        answer: JSON = {"text": made.text}
        if each.ids is not None:
            answer["output_ids"] = list(each.ids)
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = list(each.prompt_ids)
        return {**answer, "meta_info": meta}

    def _prompts(self, host: ModelHost, body: JSON) -> list[list[int]]:
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        listed = [text] if isinstance(text, str) else [ids] if is_ids(ids) else text if text is not None else ids
        prompts: list[Any] = [
            host.encode(each, add_special_tokens=True) if isinstance(each, str) else each for each in listed or ()
        ]
        if not prompts or not all(is_ids(prompt) for prompt in prompts):
            raise ValueError("text should be a string and input_ids a list of ids, or lists of these.")
        return prompts

    def _check(self, host: ModelHost, prompt: Sequence[int], max_new_tokens: int | None) -> None:
        count, most = len(prompt), host.context_length
        check_ids(prompt)
        if max(prompt) >= host.vocabulary_size:
            raise ValueError(
                f"The input_ids {list(prompt[:8])}... contains values greater than the vocab size "
                f"({host.vocabulary_size})."
            )
        if most is None:
            return
        if count >= most:
            raise PromptTooLong(
                f"The input ({count} tokens) is longer than the model's context length ({most} tokens)."
            )
        if max_new_tokens is not None and count + max_new_tokens > most:
            raise PromptTooLong(
                f"Requested token count exceeds the model's maximum context length of {most} tokens. You requested a "
                f"total of {count + max_new_tokens} tokens: {count} tokens from the input messages and "
                f"{max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input messages "
                "or the completion to fit within the limit."
            )


def _aborted_in_queue(host: ModelHost) -> JSON:
    """Of such a request SGLang reports neither the prompt nor logprobs."""
    reason = {"type": ABORTED, "message": "Abort in waiting queue"}
    meta = {"id": new_id(""), "finish_reason": reason, "weight_version": host.weight_version, "completion_tokens": 0}
    return {"text": "", "output_ids": [], "meta_info": meta}


def _is_batch(body: JSON) -> bool:
    text, ids = body.get("text"), body.get("input_ids")
    return isinstance(text, list) or (isinstance(ids, list) and not is_ids(ids))
