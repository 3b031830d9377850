"""`/generate` of SGLang (`GenerateReqInput`) and of Atropos' legacy server: one route, two bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from lachesis.inference.sampling import LogprobsKind
from lachesis_testing.fake_server.completions import ABORTED, Call
from lachesis_testing.fake_server.images import ShownImage, with_images
from lachesis_testing.fake_server.replay import sampling_masks, sglang_experts
from lachesis_testing.fake_server.shapes import (
    JSON,
    Api,
    Host,
    Shown,
    by_model,
    is_ids,
    new_id,
    read_call,
    top_logprobs,
    version_spans,
    whole,
)
from lachesis_testing.fake_server.vllm import read_vllm_call

_ALL_TOKENS = 1 << 30
"""SGLang's internal value for "top-k off", beside -1."""


class SGLangGenerate(Api):
    """`POST /generate`: an object for one prompt, a list for many prompts or `n` > 1."""

    name: ClassVar[str] = "sglang"

    def logprobs(self, host: Host) -> LogprobsKind:
        """SGLang's default: logits divided by the temperature, before any truncation."""
        return "temperature"

    def rank(self, body: JSON, headers: Mapping[str, str]) -> object:
        """From the body: this route of SGLang does not read the header."""
        named = body.get("routed_dp_rank")
        return body.get("data_parallel_rank") if named is None else named

    def failure(self, status: int, message: str, param: str | None) -> JSON | str:
        return {"error": {"message": message}}

    def read(self, host: Host, body: JSON) -> Call:
        if body.get("stream"):
            raise ValueError("The fake server does not stream.")
        prompts = self._prompts(host, body)
        images: tuple[ShownImage, ...] = ()
        if (urls := body.get("image_data")) and host.image_token is not None:  # SGLang's models of text ignore them
            if len(prompts) > 1:
                raise ValueError("The fake server takes image_data for one prompt.")
            listed = urls if isinstance(urls, list) else [urls]
            prompts[0], images = with_images(prompts[0], listed, host.image_token, strict=True)
        parameters = body.get("sampling_params") or {}
        if not isinstance(parameters, Mapping):
            raise ValueError("The fake server takes one sampling_params for all prompts.")
        call = read_call(
            parameters,
            prompts,
            default_max_tokens=128,
            least=0,
            max_tokens="max_new_tokens",
            seed="sampling_seed",
            keep_stop="no_stop_trim",
            top_k_off=(-1, _ALL_TOKENS),
        )
        call = replace(call, images=images)
        for prompt in prompts:
            self._check(host, prompt, parameters.get("max_new_tokens"))
            if not 0 <= whole(body, "routed_experts_start_len", 0) <= len(prompt):
                raise ValueError(f"routed_experts_start_len should be in [0, prompt_tokens={len(prompt)}]")
        if body.get("return_sampling_mask") and call.sampling.top_k <= 0:
            raise ValueError("return_sampling_mask requires a finite top_k")
        return call

    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> Any:
        answers = [self._answer(host, body, call, each) for each in shown]
        single = len(call.prompts) == 1 and call.n == 1 and not _is_batch(body)
        return answers[0] if single else answers

    def _answer(self, host: Host, body: JSON, call: Call, each: Shown) -> JSON:
        made = each.made
        if made.finish_reason == ABORTED and not made.ids:
            return _aborted_in_queue(host)
        reason: JSON = {"type": made.finish_reason}
        if made.finish_reason == "length":
            reason["length"] = len(made.ids)
        elif made.finish_reason == ABORTED:
            reason["message"] = "Aborted"
        else:
            ended = made.ids[-1] if made.ids and made.ids[-1] in host.model.end_ids else None
            reason["matched"] = made.stop_reason if made.stop_reason is not None else ended
        meta: JSON = {
            "id": new_id(""),
            "finish_reason": reason,
            "prompt_tokens": len(each.prompt_ids),
            "weight_version": host.weight_version,
            "weight_versions": version_spans(each),
            "total_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(made.ids),
            "cached_tokens": each.cached or 0,
            "e2e_latency": 0.0,
        }
        if body.get("return_logprob") and each.logprobs is not None:
            named = host.codec.token_texts
            with_text = bool(body.get("return_text_in_logprobs"))
            # The triples hold the ids too: an answer without ids has none here either.
            listed = made.ids if each.ids is not None else [None] * len(made.ids)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [logprob, index, named[index] if with_text and index is not None else None]
                for logprob, index in zip(each.logprobs, listed, strict=False)
            ]
            meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
        if body.get("return_routed_experts"):
            meta["routed_experts"] = sglang_experts(host, each, whole(body, "routed_experts_start_len", 0))
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = sampling_masks(call, each)
            meta["output_token_sampling_logprobs"] = by_model(
                call, made, lambda model, before, ids: model.score(before, ids, call.sampling, "processed")
            )
        answer: JSON = {"text": made.text}
        if each.ids is not None:
            answer["output_ids"] = list(each.ids)
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = list(each.prompt_ids)
        return {**answer, "meta_info": meta}

    def _prompts(self, host: Host, body: JSON) -> list[list[int]]:
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        listed = [text] if isinstance(text, str) else [ids] if is_ids(ids) else text if text is not None else ids
        prompts: list[Any] = [
            host.codec.encode(each, add_special_tokens=True) if isinstance(each, str) else each for each in listed or ()
        ]
        if not prompts or not all(is_ids(prompt) for prompt in prompts):
            raise ValueError("text should be a string and input_ids a list of ids, or lists of these.")
        return prompts

    def _check(self, host: Host, prompt: Sequence[int], max_new_tokens: int | None) -> None:
        count, most = len(prompt), host.context_length
        if max(prompt) >= host.model.vocabulary_size:
            raise ValueError(
                f"The input_ids {list(prompt[:8])}... contains values greater than the vocab size "
                f"({host.model.vocabulary_size})."
            )
        if count >= most:
            raise ValueError(f"The input ({count} tokens) is longer than the model's context length ({most} tokens).")
        if max_new_tokens is not None and count + max_new_tokens > most:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {most} tokens. You requested a "
                f"total of {count + max_new_tokens} tokens: {count} tokens from the input messages and "
                f"{max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input messages "
                "or the completion to fit within the limit."
            )


