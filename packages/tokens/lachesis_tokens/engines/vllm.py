"""vLLM's two routes from token ids to token ids: `/v1/completions`, and `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from lachesis_client.chat_format import cached_tokens
from lachesis_client.errors import BadResponse, RequestRejected
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_tokens.engines.base import Generation, PromptLogprobs
from lachesis_tokens.engines.http_engine import (
    HttpEngine,
    SingleRequestEngine,
    ids_or_none,
    list_of_objects,
    tokenized,
)
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.engines.replay_fields import REPLAY, with_replay
from lachesis_tokens.engines.shortening import without_token_texts

_SCALE_OUT: Final = "start vLLM with --enable-scale-out, or use its /v1/completions (engine vllm)"
_REPLAY_FLAGS: Final = (
    "start vLLM with --enable-return-routed-experts (openai.routed_experts) and --return-sampling-mask "
    "(openai.sampling_mask), or leave the setting out"
)
_AS_TEXT: Final = "token_id:"
_IDS_AS_TEXTS: Final = b'"tokens":["token_id:'
_UNMARKED: Final = {"watermarking": False}
"""A server with `--watermark-config` marks every completion unless the request opts out. The watermark's key then
determines the tokens, and all rollouts of a group are the same. Versions before 0.32 ignore the field."""
_OF_THE_REQUEST: Final = frozenset(
    {"cache_salt", "ec_transfer_params", "features", "kv_transfer_params", "priority", "reasoning_ended", "request_id"}
)
"""Extra fields of `/inference/v1/generate` outside `sampling_params`. All others go into `sampling_params`."""


class VLLMCompletions(SingleRequestEngine):
    """Stock vLLM 0.10.2 or later, through `/v1/completions` with `return_token_ids`.

    The ids end with the end-of-turn token, or with the token that completed a stop string. Logprobs are of raw logits
    at temperature 1 unless the server was started with `--logprobs-mode processed_logprobs`.
    """

    kind: ClassVar[str] = "vllm"
    replays: ClassVar[frozenset[str]] = frozenset({"routed_experts"})
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("raw", "processed")

    @property
    def url(self) -> str:
        """`/completions` of the OpenAI API."""
        return f"{self.base_url}/completions"

    def payload(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """An OpenAI completion request with vLLM's fields.

        `return_token_ids` reports the ids of the prompt and of the completion. Without it, those of the completion are
        the texts of its tokens: "token_id:7".
        """
        echoes = self.echoes(prompt)
        return {
            **self.extra(sampling),
            **sampling_params(sampling, n),
            **_experts_start(self, prompt),
            **_UNMARKED,
            "model": self.settings.model_name,
            "prompt": prompt,
            "echo": False,
            "stream": False,
            "return_token_ids": echoes,
            **({} if echoes else {"return_tokens_as_token_ids": True}),
            "return_weight_versions": True,
        }

    def shorten(self, raw: bytes) -> bytes:
        """Without the texts of the tokens, unless these are the ids."""
        return without_token_texts(raw) if raw.find(_IDS_AS_TEXTS) < 0 else raw

    def read(self, body: Mapping[str, Any], prompt: PromptIds) -> list[Generation]:
        """`token_ids` and `logprobs.token_logprobs` of every choice."""
        choices = _choices(body, self.base_url)
        for choice in choices:
            self.check_prompt(prompt, choice.get("prompt_token_ids"), _prompt_length(body.get("usage")))
        generations = [self._generation(choice, body) for choice in choices]
        return _with_replay(self, prompt, choices, generations)

    async def tokenize(self, text: str) -> list[int] | None:
        """See `ServerTokenizer`."""
        return await _tokenized(self, text)

    async def prompt_logprobs(
        self, prompt_ids: Sequence[int], top_k: int, *, max_retries: int | None = None
    ) -> PromptLogprobs:
        """See `PromptScorer`. `--max-logprobs` of the server limits `top_k` (20 unless it was started with more)."""
        prompt = prompt_ids if isinstance(prompt_ids, PromptIds) else PromptIds(prompt_ids)
        payload = {
            "model": self.settings.model_name,
            "prompt": prompt,
            "max_tokens": 1,  # vLLM samples at least one
            "temperature": 0.0,
            "prompt_logprobs": top_k,
            "return_token_ids": True,
            "stream": False,
        }
        answer = await self.send(self.url, payload, max_retries=max_retries)
        choice = _choices(answer.body, self.base_url)[0]
        self.check_prompt(prompt, choice.get("prompt_token_ids"), _prompt_length(answer.body.get("usage")))
        listed = choice.get("prompt_logprobs")
        if not isinstance(listed, list) or len(listed) != len(prompt):
            came = f"{len(listed)} entries" if isinstance(listed, list) else "none"
            reason = f"prompt_logprobs of {len(prompt)} tokens were requested and {came} came"
            raise BadResponse(self.base_url, reason, "serve with vLLM, whose /v1/completions supports prompt_logprobs")
        positions = [self._scores(token, entry) for token, entry in zip(prompt, listed, strict=True)]
        return PromptLogprobs(positions, answer.latency, answer.attempts)

    def _scores(self, token: int, entry: object) -> list[tuple[int, float]]:
        if entry is None:
            return []
        try:
            scores = {int(name): float(value["logprob"]) for name, value in entry.items()}  # type: ignore[attr-defined]
            return [(token, scores.pop(token)), *sorted(scores.items(), key=lambda score: -score[1])]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadResponse(self.base_url, f"an entry of prompt_logprobs cannot be read: {error!r}") from error

    def _generation(self, choice: Mapping[str, Any], body: Mapping[str, Any]) -> Generation:
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is None and isinstance(logprobs, dict):
            ids = _ids_of(logprobs.get("tokens"))
        if ids is None:
            raise BadResponse(
                self.base_url,
                "the completion came without token_ids",
                "serve with vLLM 0.10.2 or later, whose /v1/completions supports return_token_ids",
            )
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        return _generation(self, ids, values, choice, body, body.get("id"))


class VLLMGenerate(SingleRequestEngine):
    """vLLM's `/inference/v1/generate`, which takes and returns only ids (`vllm serve --enable-scale-out`)."""

    kind: ClassVar[str] = "vllm-generate"
    replays: ClassVar[frozenset[str]] = frozenset(REPLAY)
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("raw", "processed")
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

    async def tokenize(self, text: str) -> list[int] | None:
        """See `ServerTokenizer`."""
        return await _tokenized(self, text)

    def payload(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """Ids and `sampling_params`."""
        extra = self.extra(sampling)
        beside = {key: extra.pop(key) for key in _OF_THE_REQUEST & extra.keys()}
        return {
            **beside,
            "model": self.settings.model_name,
            "token_ids": prompt.sent,
            **({"content_parts": _content_parts(prompt)} if prompt.images else {}),
            "sampling_params": {**extra, **sampling_params(sampling, n), **_experts_start(self, prompt), **_UNMARKED},
            "stream": False,
            "return_token_ids": self.echoes(prompt),  # of the prompt; those of the completion always come
        }

    def read(self, body: Mapping[str, Any], prompt: PromptIds) -> list[Generation]:
        """`token_ids` and `logprobs.content` of every choice."""
        choices = _choices(body, self.base_url)
        self.check_prompt(prompt, body.get("prompt_token_ids"), _prompt_length(body.get("usage")))
        generations = [self._generation(choice, body) for choice in choices]
        return _with_replay(self, prompt, choices, generations)

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
        return _generation(self, ids, values, choice, body, body.get("request_id"))


def _generation(
    engine: HttpEngine, ids: object, values: object, choice: Mapping[str, Any], body: Mapping[str, Any], name: object
) -> Generation:
    return engine.generation(
        ids,
        values,
        choice.get("finish_reason"),
        model=body.get("model"),
        versions=choice.get("weight_versions"),
        completion_id=name,
        cached_tokens=cached_tokens(body.get("usage")),
    )


def _content_parts(prompt: PromptIds) -> list[dict[str, str]]:
    """The images, which vLLM puts in the places of the placeholders in this order."""
    return [{"type": "image_url", "url": placed.image.url} for placed in prompt.images]


async def _tokenized(engine: HttpEngine, text: str) -> list[int] | None:
    """By `/tokenize`, or where a proxy passes on `/v1` only, by the echo of a completion of the text."""
    asked = {"model": engine.settings.model_name, "prompt": text, "add_special_tokens": False}
    if (ids := await tokenized(engine, asked)) is not None:
        return ids
    payload = {**asked, "max_tokens": 1, "return_token_ids": True, "stream": False}
    answer = await engine.send(f"{engine.base_url}/completions", payload, max_retries=1)
    choices = _choices(answer.body, engine.base_url)
    return ids_or_none(choices[0].get("prompt_token_ids")) if choices else None


def sampling_params(sampling: Sampling, n: int) -> dict[str, Any]:
    """vLLM's names, with one logprob a token. top_k -1 is off in every version, 0 only in newer ones."""
    params = {**sampling.parameters(), "top_k": sampling.top_k or -1}
    return {"n": n, **params, "logprobs": 0, "skip_special_tokens": False}


def _experts_start(engine: HttpEngine, prompt: PromptIds) -> dict[str, int]:
    return {"routed_experts_prompt_start": prompt.experts_start} if engine.settings.routed_experts else {}


def _with_replay(
    engine: HttpEngine,
    prompt: PromptIds,
    choices: Sequence[Mapping[str, Any]],
    generations: Sequence[Generation],
) -> list[Generation]:
    return [
        with_replay(
            generation,
            prompt,
            engine.settings,
            experts=choice.get("routed_experts"),
            mask=choice.get("sampling_mask"),
            hint=_REPLAY_FLAGS,
        )
        for choice, generation in zip(choices, generations, strict=True)
    ]


def _choices(body: Mapping[str, Any], server: str) -> list[Mapping[str, Any]]:
    choices = list_of_objects(body.get("choices"))
    if choices is None:
        raise BadResponse(server, f"the answer has no choices (its keys: {', '.join(map(str, body)) or 'none'})")
    return sorted(choices, key=lambda choice: choice.get("index") or 0)


def _id_of(entry: Mapping[str, Any]) -> object:
    """`token_id`; before vLLM 0.31 the text of the token holds the id."""
    return entry["token_id"] if "token_id" in entry else _id_in(entry.get("token"))


def _id_in(token: object) -> object:
    digits = token.removeprefix(_AS_TEXT) if isinstance(token, str) else ""
    return int(digits) if digits.isdecimal() else token


def _ids_of(tokens: object) -> list[object] | None:
    """The ids, if each text is one."""
    if not isinstance(tokens, list) or not all(isinstance(text, str) and text.startswith(_AS_TEXT) for text in tokens):
        return None
    return [_id_in(text) for text in tokens]


def _prompt_length(usage: object) -> int | None:
    length = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return length if isinstance(length, int) else None
