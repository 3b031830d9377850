"""The token routes of vLLM 0.33: `/v1/completions` and `/inference/v1/generate`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar

from lachesis_tokens.model_routes.experts import vllm_experts
from lachesis_tokens.model_routes.host import (
    JSON,
    ModelHost,
    ModelRoute,
    ShownCompletion,
    new_id,
    now,
    openai_error,
    usage,
    version_spans,
)
from lachesis_tokens.model_routes.requests import (
    ImagePlace,
    PromptTooLong,
    Rejected,
    SamplingRequest,
    check_ids,
    is_ids,
    read_request,
    whole,
)

_MOST_LOGPROBS = 20
"""vLLM's `--max-logprobs` default."""


class VLLMRoute(ModelRoute):
    """Common parts of vLLM's routes."""

    at_engine: ClassVar[bool] = False
    """Whether only the engine, and not the route, rejects prompts that leave no room."""

    def failure(self, status: int, message: str, param: str | None) -> JSON | str:
        return openai_error(status, message, param)

    def read(self, host: ModelHost, body: JSON) -> SamplingRequest:
        name = body.get("model")
        if name and name != host.model_name:
            raise Rejected(f"The model `{name}` does not exist.", 404, param="model")
        if body.get("stream"):
            raise Rejected("This server does not stream.", param="stream")
        request = self.parse(host, body)
        for prompt in request.prompts:
            self._check_prompt(host, prompt, needs_room=request.sampling.max_tokens > 0)
        return request

    @abstractmethod
    def parse(self, host: ModelHost, body: JSON) -> SamplingRequest:
        """The parsed request. Raises `Rejected` or `ValueError`."""

    def _check_prompt(self, host: ModelHost, prompt: Sequence[int], *, needs_room: bool) -> None:
        """vLLM's errors for ids outside the vocabulary and for a prompt that leaves no room."""
        count, most = len(prompt), host.context_length
        check_ids(prompt, host.vocabulary_size)
        if most is None:
            return
        if count > most and not self.at_engine:
            message = (
                f"This model's maximum context length is {most} tokens. However, your prompt contains {count} input "
                "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
                "input prompt."
            )
            raise PromptTooLong(message, param="input_tokens")
        if count == most and needs_room and not self.at_engine:
            # vLLM lowers max_tokens to the remaining room, and then rejects 0.
            raise PromptTooLong("max_tokens must be at least 1, got 0.", param="max_tokens")
        if count >= most and needs_room:
            raise PromptTooLong(
                f"The decoder prompt (length {count}) plus the number of requested output tokens (at least 1) is "
                f"longer than the maximum model length of {most}. Make sure that `max_model_len` is no smaller than "
                "the number of text tokens (prompt + requested output tokens)."
            )

    def answer(
        self,
        host: ModelHost,
        choices: Sequence[JSON],
        shown: Sequence[ShownCompletion],
        *,
        absent: Collection[str],
        **fields: Any,
    ) -> JSON:
        """The whole answer. The fields in `absent` are null."""
        common = {"created": now(), "model": host.model_name, "choices": choices, "usage": usage(shown)}
        return {**fields, **common, **dict.fromkeys(absent)}

    def ending(
        self, host: ModelHost, each: ShownCompletion, ids: Sequence[int] | None, *, versions: bool, start: int = 0
    ) -> JSON:
        """The fields after the logprobs of a choice. `versions`: the version of the weights for each span of tokens;
        `start`: the first token whose experts are reported."""
        spans = version_spans(each.made)
        return {
            "finish_reason": each.made.finish_reason,
            "stop_reason": each.made.stop_reason,
            "token_ids": None if ids is None else list(ids),
            "routed_experts": vllm_experts(host, each, start),
            "weight_versions": spans if versions else None,
        }


