"""vLLM's `/inference/v1/generate`, from token ids to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from lachesis_client.errors import BadResponse, RequestRejected
from lachesis_client.sampling import Sampling
from lachesis_tokens.engines.base import REPLAY, Generation
from lachesis_tokens.engines.http_engine import list_of_objects
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.engines.vllm import VLLMEngine, id_in, prompt_length

_SCALE_OUT: Final = "start vLLM with --enable-scale-out, or use its /v1/completions (engine vllm)"
_OF_THE_REQUEST: Final = frozenset(
    {"cache_salt", "ec_transfer_params", "features", "kv_transfer_params", "priority", "reasoning_ended", "request_id"}
)
"""Extra fields of `/inference/v1/generate` outside `sampling_params`. All others go into `sampling_params`."""


class VLLMGenerate(VLLMEngine):
    """vLLM's `/inference/v1/generate`, which takes and returns only ids (`vllm serve --enable-scale-out`)."""

    kind: ClassVar[str] = "vllm-generate"
    replays: ClassVar[frozenset[str]] = frozenset(REPLAY)
    takes_images: ClassVar[bool] = True

    @property
    def url(self) -> str:
        """Outside `/v1`."""
        return f"{self.root_url}/inference/v1/generate"

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> list[Generation]:
        """`n` completions of the prompt; see `TokenEngine`."""
        try:
            return await super().generate(prompt_ids, sampling, n=n, max_retries=max_retries)
        except RequestRejected as error:
            if error.status in (403, 404, 405) and "model" not in error.body:
                raise RequestRejected(self.base_url, error.status, error.body, _SCALE_OUT) from error
            raise

    def payload(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """Ids and `sampling_params`."""
        extra = self.extra(sampling)
        beside = {key: extra.pop(key) for key in _OF_THE_REQUEST & extra.keys()}
        return {
            **beside,
            "model": self.settings.model_name,
            "token_ids": prompt.sent,
            **({"content_parts": _content_parts(prompt)} if prompt.images else {}),
            "sampling_params": {**extra, **self.sampling_of(prompt, sampling, n)},
            "stream": False,
            "return_token_ids": self.echoes(prompt),  # of the prompt; those of the completion always come
        }

    def read(self, body: Mapping[str, Any], prompt: PromptIds) -> list[Generation]:
        """`token_ids` and `logprobs.content` of every choice."""
        choices = self.choices(body)
        self.check_prompt(prompt, body.get("prompt_token_ids"), prompt_length(body.get("usage")))
        generations = [self._generation(choice, body) for choice in choices]
        return self.with_replay(prompt, choices, generations)

    def _generation(self, choice: Mapping[str, Any], body: Mapping[str, Any]) -> Generation:
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        entries = list_of_objects(logprobs.get("content") if isinstance(logprobs, dict) else None)
        if entries is None:
            raise BadResponse(self.base_url, "the completion came without logprobs.content", _SCALE_OUT)
        if isinstance(ids, list) and len(ids) == len(entries):
            for position, (token, entry) in enumerate(zip(ids, entries, strict=True)):
                if (named := _id_of(entry)) != token:
                    raise BadResponse(
                        self.base_url,
                        f"sampled token {position} is {token!r}, but its logprob belongs to {named!r}",
                        "serve with vLLM 0.11 or later",
                    )
        values = [entry.get("logprob") for entry in entries]
        return self.completion(ids, values, choice, body, body.get("request_id"))


def _content_parts(prompt: PromptIds) -> list[dict[str, str]]:
    """The images, which vLLM puts in the places of the placeholders in this order."""
    return [{"type": "image_url", "url": placed.image.url} for placed in prompt.images]


def _id_of(entry: Mapping[str, Any]) -> object:
    """`token_id`; before vLLM 0.31 the text of the token holds the id."""
    return entry["token_id"] if "token_id" in entry else id_in(entry.get("token"))
