"""llama.cpp's native `/completion`: the embedded model, or any `llama-server`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from lachesis.inference.engines.base import Generated
from lachesis.inference.engines.http_engine import HttpEngine, check_request, list_of_objects, one_by_one, text_or_none
from lachesis.inference.engines.prompt_ids import PromptIds
from lachesis.inference.errors import BadResponse
from lachesis.inference.http_client import Answer
from lachesis.inference.sampling import LogprobsKind, Sampling
from lachesis.trajectories.messages import FinishReason

_FINISH_REASONS: Final = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}
_FORCED: Final = 1e6
"""A logit bias that leaves no other token a chance. It does not enter the logprobs, which are of the raw logits."""
_CANDIDATES: Final = (64, 1 << 24)
"""How many of the most probable tokens to ask for when the logprob of one is wanted: enough for most, then all."""


class LlamaCppEngine(HttpEngine):
    """llama.cpp, by way of its native `/completion` with ids in and `return_tokens`.

    The ids end with the end-of-turn token, or with the token that completed a stop string; nothing is put before the
    prompt. Logprobs are the softmax of the raw logits, at temperature 1 and before every sampler. The server lists none
    for a token after which the text ends inside a character, and leaves out those of a stop string: each of these is
    read off a further request after the same ids, in which another token is forced and the wanted one looked up.
    Several completions are several requests, with `seed`, `seed + 1`, ...
    """

    kind: ClassVar[str] = "llama.cpp"
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("raw",)

    _forced_token: int | None = None
    """The id of a plain letter."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, max_retries: int | None = None
    ) -> Generated:
        """`n` completions of the prompt; see `TokenEngine`. `latency` is that of the slowest."""
        prompt = check_request(prompt_ids, sampling, n)
        seeds = [None if sampling.seed is None else sampling.seed + i for i in range(n)]
        each = (self._generate_one(prompt, replace(sampling, seed=seed), max_retries) for seed in seeds)
        return replace(await one_by_one(each), sampling=self.record(sampling))

    def payload(self, prompt: PromptIds, sampling: Sampling) -> dict[str, Any]:
        """A request for one completion, every sampler that could change the distribution spelled out or off."""
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

    async def _generate_one(self, prompt: PromptIds, sampling: Sampling, max_retries: int | None) -> Generated:
        async with self.place():  # held for the look-ups, too: they count on the slot's cache
            return await self._generate_in_place(prompt, sampling, max_retries)

    async def _generate_in_place(self, prompt: PromptIds, sampling: Sampling, max_retries: int | None) -> Generated:
        answer = await self._complete(self.payload(prompt, sampling), max_retries)
        body, attempts = answer.body, answer.attempts
        ids, listed = self._tokens(body)
        length = body.get("tokens_evaluated")
        self.check_prompt(prompt, None, length if isinstance(length, int) else None)
        which = align(ids, [entry.get("id") for entry in listed])
        logprobs = [None if index is None else listed[index].get("logprob") for index in which]
        # From the end, so that the cache of what the wanted tokens were sampled after is cut, and never read again:
        # a prompt that is read in one go is rounded otherwise, by 0.1 and more with 4-bit weights.
        for position in reversed(range(len(ids))):
            if which[position] is None:
                context = [*prompt, *ids[:position]]
                logprobs[position], retries = await self._look_up(context, ids[position], max_retries)
                attempts += retries
        raw_reason = text_or_none(body.get("stop_type"))
        generation = self.generation(ids, logprobs, raw_reason)
        reason = _FINISH_REASONS.get(raw_reason or "", FinishReason.UNKNOWN)
        if body.get("truncated"):
            await self._refuse_shifted_context(len(prompt) + len(ids))
        generations = [replace(generation, finish_reason=reason)]
        return Generated(generations, text_or_none(body.get("model")), None, answer.latency, attempts)

    async def _complete(self, payload: Mapping[str, Any], max_retries: int | None) -> Answer:
        return await self.send_at_once(f"{self.root_url}/completion", payload, max_retries=max_retries)

    def _tokens(self, body: Mapping[str, Any]) -> tuple[list[int], list[Mapping[str, Any]]]:
        ids, listed = body.get("tokens"), list_of_objects(body.get("completion_probabilities", []))
        if not isinstance(ids, list) or listed is None:
            raise BadResponse(
                self.base_url,
                f"the answer has no tokens or no completion_probabilities (its keys: {', '.join(map(str, body))})",
                "serve with llama.cpp of 2025 or later, whose /completion knows return_tokens",
            )
        return ids, listed

    async def _look_up(self, context: list[int], token: int, max_retries: int | None) -> tuple[float, int]:
        """The logprob of `token` after `context`, and how many failed requests it took."""
        retries = 0
        for candidates in _CANDIDATES:
            payload = {
                **self.payload(PromptIds(context), Sampling(max_tokens=1)),
                "logit_bias": [[await self._plain_token(max_retries), _FORCED]],
                "n_probs": candidates,
                "cache_prompt": True,
            }
            answer = await self._complete(payload, max_retries)
            retries += answer.attempts - 1
            _, listed = self._tokens(answer.body)
            for entry in list_of_objects(listed[0].get("top_logprobs")) or () if listed else ():
                if entry.get("id") == token and isinstance(logprob := entry.get("logprob"), float):
                    return logprob, retries
        raise BadResponse(
            self.base_url,
            f"no logprob is to be had for token {token}, sampled after {len(context)} others",
            "report the model and the version of llama.cpp",
        )

    async def _plain_token(self, max_retries: int | None) -> int:
        if self._forced_token is None:
            wanted = {"content": "a", "add_special": False}
            answer = await self.send_at_once(f"{self.root_url}/tokenize", wanted, max_retries=max_retries)
            tokens = answer.body.get("tokens")
            if not isinstance(tokens, list) or not tokens or not isinstance(tokens[-1], int):
                raise BadResponse(self.base_url, "its /tokenize named no token for a letter", "check the model file")
            self._forced_token = tokens[-1]
        return self._forced_token

    async def _refuse_shifted_context(self, length: int) -> None:
        """More tokens than the context holds: the last ones were sampled after a prompt that had lost its middle."""
        settings = (await self._get("/props", root=True)).get("default_generation_settings")
        room = settings.get("n_ctx") if isinstance(settings, Mapping) else None
        if isinstance(room, int) and length > room:
            raise BadResponse(
                self.base_url,
                f"{length} tokens were sampled and kept in a context of {room}, by dropping some in its middle",
                "start the server without --context-shift",
            )


def align(ids: Sequence[int], listed: Sequence[object]) -> list[int | None]:
    """For every id, which of `listed` it is, or None where it is none or cannot be told.

    `listed` is `ids` with some left out. An id is told only if the earliest and the latest way to find all of `listed`
    in `ids` agree on it. Nothing is told if there is no way.
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
    """Where the ones of `listed` are found in `ids`, each as early as possible; ends at the first that is not."""
    places: list[int] = []
    for place, token in enumerate(ids):
        if len(places) < len(listed) and listed[len(places)] == token:
            places.append(place)
    return places
