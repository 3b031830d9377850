"""A teacher's logprobs over the wire."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from serving import serving

from lachesis_client.errors import RequestRejected
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


@asynccontextmanager
async def speaking(
    logprobs: Callable[[list[int]], Any], said: list[str], status: int = 200, choices: int = 1
) -> AsyncIterator[Teacher]:
    """A teacher that knows one route, which takes ids only."""

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        if status != 200 or isinstance(body["prompt"], str):
            return web.json_response({"error": {"message": "not this"}}, status=max(status, 400))
        choice = {"index": 0, "text": "a", "finish_reason": "length", "prompt_logprobs": logprobs(body["prompt"])}
        return web.json_response({"choices": [choice] * choices, "usage": {"prompt_tokens": len(body["prompt"])}})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    tokenizer = parts()[0].tokenizer
    teacher = Teacher(f"http://127.0.0.1:{port}/v1", "policy", tokenizer, say=said.append, max_retries=0)
    try:
        yield teacher
    finally:
        await teacher.close()
        await runner.cleanup()


async def test_a_teacher_that_does_not_say_how_it_splits_text_is_named_once() -> None:
    said: list[str] = []
    async with speaking(lambda ids: [None, *({str(token): {"logprob": -1.5}} for token in ids[1:])], said) as teacher:
        for _ in range(3):
            assert (await teacher.logprobs([[1, 2, 30]]))[0][1:] == [-1.5, -1.5]
    assert len(said) == 1 and "another tokenizer would go unnoticed" in said[0]


async def test_the_tokenizers_are_compared_once() -> None:
    codec, _ = parts()
    async with serving(sampler=Scorer()) as running:
        teacher, asked = Teacher(running.server.base_url, "policy", codec.tokenizer), []
        tokenize = teacher._engine.tokenize

        async def counted(text: str) -> list[int] | None:
            asked.append(text)
            return await tokenize(text)

        teacher._engine.tokenize = counted  # type: ignore[method-assign]
        await teacher.logprobs([[1, 2]])
        first = len(asked)
        await teacher.logprobs([[1, 2]])
        await teacher.close()
    assert len(asked) == first > 0


async def test_a_token_without_a_logprob_fails_the_step() -> None:
    async with speaking(lambda ids: [None, None, *({str(token): {"logprob": -1.0}} for token in ids[2:])], []) as one:
        with pytest.raises(TrainingEngineError, match="some missing"):
            await one.logprobs([[1, 2, 3]])


@pytest.mark.parametrize("value", [0.5, True, "-1.0"])
async def test_what_is_no_logprob_fails_the_step(value: Any) -> None:
    async with speaking(lambda ids: [None, *({str(token): {"logprob": value}} for token in ids[1:])], []) as teacher:
        with pytest.raises(TrainingEngineError, match="is no logprob"):
            await teacher.logprobs([[1, 2, 3]])


async def test_an_answer_without_choices_fails_the_step() -> None:
    async with speaking(lambda _: None, [], choices=0) as teacher:
        with pytest.raises(TrainingEngineError, match="were requested and none came"):
            await teacher.logprobs([[1, 2, 3]])


async def test_a_teacher_that_refuses_a_sequence_ends_the_run_at_once() -> None:
    async with speaking(lambda _: None, [], status=400) as teacher:
        with pytest.raises(RequestRejected, match="not this"):
            await teacher.logprobs([[1, 2, 3]])
