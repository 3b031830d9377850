"""SGLang's `/generate` (`GenerateReqInput`) and Atropos' legacy `/generate` over vLLM: one route, two bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from lachesis.inference.sampling import LogprobsKind, Sampling
from lachesis.testing.fake_server.completions import Call
from lachesis.testing.fake_server.shapes import JSON, Host, Refused, Shown, is_ids, new_id, number, texts, whole
from lachesis.testing.fake_server.vllm import read_call

_ALL_TOKENS = 1 << 30
"""How SGLang writes "top-k off" internally, beside -1."""


class SGLangGenerate:
    """`POST /generate`: one prompt answers with an object, many prompts or `n` > 1 with a list, prompt by prompt."""

    name: ClassVar[str] = "sglang"

    def logprobs(self, host: Host) -> LogprobsKind:
        """Of logits divided by the temperature, before any truncation: SGLang unless SGLANG_RETURN_ORIGINAL_LOGPROB."""
        return "temperature"

    def failure(self, status: int, message: str) -> JSON | str:
        return {"error": {"message": message}}

    def read(self, host: Host, body: JSON) -> Call:
        if body.get("stream"):
            raise self._refused("The fake server does not stream.")
        prompts = self._prompts(host, body)
        parameters = body.get("sampling_params") or {}
        if not isinstance(parameters, Mapping):
            raise self._refused("The fake server takes one sampling_params for all prompts.")
        try:
            call = self._call(parameters, prompts)
        except ValueError as error:
            raise self._refused(str(error)) from error
        for prompt in prompts:
            self._check(host, prompt, parameters.get("max_new_tokens"))
        return call

    def write(self, host: Host, body: JSON, call: Call, shown: Sequence[Shown]) -> Any:
        answers = [self._answer(host, body, each) for each in shown]
        single = len(call.prompts) == 1 and call.n == 1 and not _is_batch(body)
        return answers[0] if single else answers

    def _answer(self, host: Host, body: JSON, each: Shown) -> JSON:
        made = each.made
        reason: JSON = {"type": made.finish_reason}
        if made.finish_reason == "length":
            reason["length"] = len(made.ids)
        else:
            ended = made.ids[-1] if made.ids and made.ids[-1] in host.model.end_ids else None
            reason["matched"] = made.stop_reason if made.stop_reason is not None else ended
        meta: JSON = {
            "id": new_id(""),
            "finish_reason": reason,
            "prompt_tokens": len(each.prompt_ids),
            "weight_version": host.weight_version,
            "total_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(made.ids),
            "cached_tokens": 0,
            "e2e_latency": 0.0,
        }
        if body.get("return_logprob") and each.logprobs is not None:
            named = host.codec.token_texts
            with_text = bool(body.get("return_text_in_logprobs"))
            # The triples carry the ids as well: an answer without ids has none here either.
            listed = made.ids if each.ids is not None else [None] * len(made.ids)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [logprob, index, named[index] if with_text and index is not None else None]
                for logprob, index in zip(each.logprobs, listed, strict=False)
            ]
            meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
        answer: JSON = {"text": made.text}
        if each.ids is not None:
            answer["output_ids"] = list(each.ids)
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = list(each.prompt_ids)
        return {**answer, "meta_info": meta}

    def _prompts(self, host: Host, body: JSON) -> list[list[int]]:
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise self._refused("Either text, input_ids or input_embeds should be provided.")
        listed = [text] if isinstance(text, str) else [ids] if is_ids(ids) else text if text is not None else ids
        prompts: list[Any] = [
            host.codec.encode(each, add_special_tokens=True) if isinstance(each, str) else each for each in listed or ()
        ]
        if not prompts or not all(is_ids(prompt) for prompt in prompts):
            raise self._refused("text should be a string and input_ids a list of ids, or lists of these.")
        return prompts

    def _call(self, body: Mapping[str, Any], prompts: list[list[int]]) -> Call:
        top_k = whole(body, "top_k", -1)
        sampling = Sampling(
            max_tokens=whole(body, "max_new_tokens", 128),
            temperature=number(body, "temperature", 1.0),
            top_p=number(body, "top_p", 1.0),
            top_k=0 if top_k in (-1, _ALL_TOKENS) else top_k,
            min_p=number(body, "min_p", 0.0),
            presence_penalty=number(body, "presence_penalty", 0.0),
            frequency_penalty=number(body, "frequency_penalty", 0.0),
            repetition_penalty=number(body, "repetition_penalty", 1.0),
            stop=texts(body.get("stop")),
            seed=body.get("sampling_seed"),
        )
        n = whole(body, "n", 1)
        if sampling.temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {sampling.temperature}.")
        if not 0 < sampling.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {sampling.top_p}.")
        if top_k < -1 or top_k == 0:
            raise ValueError(f"top_k must be -1 (disable), or at least 1, got {top_k}.")
        if sampling.max_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {sampling.max_tokens}.")
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}.")
        return Call(
            prompts=prompts,
            sampling=sampling,
            n=n,
            stop_ids=tuple(body.get("stop_token_ids") or ()),
            ignore_end=bool(body.get("ignore_eos")),
            keep_stop=bool(body.get("no_stop_trim")),
            skip_special=body.get("skip_special_tokens") is not False,
        )

    def _check(self, host: Host, prompt: Sequence[int], max_new_tokens: int | None) -> None:
        count, most = len(prompt), host.context_length
        if max(prompt) >= host.model.vocabulary_size:
            raise self._refused(
                f"The input_ids {list(prompt[:8])}... contains values greater than the vocab size "
                f"({host.model.vocabulary_size})."
            )
        if count >= most:
            raise self._refused(
                f"The input ({count} tokens) is longer than the model's context length ({most} tokens)."
            )
        if max_new_tokens is not None and count + max_new_tokens > most:
            raise self._refused(
                f"Requested token count exceeds the model's maximum context length of {most} tokens. You requested a "
                f"total of {count + max_new_tokens} tokens: {count} tokens from the input messages and "
                f"{max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input messages "
                "or the completion to fit within the limit."
            )

    def _refused(self, message: str) -> Refused:
        return Refused(400, self.failure(400, message))


class AtroposGenerate:
    """`POST /generate` of Atropos' `vllm_api_server.py`: every field beside the prompt goes into `SamplingParams`.

    It answers anything that it does not understand, `model` included, with a plain 500: so does this one.
    """

    name: ClassVar[str] = "atropos"

    def logprobs(self, host: Host) -> LogprobsKind:
        return host.logprobs_mode

    def failure(self, status: int, message: str) -> JSON | str:
        return "Internal Server Error" if status == 500 else {"detail": message}

    def read(self, host: Host, body: JSON) -> Call:
        prompt = body.get("prompt")
        found = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        ids: list[int] = list(found) if found is not None and is_ids(found) else []
        if isinstance(prompt, str):
            ids = host.codec.encode(prompt, add_special_tokens=True)
        known = body.keys() <= _SAMPLING_PARAMS | {"prompt", "stream"} and not body.get("stream")
        if not known or not 0 < len(ids) < host.context_length or max(ids) >= host.model.vocabulary_size:
            raise Refused(500, self.failure(500, ""))
        try:
            return read_call(host, body, [ids], default_max_tokens=16)
        except ValueError as error:
            raise Refused(500, self.failure(500, "")) from error

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
        count = whole(body, "logprobs", 0)
        found = host.model.top(call.prompts[0], ids, call.sampling, host.logprobs_mode, count) if count else []
        named: list[list[JSON]] = [
            [{str(index): logprob, **{str(i): s for i, s in (found[place] if found else ()) if i != index}}]
            for place, (index, logprob) in enumerate(zip(ids, logprobs, strict=False))
        ]
        return [*named, *unnamed]


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
