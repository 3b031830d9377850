"""A sampler of `lachesis_train.policy` without weights: it plays a policy of the fake server, or its formula."""

from __future__ import annotations

import asyncio
import math
from functools import cache
from typing import Any

from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_testing.fake_server import Ask, Codec, FakeModel, RandomTokens, fake_tokenizer
from lachesis_testing.fake_server.completions import Call, finish
from lachesis_testing.fake_server.policies import as_policy
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_train.policy import Sampled
from tool_call_parsers import get_parser


@cache
def parts() -> tuple[Codec, dict[str, Any]]:
    """The codec of the default tokenizer, and arguments of `PolicyServer` for it: making them costs most of a test."""
    codec = Codec(fake_tokenizer())
    parser = get_parser("hermes", reasoning="auto", tokenizer=codec.tokenizer)
    return codec, {"prompts": PromptBuilder(codec.tokenizer), "tool_call_parser": parser}


class FakeSampler:
    """Deterministic, as `FakeServer` is. Its logprobs can be recomputed with `model`.

    Args:
        latency: seconds before an answer.
        deaf: ignore every stop, as an engine may that looks for them in its own way.
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        seed: int = 0,
        kind: LogprobsKind = "raw",
        mean_length: float | None = 64.0,
        latency: float = 0.0,
        deaf: bool = False,
    ) -> None:
        self.codec, self.serving = parts()
        self.policy = as_policy(policy) if policy is not None else RandomTokens()
        self.seed = seed
        self.kind: LogprobsKind = kind
        ends = self.codec.end_ids
        self.model = FakeModel(self.codec.vocabulary_size, seed, end_ids=ends, mean_length=mean_length)
        self.latency = latency
        self.deaf = deaf
        self.calls: list[dict[str, Any]] = []
        self.busy = 0
        self.cancelled = 0

    async def sample(self, prompt_ids: list[int], **asked: Any) -> list[Sampled]:
        self.calls.append({"prompt_ids": prompt_ids, **asked})
        self.busy += 1
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
            return [self._one(prompt_ids, index, **asked) for index in range(asked["n"])]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.busy -= 1

    async def logprobs(self, ids: list[int]) -> list[float]:
        return [math.nan, *self.model.score(ids[:1], ids[1:], Sampling(1))]

    def _one(
        self,
        prompt_ids: list[int],
        index: int,
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int | None,
        stop: list[str] | list[int] | None,
    ) -> Sampled:
        texts = tuple(each for each in stop or () if isinstance(each, str))
        stop_ids = tuple(each for each in stop or () if isinstance(each, int))
        sampling = Sampling(max_tokens, temperature, top_p, max(top_k, 0), stop=() if self.deaf else texts, seed=seed)
        call = Call(
            [prompt_ids],
            sampling,
            n=n,
            stop_ids=() if self.deaf else stop_ids,
            ignore_end=self.deaf or (stop is not None and not texts),
        )
        number = self.seed if seed is None else seed
        ask = Ask(
            call,
            prompt_ids,
            call.hashes[0],
            index,
            0,
            self.model,
            self.codec,
            self.kind,
            max_tokens,
            f"{number}/{index}",
        )
        made = finish(ask, 0, self.policy.reply(ask), [])
        return Sampled(made.ids, made.logprobs, "length" if made.finish_reason == "length" else "stop")
