"""A teacher's logprobs over the wire."""

from __future__ import annotations

import math
from typing import Any

import pytest
from serving import serving

from lachesis_testing.fake_server import letter_swapped
from lachesis_tokens.prompts.tokenizer_proof import TokenizersDiffer
from lachesis_train.policy import Sampled
from lachesis_train.tinker_sdk import TrainingEngineError
from lachesis_train.trainer.teacher import Teacher
from tests.support.ports import free_port
from tests.support.sampler import parts


class Scorer:
    """A policy that finds each token as likely as its id says."""

    async def sample(self, prompt_ids: list[int], *, n: int, **_: Any) -> list[Sampled]:
        return [Sampled([5], [-1.0], "length")] * n

    async def logprobs(self, ids: list[int]) -> list[float]:
        return [math.nan, *(-token / 7 for token in ids[1:])]


async def test_a_teacher_scores_every_token_but_the_first() -> None:
    codec, _ = parts()
    async with serving(sampler=Scorer()) as running:
        teacher = Teacher(running.server.base_url, "policy", codec.tokenizer)
        found = await teacher.logprobs([[1, 2, 30], [4, 5]])
        await teacher.close()
    assert [ids[1:] for ids in found] == [pytest.approx([-2 / 7, -30 / 7]), pytest.approx([-5 / 7])]
    assert all(math.isnan(ids[0]) for ids in found)


async def test_the_tokens_of_a_teacher_must_be_those_of_the_policy() -> None:
    async with serving(sampler=Scorer()) as running:
        teacher = Teacher(running.server.base_url, "policy", letter_swapped(parts()[0].tokenizer))
        with pytest.raises(TokenizersDiffer):
            await teacher.logprobs([[1, 2]])
        await teacher.close()


async def test_a_teacher_that_is_away_fails_the_step_and_not_the_run() -> None:
    codec, _ = parts()
    teacher = Teacher(f"http://127.0.0.1:{free_port()}/v1", "policy", codec.tokenizer, max_retries=0)
    with pytest.raises(TrainingEngineError, match="ask the teacher policy at http") as failed:
        await teacher.logprobs([[1, 2]])
    assert not failed.value.final
    await teacher.close()
