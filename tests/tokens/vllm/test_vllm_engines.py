"""The two vLLM engines against a real vLLM: whose tokens are they, whose logprobs, and what are its refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from real_vllm import CONTEXT, END_OF_TURN, FOLDER, ROUNDING, RealVLLM, difference, forward_pass

from lachesis_client.errors import ContextExhausted, RequestRejected
from lachesis_client.sampling import Sampling
from lachesis_messages.messages import FinishReason
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_tokens.engines import TokenEngine, create_engine


@pytest.fixture(params=["vllm", "vllm-generate"])
async def engine(raw: RealVLLM, request: pytest.FixtureRequest) -> AsyncIterator[TokenEngine]:
    opened = create_engine(request.param, raw.settings())
    yield opened
    await opened.close()


async def test_logprobs_are_those_of_a_forward_pass(engine: TokenEngine, prompts: list[list[int]]) -> None:
    found = await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=60), n=3) for prompt in prompts))
    pairs = [(prompt, generation) for prompt, generated in zip(prompts, found, strict=True) for generation in generated]
    assert any(generation.ids[-1] == END_OF_TURN for _, generation in pairs), (
        "no turn ended, so its end is not compared"
    )
    gap = difference([g.logprobs for _, g in pairs], forward_pass([(prompt, g.ids) for prompt, g in pairs]))
    print(f"{engine.kind}: {gap}")
    assert gap.largest < ROUNDING


async def test_a_second_turn_from_the_prefix_cache_has_them_too(engine: TokenEngine, prompts: list[list[int]]) -> None:
    first = (await engine.generate(prompts[0], Sampling(max_tokens=40, seed=5)))[0]
    end = [] if first.ids[-1] == END_OF_TURN else [END_OF_TURN]
    longer = [*prompts[0], *first.ids, *end, *prompts[1]]
    second = (await engine.generate(longer, Sampling(max_tokens=40, seed=5)))[0]
    gap = difference([second.logprobs], forward_pass([(longer, second.ids)]))
    assert gap.largest < ROUNDING


async def test_a_temperature_leaves_raw_logprobs_raw(engine: TokenEngine, prompts: list[list[int]]) -> None:
    sampling = Sampling(max_tokens=40, temperature=0.5, seed=3)
    generation = (await engine.generate(prompts[1], sampling))[0]
    sample = [(prompts[1], generation.ids)]
    assert difference([generation.logprobs], forward_pass(sample)).largest < ROUNDING
    assert difference([generation.logprobs], forward_pass(sample, temperature=0.5)).mean > 0.02
    assert "temperature 1" in (sampling_problem(sampling.record(engine.logprobs)) or "")


async def test_penalties_and_top_p_leave_raw_logprobs_raw(engine: TokenEngine, prompts: list[list[int]]) -> None:
    sampling = Sampling(max_tokens=40, top_p=0.5, repetition_penalty=1.2, seed=3)
    generation = (await engine.generate(prompts[2], sampling))[0]
    assert difference([generation.logprobs], forward_pass([(prompts[2], generation.ids)])).largest < ROUNDING
    assert sampling_problem(sampling.record(engine.logprobs))


async def test_the_end_of_turn_is_a_sampled_token(engine: TokenEngine, prompts: list[list[int]]) -> None:
    sampling = Sampling(max_tokens=120, temperature=0.0)
    found = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    ended = [
        (prompt, generation)
        for prompt, generated in zip(prompts, found, strict=True)
        for generation in generated
        if generation.finish_reason is FinishReason.STOP
    ]
    assert ended, "no greedy answer ended its turn"
    for _, generation in ended:
        assert list(generation.ids).index(END_OF_TURN) == len(generation.ids) - 1
    computed = forward_pass([(prompt, generation.ids) for prompt, generation in ended])
    ends = [[logprobs[-1]] for logprobs in computed]
    assert difference([[generation.logprobs[-1]] for _, generation in ended], ends).largest < ROUNDING


async def test_a_stop_string_keeps_every_token_of_it(
    engine: TokenEngine, prompts: list[list[int]], tokenizer: Any
) -> None:
    whole = (await engine.generate(prompts[4], Sampling(max_tokens=60, temperature=0.0)))[0]
    text = tokenizer.decode(whole.ids)
    stop = text[10:13]  # somewhere, most likely across tokens
    sampling = Sampling(max_tokens=60, temperature=0.0, stop=(stop,))
    cut = (await engine.generate(prompts[4], sampling))[0]
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.ids) == len(cut.logprobs) < len(whole.ids)
    assert list(cut.ids) == list(whole.ids)[: len(cut.ids)]
    assert stop in tokenizer.decode(cut.ids)
    assert stop not in tokenizer.decode(cut.ids[:-1])


async def test_max_tokens(engine: TokenEngine, prompts: list[list[int]]) -> None:
    generation = (await engine.generate(prompts[1], Sampling(max_tokens=1, seed=1)))[0]
    assert len(generation.ids) == 1
    assert generation.finish_reason is FinishReason.LENGTH


async def test_a_nearly_full_context_gets_what_fits(engine: TokenEngine) -> None:
    sampling = Sampling(max_tokens=500, extra={"ignore_eos": True})
    generation = (await engine.generate([28] * (CONTEXT - 10), sampling))[0]
    assert generation.finish_reason is FinishReason.LENGTH
    assert len(generation.ids) == 10


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, CONTEXT + 1000])
async def test_a_full_context_is_the_rollouts_own_end(engine: TokenEngine, length: int) -> None:
    with pytest.raises(ContextExhausted):
        await engine.generate([28] * length, Sampling(max_tokens=5))


async def test_a_seed_repeats(engine: TokenEngine, prompts: list[list[int]]) -> None:
    first, again, other = [
        (await engine.generate(prompts[3], Sampling(max_tokens=30, seed=seed)))[0] for seed in (7, 7, 8)
    ]
    assert list(first.ids) == list(again.ids)
    assert list(first.ids) != list(other.ids)


async def test_cancelling_a_call_ends_the_sampling(
    engine: TokenEngine, raw: RealVLLM, prompts: list[list[int]]
) -> None:
    before = await raw.counter("vllm:generation_tokens_total")
    sampling = Sampling(max_tokens=1900, extra={"ignore_eos": True})
    task = asyncio.create_task(engine.generate(prompts[0], sampling))
    while await raw.counter("vllm:num_requests_running") == 0:
        assert not task.done()
        await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while await raw.counter("vllm:num_requests_running") > 0:  # noqa: ASYNC110  # another process has no event for us
        await asyncio.sleep(0.1)
    assert await raw.counter("vllm:generation_tokens_total") - before < 1000


async def test_check_samples_nothing(engine: TokenEngine, raw: RealVLLM) -> None:
    before = await raw.counter("vllm:generation_tokens_total"), await raw.counter("vllm:prompt_tokens_total")
    assert await engine.check() == [FOLDER.name]
    assert (await raw.counter("vllm:generation_tokens_total"), await raw.counter("vllm:prompt_tokens_total")) == before


@pytest.mark.parametrize("kind", ["vllm", "vllm-generate"])
async def test_an_unknown_model_is_rejected(kind: str, raw: RealVLLM, prompts: list[list[int]]) -> None:
    engine = create_engine(kind, raw.settings(model_name="nobody"))
    with pytest.raises(RequestRejected, match="nobody"):
        await engine.generate(prompts[0], Sampling(max_tokens=1))
    await engine.close()
