"""vLLM's `/v1/completions`, from token ids to token ids, and what its other route shares with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from lachesis_client.chat_format import cached_tokens, in_order
from lachesis_client.errors import BadResponse
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_tokens.engines.base import REPLAY, Generation, PromptLogprobs
from lachesis_tokens.engines.checks import ROUNDING
from lachesis_tokens.engines.http_engine import (
    SingleRequestEngine,
    ids_or_none,
    list_of_objects,
    tokenized,
)
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.engines.shortening import without_token_texts

_REPLAY_FLAGS: Final = (
    "start vLLM with --enable-return-routed-experts (openai.routed_experts) and --return-sampling-mask "
    "(openai.sampling_mask), or leave the setting out"
)
_AS_TEXT: Final = "token_id:"
_IDS_AS_TEXTS: Final = b'"tokens":["token_id:'
_UNMARKED: Final = {"watermarking": False}
"""A server with `--watermark-config` marks every completion unless the request opts out. The watermark's key then
determines the tokens, and all rollouts of a group are the same. Versions before 0.32 ignore the field."""


class VLLMEngine(SingleRequestEngine):
    """What both routes share."""

    modes: ClassVar[tuple[LogprobsKind, ...]] = ("raw", "processed")

    async def tokenize(self, text: str) -> list[int] | None:
        """See `ServerTokenizer`. By `/tokenize`, or where a proxy passes on `/v1` only, by the echo of a completion of
        the text."""
        asked = {"model": self.settings.model_name, "prompt": text, "add_special_tokens": False}
        if (ids := await tokenized(self, asked)) is not None:
            return ids
        payload = {**asked, "max_tokens": 1, "return_token_ids": True, "stream": False}
        choices = self.choices((await self.send(f"{self.base_url}/completions", payload, max_retries=1)).body)
        return ids_or_none(choices[0].get("prompt_token_ids")) if choices else None

    def sampling_of(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """vLLM's sampling parameters for a request."""
        start = {"routed_experts_prompt_start": prompt.experts_start} if self.settings.routed_experts else {}
        return {**sampling_params(sampling, n), **start, **_UNMARKED}

    def choices(self, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The choices of an answer, in order. Raises `BadResponse`."""
        choices = list_of_objects(body.get("choices"))
        if choices is None:
            keys = ", ".join(map(str, body)) or "none"
            raise BadResponse(self.base_url, f"the answer has no choices (its keys: {keys})")
        return in_order(choices)

    def completion(
        self, ids: object, values: object, choice: Mapping[str, Any], body: Mapping[str, Any], name: object
    ) -> Generation:
        """`generation` with what both routes say in the same fields."""
        return self.generation(
            ids,
            values,
            choice.get("finish_reason"),
            model=body.get("model"),
            versions=choice.get("weight_versions"),
            completion_id=name,
            cached_tokens=cached_tokens(body.get("usage")),
        )

    def with_replay(
        self, prompt: PromptIds, choices: Sequence[Mapping[str, Any]], generations: list[Generation]
    ) -> list[Generation]:
        """The completions with their routed experts and sampling masks, where the settings ask for them."""
        if not any(getattr(self.settings, name) for name in REPLAY):
            return generations
        from lachesis_tokens.engines.replay_fields import with_replay  # of runs that ask for one of them

        return [
            with_replay(
                generation,
                prompt,
                self.settings,
                experts=choice.get("routed_experts"),
                mask=choice.get("sampling_mask"),
                hint=_REPLAY_FLAGS,
            )
            for choice, generation in zip(choices, generations, strict=True)
        ]


class VLLMCompletions(VLLMEngine):
    """Stock vLLM 0.10.2 or later, through `/v1/completions` with `return_token_ids`.

    The ids end with the end-of-turn token, or with the token that completed a stop string. Logprobs are of raw logits
    at temperature 1 unless the server was started with `--logprobs-mode processed_logprobs`.
    """

    kind: ClassVar[str] = "vllm"
    replays: ClassVar[frozenset[str]] = frozenset({"routed_experts"})

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
            **self.sampling_of(prompt, sampling, n),
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
        choices = self.choices(body)
        for choice in choices:
            self.check_prompt(prompt, choice.get("prompt_token_ids"), prompt_length(body.get("usage")))
        generations = [self._generation(choice, body) for choice in choices]
        return self.with_replay(prompt, choices, generations)

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
        choice, *_ = self.choices(answer.body) or [{}]
        self.check_prompt(prompt, choice.get("prompt_token_ids"), prompt_length(answer.body.get("usage")))
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
            scores = {int(name): _logprob(value["logprob"]) for name, value in entry.items()}  # type: ignore[attr-defined]
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
        return self.completion(ids, values, choice, body, body.get("id"))


def sampling_params(sampling: Sampling, n: int) -> dict[str, Any]:
    """vLLM's names, with one logprob a token. top_k -1 is off in every version, 0 only in newer ones."""
    params = {**sampling.parameters(), "top_k": sampling.top_k or -1}
    return {"n": n, **params, "logprobs": 0, "skip_special_tokens": False}


def _logprob(value: object) -> float:
    if type(value) not in (int, float) or value > ROUNDING:  # type: ignore[operator]
        raise ValueError(f"{value!r} is no logprob")
    return min(float(value), 0.0)  # type: ignore[arg-type]


def id_in(token: object) -> object:
    """The id in a text such as `token_id:7`; anything else as it is."""
    digits = token.removeprefix(_AS_TEXT) if isinstance(token, str) else ""
    return int(digits) if digits.isdecimal() else token


def _ids_of(tokens: object) -> list[object] | None:
    """The ids, if each text is one."""
    if not isinstance(tokens, list) or not all(isinstance(text, str) and text.startswith(_AS_TEXT) for text in tokens):
        return None
    return [id_in(text) for text in tokens]


def prompt_length(usage: object) -> int | None:
    """The tokens of the prompt, as the server counts them; None where it does not say."""
    length = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return length if isinstance(length, int) else None