class AtroposGenerate(Api):
    """`POST /generate` of Atropos' `vllm_api_server.py`: every field but the prompt goes into `SamplingParams`.

    Unknown fields, `model` included, give a plain 500, as there.
    """

    name: ClassVar[str] = "atropos"
    rejects_with: ClassVar[int] = 500

    def failure(self, status: int, message: str, param: str | None) -> JSON | str:
        return "Internal Server Error" if status == 500 else {"detail": message}

    def read(self, host: Host, body: JSON) -> Call:
        prompt = body.get("prompt")
        found = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        ids: list[int] = list(found) if found is not None and is_ids(found) else []
        if isinstance(prompt, str):
            ids = host.codec.encode(prompt, add_special_tokens=True)
        known = body.keys() <= _SAMPLING_PARAMS | {"prompt", "stream"} and not body.get("stream")
        if not known or not 0 < len(ids) < host.context_length or max(ids) >= host.model.vocabulary_size:
            raise ValueError("not a request for this server")
        return read_vllm_call(body, [ids], default_max_tokens=16)

    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> JSON:
        answer: JSON = {
            "text": [each.made.text for each in shown],
            "prompt": host.codec.decode(call.prompts[0]),
            "finish_reasons": [each.made.finish_reason for each in shown],
        }
        if body.get("logprobs") is None:
            return answer
        if all(each.logprobs is not None for each in shown):
            answer["logprobs"] = [self._logprobs(host, body, call, each) for each in shown]
        answer["prompt_token_ids"] = list(shown[0].prompt_ids)
        if all(each.ids is not None for each in shown):
            answer["token_ids"] = [list(each.ids or ()) for each in shown]
        return answer

    def _logprobs(self, host: Host, body: JSON, call: Call, each: Shown) -> list[list[JSON]]:
        """`[{id: logprob, ...}]` for each token, the sampled one first: a list of one object, ids as JSON keys."""
        ids, logprobs = each.ids or (), each.logprobs or ()
        unnamed: list[list[JSON]] = [[{}] for _ in range(len(each.made.ids) - len(ids))]
        likeliest = top_logprobs(host, call, each.made, whole(body, "logprobs", 0))
        named: list[list[JSON]] = [
            [{str(index): logprob, **{str(other): score for other, score in best if other != index}}]
            for index, logprob, best in zip(ids, logprobs, likeliest, strict=False)
        ]
        return [*named, *unnamed]


def _aborted_in_queue(host: Host) -> JSON:
    """Of such a request SGLang reports neither the prompt nor logprobs."""
    reason = {"type": ABORTED, "message": "Abort in waiting queue"}
    meta = {"id": new_id(""), "finish_reason": reason, "weight_version": host.weight_version, "completion_tokens": 0}
    return {"text": "", "output_ids": [], "meta_info": meta}


def _is_batch(body: JSON) -> bool:
    text, ids = body.get("text"), body.get("input_ids")
    return isinstance(text, list) or (isinstance(ids, list) and not is_ids(ids))


_SAMPLING_PARAMS: Final = frozenset(
    (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
        *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "bad_words"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("logit_bias", "allowed_token_ids", "extra_args", "structured_outputs"),
    )
)
