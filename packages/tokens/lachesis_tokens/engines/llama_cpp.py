"""llama.cpp's native `/completion`: the embedded model, or any `llama-server`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from lachesis_client.affinity import Route
from lachesis_client.errors import BadResponse
from lachesis_client.http_client import HttpAnswer
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_messages.messages import FinishReason
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.engines.http_engine import (
    HttpEngine,
    check_request,
    list_of_objects,
    one_by_one,
    text_or_none,
    tokenized,
)
from lachesis_tokens.engines.prompt_ids import PromptIds

_FINISH_REASONS: Final = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}
_FORCED: Final = 1e6
"""A logit bias that excludes every other token. It does not change the logprobs, which are of the raw logits."""
_CANDIDATES: Final = (64, 1 << 24)
"""How many of the most probable tokens a look-up requests: enough for most tokens, then all."""


class LlamaCppEngine(HttpEngine):
    """llama.cpp, through its native `/completion` with ids in and `return_tokens`.

    The ids end with the end-of-turn token, or with the token that completed a stop string. Nothing is added before the
    prompt. Logprobs are the softmax of the raw logits, at temperature 1 and before every sampler. The server lists no
    logprob for a token after which the text ends inside a character, nor for the tokens of a stop string. The engine
    looks up each of these with a further request after the same ids, which forces another token and lists the most
    probable ones. Several completions are several requests, with `seed`, `seed + 1`, ...
    """

    kind: ClassVar[str] = "llama.cpp"
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("raw",)

    _forced_token: int | None = None
    """The id of a plain letter."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> list[Generation]:
        """`n` completions of the prompt; see `TokenEngine`. `latency` is that of the slowest."""
        prompt = check_request(prompt_ids, sampling, n)
        seeds = [None if sampling.seed is None else sampling.seed + i for i in range(n)]
        each = (self._generate_one(prompt, replace(sampling, seed=seed), max_retries) for seed in seeds)
        record = self.record(sampling)
        return [replace(one, server=self.base_url, sampling=record) for one in await one_by_one(each)]

    async def tokenize(self, text: str) -> list[int] | None:
        """See `ServerTokenizer`."""
        return await tokenized(self, {"content": text, "add_special": False, "parse_special": True})

    def payload(self, prompt: PromptIds, sampling: Sampling) -> dict[str, Any]:
        """A request for one completion. It sets or switches off every sampler that could change the distribution."""
        return {
            **self.extra(sampling),
            "model": self.settings.model_name,
            "prompt": prompt,
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": len(prompt) + sampling.max_tokens,
            "typical_p": 1.0,
            "top_n_sigma": -1.0,
            "xtc_probability": 0.0,
            "dry_multiplier": 0.0,
            "dynatemp_range": 0.0,
            "mirostat": 0,
            "adaptive_target": -1.0,
            "seed": -1 if sampling.seed is None else sampling.seed,
            "stop": list(sampling.stop),
            "n_probs": 1,
            "post_sampling_probs": False,
            "return_tokens": True,
            "stream": False,
        }

    async def _generate_one(self, prompt: PromptIds, sampling: Sampling, max_retries: int | None) -> list[Generation]:
        async with self.concurrency_slot():  # held for the look-ups too: they rely on the server's cache
            return [await self._generate_in_slot(prompt, sampling, max_retries)]

    async def _generate_in_slot(self, prompt: PromptIds, sampling: Sampling, max_retries: int | None) -> Generation:
        answer = await self._ask(
            "completion",
            self.payload(prompt, sampling),
            max_retries,
            prompt.route,
            harmless=lambda: self.payload(PromptIds(prompt.ids[:1]), replace(sampling, max_tokens=1)),
        )
        body, attempts = answer.body, answer.attempts
        ids, listed = self._tokens(body)
        length = body.get("tokens_evaluated")
        prompt.checked = "none"
        self.check_prompt(prompt, None, length if isinstance(length, int) else None)
        checked = prompt.checked
        which = align(ids, [entry.get("id") for entry in listed])
        logprobs = [None if index is None else listed[index].get("logprob") for index in which]
        # From the end, so that the server only shortens its cache and never reads the ids again: reading a prompt in
        # one batch rounds differently, by 0.1 and more with 4-bit weights.
        for position in reversed(range(len(ids))):
            if which[position] is None:
                context = [*prompt, *ids[:position]]
                logprobs[position], retries = await self._look_up(context, ids[position], max_retries)
                attempts += retries
        raw_reason = text_or_none(body.get("stop_type"))
        generation = self.generation(ids, logprobs, raw_reason, model=body.get("model"))
        if body.get("truncated"):
            await self._reject_shifted_context(len(prompt) + len(ids))
        reason = _FINISH_REASONS.get(raw_reason or "", FinishReason.UNKNOWN)
        return replace(
            generation, finish_reason=reason, latency=answer.latency, attempts=attempts, prompt_checked=checked
        )

    async def _ask(
        self,
        path: str,
        payload: Mapping[str, Any],
        max_retries: int | None,
        route: Route | None = None,
        harmless: Callable[[], Mapping[str, Any]] | None = None,
    ) -> HttpAnswer:
        url = f"{self.root_url}/{path}"
        return await self.send(url, payload, max_retries=max_retries, in_slot=True, route=route, harmless=harmless)

    def _tokens(self, body: Mapping[str, Any]) -> tuple[list[int], list[Mapping[str, Any]]]:
        ids, listed = body.get("tokens"), list_of_objects(body.get("completion_probabilities", []))
        if not isinstance(ids, list) or listed is None:
            raise BadResponse(
                self.base_url,
                f"the answer has no tokens or no completion_probabilities (its keys: {', '.join(map(str, body))})",
                "serve with llama.cpp of 2025 or later, whose /completion supports return_tokens",
            )
        return ids, listed

    async def _look_up(self, context: list[int], token: int, max_retries: int | None) -> tuple[float, int]:
        """The logprob of `token` after `context`, and the number of failed requests."""
        retries = 0
        for candidates in _CANDIDATES:
            payload = {
                **self.payload(PromptIds(context), Sampling(max_tokens=1)),
                "logit_bias": [[await self._plain_token(max_retries), _FORCED]],
                "n_probs": candidates,
                "cache_prompt": True,
            }
            answer = await self._ask("completion", payload, max_retries)
            retries += answer.attempts - 1
            _, listed = self._tokens(answer.body)
            for entry in list_of_objects(listed[0].get("top_logprobs")) or () if listed else ():
                if entry.get("id") == token and isinstance(logprob := entry.get("logprob"), float):
                    return logprob, retries
        raise BadResponse(
            self.base_url,
            f"the server lists no logprob for token {token}, sampled after {len(context)} others",
            "report the model and the version of llama.cpp",
        )

    async def _plain_token(self, max_retries: int | None) -> int:
        if self._forced_token is None:
            answer = await self._ask("tokenize", {"content": "a", "add_special": False}, max_retries)
            tokens = answer.body.get("tokens")
            if not isinstance(tokens, list) or not tokens or not isinstance(tokens[-1], int):
                raise BadResponse(self.base_url, "its /tokenize named no token for a letter", "check the model file")
            self._forced_token = tokens[-1]
        return self._forced_token

    async def _reject_shifted_context(self, length: int) -> None:
        """Raise if the context was shifted: the last tokens were then sampled after a prompt without its middle."""
        settings = (await self._get("/props", root=True)).get("default_generation_settings")
        room = settings.get("n_ctx") if isinstance(settings, Mapping) else None
        if isinstance(room, int) and length > room:
            raise BadResponse(
                self.base_url,
                f"{length} tokens were sampled and kept in a context of {room}, by dropping some in its middle",
                "start the server without --context-shift",
            )


def align(ids: Sequence[int], listed: Sequence[object]) -> list[int | None]:
    """For every id its position in `listed`, or None if it has none or the position is ambiguous.

    `listed` is `ids` with some left out. A position is certain only if the earliest and the latest way to find all of
    `listed` in `ids` agree on it. If `listed` is not contained in `ids`, every position is None.
    """
    earliest = _places(ids, listed)
    latest = [len(ids) - 1 - place for place in reversed(_places(ids[::-1], listed[::-1]))]
    which: list[int | None] = [None] * len(ids)
    if len(earliest) == len(listed):
        for index, (first, last) in enumerate(zip(earliest, latest, strict=True)):
            if first == last:
                which[first] = index
    return which


def _places(ids: Sequence[int], listed: Sequence[object]) -> list[int]:
    """The earliest positions in `ids` of the entries of `listed`, up to the first that is missing."""
    places: list[int] = []
    for place, token in enumerate(ids):
        if len(places) < len(listed) and listed[len(places)] == token:
            places.append(place)
    return places