class CompletionsRoute(VLLMRoute):
    """`POST /v1/completions`: prompts as text or as ids, one or many."""

    name: ClassVar[str] = "vllm-completions"

    def parse(self, host: ModelHost, body: JSON) -> SamplingRequest:
        prompts = [
            host.encode(prompt, add_special_tokens=body.get("add_special_tokens", True))
            if isinstance(prompt, str)
            else prompt
            for prompt in _prompts(body.get("prompt"))
        ]
        scored_only = bool(body.get("echo")) and body.get("max_tokens") == 0
        return read_vllm_request(body, prompts, default_max_tokens=16, least=0 if scored_only else 1)

    def write(self, host: ModelHost, body: JSON, request: SamplingRequest, shown: Sequence[ShownCompletion]) -> JSON:
        return_ids, echo = bool(body.get("return_token_ids")), bool(body.get("echo"))
        wanted, prompt_wanted = body.get("logprobs") is not None, body.get("prompt_logprobs") is not None
        versions = bool(body.get("return_weight_versions"))
        start = whole(body, "routed_experts_prompt_start", 0)
        choices = []
        for place, each in enumerate(shown):
            scores: list[float] = []
            likeliest: Sequence[Sequence[tuple[int, float]]] = ()
            if prompt_wanted or (echo and wanted):
                scores, likeliest = host.prompt_scores(request, each.prompt_ids, whole(body, "prompt_logprobs", 0))
            text, ids, logprobs = each.made.text, each.ids, each.logprobs
            if echo:
                text = ("" if return_ids else host.decode(each.prompt_ids)) + text
                ids, logprobs = [*each.prompt_ids, *(ids or ())], [None, *scores, *(logprobs or ())]
            listed = None
            if wanted and logprobs is not None:
                listed = self._logprobs(host, body, request, each, ids or (), logprobs)
            of_prompt = self._of_prompt(host, each, scores, likeliest) if prompt_wanted else []
            choices.append(
                {
                    "index": place,
                    "text": text,
                    "logprobs": listed,
                    **self.ending(host, each, ids if return_ids else None, versions=versions, start=start),
                    "prompt_logprobs": [None, *of_prompt] if prompt_wanted else None,
                    "prompt_token_ids": list(each.prompt_ids) if return_ids else None,
                }
            )
        absent = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
        return self.answer(host, choices, shown, absent=absent, id=new_id("cmpl-"), object="text_completion")

    def _of_prompt(
        self,
        host: ModelHost,
        each: ShownCompletion,
        scores: Sequence[float],
        likeliest: Sequence[Sequence[tuple[int, float]]],
    ) -> list[dict[str, JSON]]:
        """For each token of the prompt but the first: itself, and the likeliest ids there."""
        entries: list[dict[str, JSON]] = []
        for place, (token, score) in enumerate(zip(each.prompt_ids[1:], scores, strict=False)):
            listed = {token: score, **dict(likeliest[place] if likeliest else ())}
            entries.append(
                {
                    str(index): {"logprob": value, "rank": None, "decoded_token": host.token_text(index)}
                    for index, value in listed.items()
                }
            )
        return entries

    def _logprobs(
        self,
        host: ModelHost,
        body: JSON,
        request: SamplingRequest,
        each: ShownCompletion,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
    ) -> JSON:
        name = token_names(host, body)
        tokens = list(map(name, ids))
        count = 0 if body.get("echo") else whole(body, "logprobs", 0)
        best: list[JSON | None] = []
        likeliest = host.likeliest(request, each.made, count)
        for token, logprob, candidates in zip(tokens, logprobs, likeliest, strict=False):
            entry = {token: logprob}
            for index, score in candidates:
                entry.setdefault(name(index), score)
            best.append(None if logprob is None else entry)
        return {
            "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
            "token_logprobs": list(logprobs),
            "tokens": tokens,
            "top_logprobs": best,
        }


