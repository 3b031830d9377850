"""`/generate` of Atropos' `vllm_api_server.py`, which shares its path with SGLang's: its requests have a `prompt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from lachesis_tokens.model_routes.host import JSON, ModelHost, ModelRoute, ShownCompletion, version_spans
from lachesis_tokens.model_routes.requests import PromptTooLong, SamplingRequest, check_ids, is_ids, whole
from lachesis_tokens.model_routes.vllm import read_vllm_request


class AtroposRoute(ModelRoute):
    """`POST /generate` of Atropos' `vllm_api_server.py`: every field but the prompt goes into `SamplingParams`.

    Unknown fields, `model` included, give a plain 500, as there.
    """

    name: ClassVar[str] = "atropos"
    rejects_with: ClassVar[int] = 500

    def failure(self, status: int, message: str, param: str | None) -> JSON | str:
        return "Internal Server Error" if status == 500 else {"detail": message}

    def read(self, host: ModelHost, body: JSON) -> SamplingRequest:
        prompt = body.get("prompt")
        found = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        ids: list[int] = list(found) if found is not None and is_ids(found) else []
        if isinstance(prompt, str):
            ids = host.encode(prompt, add_special_tokens=True)
        known = body.keys() <= _SAMPLING_PARAMS | {"prompt", "stream"} and not body.get("stream")
        if not known or not ids:
            raise ValueError(
                "prompt: one prompt is required, a text or prompt_token_ids, with fields of SamplingParams"
            )
        check_ids(ids, host.vocabulary_size)
        if host.context_length is not None and len(ids) >= host.context_length:
            message = f"The prompt has {len(ids)} tokens; the model's context length is {host.context_length} tokens."
            raise PromptTooLong(message, self.rejects_with)
        return read_vllm_request(body, [ids], default_max_tokens=16)

    def write(self, host: ModelHost, body: JSON, request: SamplingRequest, shown: Sequence[ShownCompletion]) -> JSON:
        answer: JSON = {
            "text": [each.made.text for each in shown],
            "prompt": host.decode(request.prompts[0]),
            "finish_reasons": [each.made.finish_reason for each in shown],
        }
        if body.get("return_weight_versions"):  # not of Atropos' server: a host that adds it asks for it
            answer["weight_versions"] = [version_spans(each.made) for each in shown]
        if body.get("logprobs") is None:
            return answer
        if all(each.logprobs is not None for each in shown):
            answer["logprobs"] = [self._logprobs(host, body, request, each) for each in shown]
        answer["prompt_token_ids"] = list(shown[0].prompt_ids)
        if all(each.ids is not None for each in shown):
            answer["token_ids"] = [list(each.ids or ()) for each in shown]
        return answer

    def _logprobs(
        self, host: ModelHost, body: JSON, request: SamplingRequest, each: ShownCompletion
    ) -> list[list[JSON]]:
        """`[{id: logprob, ...}]` for each token, the sampled one first: a list of one object, ids as JSON keys."""
        ids, logprobs = each.ids or (), each.logprobs or ()
        unnamed: list[list[JSON]] = [[{}] for _ in range(len(each.made.ids) - len(ids))]
        likeliest = host.likeliest(request, each.made, whole(body, "logprobs", 0))
        named: list[list[JSON]] = [
            [{str(index): logprob, **{str(other): score for other, score in best if other != index}}]
            for index, logprob, best in zip(ids, logprobs, likeliest, strict=False)
        ]
        return [*named, *unnamed]


_SAMPLING_PARAMS: Final = frozenset(
    (
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs"),
        *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "bad_words"),
        *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
        *("logit_bias", "allowed_token_ids", "extra_args", "structured_outputs"),
    )
)
