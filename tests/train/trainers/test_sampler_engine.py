"""Completions of a trainer's own sampler are checked like those of any server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from lachesis_client.errors import BadResponse
from lachesis_client.sampling import Sampling
from lachesis_train.trainers.sampler_engine import TokenRoom, TrainerCompletion, TrainerSamplerEngine
from tests.support.sampler import parts


async def sampled(ids: Sequence[Any], logprobs: Sequence[float] | None) -> Sequence[float]:
    async def sample(prompt: list[int], session: str, most: int, temperature: float) -> TrainerCompletion:
        return TrainerCompletion(ids, logprobs, "stop", ["1"])

    engine = TrainerSamplerEngine(
        sample,
        tokenizer=parts()[0].tokenizer,
        url="test://sampler",
        logprobs="raw",
        room=TokenRoom("test://sampler", "limit"),
        time_limit=10.0,
    )
    (found,) = await engine.generate([1, 2], Sampling(8))
    return found.logprobs


async def test_a_probability_that_was_rounded_above_one_is_one() -> None:
    assert list(await sampled([4, 5], [-0.5, 1e-7])) == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        ([4, 5], [-0.5, 0.3], "the logprob of sampled token 1 is 0.3"),
        ([4], [math.nan], "the logprob of sampled token 0 is nan"),
        ([4], [-9999.0], "the logprob of sampled token 0 is -9999.0"),
        ([4, 5], [-0.5], "2 token ids, but 1 logprobs"),
        ([4], None, "no token ids or no logprobs"),
        ([4, 0.5], [-0.5, -0.5], "0.5 is not a token id"),
    ],
)
async def test_what_no_sampled_token_has_is_refused(
    ids: Sequence[Any], logprobs: Sequence[float] | None, said: str
) -> None:
    with pytest.raises(BadResponse, match=said):
        await sampled(ids, logprobs)