class GenerateRoute(VLLMRoute):
    """`POST /inference/v1/generate`: ids in, ids out. A real server needs `--enable-scale-out`."""

    name: ClassVar[str] = "vllm-generate"
    at_engine: ClassVar[bool] = True

    def parse(self, host: ModelHost, body: JSON) -> SamplingRequest:
        ids, parameters = body.get("token_ids"), body.get("sampling_params")
        if not isinstance(ids, list) or not ids:
            raise ValueError("token_ids: List should have at least 1 item after validation.")
        if not isinstance(parameters, Mapping):
            raise ValueError("sampling_params: Field required.")
        images: Sequence[ImagePlace] = ()
        if parts := body.get("content_parts"):
            urls = [part.get("url") for part in parts if part.get("type") == "image_url"]
            ids, images = host.with_images(ids, urls, strict=False)
        request = read_vllm_request(parameters, [ids], default_max_tokens=host.room(ids))
        request = replace(request, images=images)
        if host.sampling_mask and (request.sampling.temperature <= 0 or request.sampling.top_k <= 0):
            raise ValueError("sampling distribution replay requires temperature > 0 and top_k > 0")
        return request

    def write(self, host: ModelHost, body: JSON, request: SamplingRequest, shown: Sequence[ShownCompletion]) -> JSON:
        start = whole(body["sampling_params"], "routed_experts_prompt_start", 0)
        choices = [
            {
                "index": each.made.index,
                "logprobs": self._logprobs(host, body, request, each),
                **self.ending(host, each, each.ids, versions=True, start=start),
                "sampling_mask": host.sampling_masks(request, each.made) if host.sampling_mask else None,
            }
            for each in shown
        ]
        places = [{"offset": image.start, "length": image.tokens} for image in request.images]
        return self.answer(
            host,
            choices,
            shown,
            absent=(
                *("prompt_logprobs", "prompt_token_id_logprobs"),
                *("metrics", "kv_transfer_params", "ec_transfer_params"),
            ),
            request_id=str(body.get("request_id") or new_id("")),
            prompt_token_ids=list(shown[0].prompt_ids) if body.get("return_token_ids") else None,
            mm_placeholders={"image": places} if places and body.get("return_token_ids") else None,
            output_mode="tokens",
        )

    def _logprobs(self, host: ModelHost, body: JSON, request: SamplingRequest, each: ShownCompletion) -> JSON | None:
        wanted, ids = body["sampling_params"].get("logprobs"), each.made.ids
        if wanted is None or each.logprobs is None:
            return None
        content = []
        likeliest = host.likeliest(request, each.made, wanted)
        for index, logprob, best in zip(ids, each.logprobs, likeliest, strict=False):
            sampled = self.entry(index, logprob, None)
            others = [self.entry(other, score, rank) for rank, (other, score) in enumerate(best, 1) if other != index]
            content.append({**sampled, "top_logprobs": [sampled, *others]})
        return {"content": content}

    def entry(self, index: int, logprob: float | None, rank: int | None) -> JSON:
        """One token of `logprobs.content`."""
        return {"token_id": index, "logprob": logprob, "rank": rank}


def token_names(host: ModelHost, body: JSON) -> Callable[[int], str]:
    """The name of a token in logprobs: its text, or its id if the request wants that."""
    return "token_id:{}".format if body.get("return_tokens_as_token_ids") else host.token_text


def read_vllm_request(
    body: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    default_max_tokens: int,
    least: int = 1,
    max_tokens: str = "max_tokens",
) -> SamplingRequest:
    """`read_request` with the limits of vLLM alone."""
    request = read_request(body, prompts, default_max_tokens=default_max_tokens, least=least, max_tokens=max_tokens)
    if request.sampling.temperature == 0 and request.n > 1:
        raise ValueError(f"n must be 1 when using greedy sampling, got {request.n}.")
    if not 0 <= whole(body, "routed_experts_prompt_start", 0) <= min(map(len, prompts), default=0):
        raise ValueError(
            f"routed_experts_prompt_start must be between 0 and the prompt length ({len(prompts[0])}), inclusive."
        )
    if not isinstance(body.get("logprobs"), bool) and whole(body, "logprobs", 0) > _MOST_LOGPROBS:
        raise ValueError(
            f"Requested sample logprobs of {body['logprobs']}, which is greater than max allowed: {_MOST_LOGPROBS}"
        )
    return request


def _prompts(prompt: Any) -> list[Any]:
    listed = [prompt] if isinstance(prompt, str) or is_ids(prompt) else prompt
    if isinstance(listed, list) and listed and all((isinstance(each, str) and each) or is_ids(each) for each in listed):
        return listed
    raise Rejected("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
