"""The token routes of vLLM 0.33: `/v1/completions` and `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lachesis.inference.sampling import LogprobsKind
from lachesis.testing.fake_server.completions import Call
from lachesis.testing.fake_server.shapes import (
    JSON,
    Host,
    Rejected,
    Shown,
    is_ids,
    new_id,
    now,
    openai_error,
    read_call,
    usage,
    whole,
)

_MOST_LOGPROBS = 20
"""vLLM's `--max-logprobs` default."""


class VLLMApi:
    """Common parts of vLLM's routes."""

    def logprobs(self, host: Host) -> LogprobsKind:
        return host.logprobs_mode

    def failure(self, status: int, message: str) -> JSON | str:
        return openai_error(status, message)


class Completions(VLLMApi):
    """`POST /v1/completions`: prompts as text or as ids, one or many."""

    name: ClassVar[str] = "vllm-completions"

    def read(self, host: Host, body: JSON) -> Call:
        check_model(host, body)
        if body.get("stream"):
            raise Rejected(400, openai_error(400, "The fake server does not stream.", "stream"))
        prompts = [
            host.codec.encode(prompt, add_special_tokens=body.get("add_special_tokens", True))
            if isinstance(prompt, str)
            else prompt
            for prompt in _prompts(body.get("prompt"))
        ]
        scored_only = bool(body.get("echo")) and body.get("max_tokens") == 0
        with Checked():
            call = read_vllm_call(body, prompts, default_max_tokens=16, least=0 if scored_only else 1)
        check_prompts(host, call)
        return call

    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> JSON:
        return_ids, wanted, echo = bool(body.get("return_token_ids")), body.get("logprobs"), bool(body.get("echo"))
        prompt_wanted = body.get("prompt_logprobs")
        choices = []
        for place, each in enumerate(shown):
            scores = None
            if prompt_wanted is not None or (echo and wanted is not None):
                scores = self._prompt_scores(host, call, each)
            text, ids, logprobs = each.made.text, each.ids, each.logprobs
            if echo:
                text = ("" if return_ids else host.codec.decode(each.prompt_ids)) + text
                ids = [*each.prompt_ids, *(ids or ())]
                logprobs = [*(scores or ()), *(logprobs or ())] if wanted is not None else None
            choices.append(
                {
                    "index": place,
                    "text": text,
                    "logprobs": None
                    if wanted is None or logprobs is None
                    else self._logprobs(host, body, call, each, ids or (), logprobs),
                    "finish_reason": each.made.finish_reason,
                    "stop_reason": each.made.stop_reason,
                    "token_ids": None if not return_ids or each.ids is None else list(each.ids),
                    "prompt_logprobs": None
                    if prompt_wanted is None or scores is None
                    else [
                        None,
                        *(
                            {
                                str(index): {
                                    "logprob": score,
                                    "rank": None,
                                    "decoded_token": host.codec.token_texts[index],
                                }
                            }
                            for index, score in zip(each.prompt_ids[1:], scores[1:], strict=True)
                        ),
                    ],
                    "prompt_token_ids": list(each.prompt_ids) if return_ids else None,
                    "routed_experts": None,
                    "weight_versions": weight_versions(host, each) if body.get("return_weight_versions") else None,
                }
            )
        return {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": now(),
            "model": host.model_name,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage(shown),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _prompt_scores(self, host: Host, call: Call, each: Shown) -> list[float | None]:
        ids = list(each.prompt_ids)
        return [None, *host.model.score(ids[:1], ids[1:], call.sampling, host.logprobs_mode)]

    def _logprobs(
        self, host: Host, body: JSON, call: Call, each: Shown, ids: Sequence[int], logprobs: Sequence[float | None]
    ) -> JSON:
        named = host.codec.token_texts
        if body.get("return_tokens_as_token_ids"):
            tokens = [f"token_id:{index}" for index in ids]
        else:
            tokens = [named[index] for index in ids]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        best: list[JSON | None] = [
            {token: logprob} if logprob is not None else None for token, logprob in zip(tokens, logprobs, strict=False)
        ]
        if (count := whole(body, "logprobs", 0)) > 0 and not body.get("echo"):
            found = host.model.top(call.prompts[each.made.prompt], ids, call.sampling, host.logprobs_mode, count)
            for entry, candidates in zip(best, found, strict=False):
                if entry is not None:
                    for index, logprob in candidates:
                        name = f"token_id:{index}" if body.get("return_tokens_as_token_ids") else named[index]
                        entry.setdefault(name, logprob)
        return {"text_offset": offsets, "token_logprobs": list(logprobs), "tokens": tokens, "top_logprobs": best}


class Generate(VLLMApi):
    """`POST /inference/v1/generate`: ids in, ids out. A real server needs `--enable-scale-out`."""

    name: ClassVar[str] = "vllm-generate"

    def read(self, host: Host, body: JSON) -> Call:
        check_model(host, body)
        if body.get("stream"):
            raise Rejected(400, openai_error(400, "The fake server does not stream.", "stream"))
        ids = body.get("token_ids")
        if not isinstance(ids, list) or not ids:
            raise Rejected(400, openai_error(400, "token_ids: List should have at least 1 item after validation."))
        parameters = body.get("sampling_params")
        if not isinstance(parameters, Mapping):
            raise Rejected(400, openai_error(400, "sampling_params: Field required."))
        room = max(1, host.context_length - len(ids))
        with Checked():
            call = read_vllm_call(parameters, [ids], default_max_tokens=room)
        check_prompts(host, call, at_engine=True)
        return call

    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> JSON:
        wanted = body["sampling_params"].get("logprobs")
        choices = []
        for each in shown:
            logprobs = None
            if wanted is not None and each.logprobs is not None:
                ids = each.made.ids
                found = (
                    host.model.top(call.prompts[0], ids, call.sampling, host.logprobs_mode, wanted) if wanted else []
                )
                content = []
                for place, (index, logprob) in enumerate(zip(ids, each.logprobs, strict=False)):
                    sampled = {"token_id": index, "logprob": logprob, "rank": None}
                    others = [
                        {"token_id": other, "logprob": score, "rank": rank}
                        for rank, (other, score) in enumerate(found[place] if found else (), 1)
                        if other != index
                    ]
                    content.append({**sampled, "top_logprobs": [sampled, *others]})
                logprobs = {"content": content}
            choices.append(
                {
                    "index": each.made.index,
                    "finish_reason": each.made.finish_reason,
                    "stop_reason": each.made.stop_reason,
                    "token_ids": None if each.ids is None else list(each.ids),
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": weight_versions(host, each),
                    "logprobs": logprobs,
                }
            )
        return {
            "request_id": str(body.get("request_id") or new_id("")),
            "model": host.model_name,
            "created": now(),
            "usage": usage(shown),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": list(shown[0].prompt_ids) if body.get("return_token_ids") else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": choices,
        }


class Checked:
    """Converts a `ValueError` to vLLM's 400."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise Rejected(400, openai_error(400, str(error))) from error


def weight_versions(host: Host, each: Shown) -> list[JSON]:
    """The version of the weights for each span of output tokens."""
    count = len(each.made.ids)
    return [{"version": host.weight_version, "start": 0, "end": count}] if count else []


def check_model(host: Host, body: Mapping[str, Any]) -> None:
    """404 if the request names another model."""
    name = body.get("model")
    if name and name != host.model_name:
        raise Rejected(404, openai_error(404, f"The model `{name}` does not exist.", "model"))


def read_vllm_call(
    body: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    default_max_tokens: int,
    least: int = 1,
    max_tokens: str = "max_tokens",
) -> Call:
    """`read_call` with the limits of vLLM alone."""
    call = read_call(body, prompts, default_max_tokens=default_max_tokens, least=least, max_tokens=max_tokens)
    if call.sampling.temperature == 0 and call.n > 1:
        raise ValueError(f"n must be 1 when using greedy sampling, got {call.n}.")
    if not isinstance(body.get("logprobs"), bool) and whole(body, "logprobs", 0) > _MOST_LOGPROBS:
        raise ValueError(
            f"Requested sample logprobs of {body['logprobs']}, which is greater than max allowed: {_MOST_LOGPROBS}"
        )
    return call


def check_prompts(host: Host, call: Call, *, at_engine: bool = False) -> None:
    """vLLM's 400 for ids outside the vocabulary and for prompts that leave no room."""
    for prompt in call.prompts:
        count = len(prompt)
        if count and max(prompt) >= host.model.vocabulary_size:
            raise Rejected(400, openai_error(400, f"Token id {max(prompt)} is out of vocabulary"))
        if count > host.context_length and not at_engine:
            message = (
                f"This model's maximum context length is {host.context_length} tokens. However, your prompt contains "
                f"{count} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
                "length of the input prompt."
            )
            raise Rejected(400, openai_error(400, message, "input_tokens"))
        if count == host.context_length and call.sampling.max_tokens and not at_engine:
            # vLLM lowers max_tokens to the remaining room, and then rejects 0.
            raise Rejected(400, openai_error(400, "max_tokens must be at least 1, got 0.", "max_tokens"))
        if count >= host.context_length and call.sampling.max_tokens:
            message = (
                f"The decoder prompt (length {count}) plus the number of requested output tokens (at least 1) is "
                f"longer than the maximum model length of {host.context_length}. Make sure that `max_model_len` is no "
                "smaller than the number of text tokens (prompt + requested output tokens)."
            )
            raise Rejected(400, openai_error(400, message))


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if is_ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all((isinstance(each, str) and each) or is_ids(each) for each in prompt):
        return prompt
    message = "Either prompt or prompt_embeds must be provided and non-empty."
    raise Rejected(400, openai_error(400, message, "prompt"))
