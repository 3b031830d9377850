"""vLLM with `--logprobs-mode processed_logprobs`: any temperature can be trained on, the other filters still cannot."""

from __future__ import annotations

import pytest
from real_vllm import ROUNDING, RealVLLM, difference, forward_pass

from lachesis_client.errors import RequestRejected
from lachesis_client.sampling import Sampling
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_tokens.engines import create_engine


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.4])
async def test_logprobs_are_of_the_logits_divided_by_the_temperature(
    temperature: float, processed: RealVLLM, prompts: list[list[int]]
) -> None:
    engine = create_engine("vllm", processed.settings(logprobs_mode="processed"))
    sampling = Sampling(max_tokens=40, temperature=temperature)
    generations = await engine.generate(prompts[0], sampling, n=3)
    await engine.close()
    computed = forward_pass([(prompts[0], generation.ids) for generation in generations], temperature=temperature)
    gap = difference([generation.logprobs for generation in generations], computed)
    print(f"processed, temperature {temperature:g}: {gap}")
    assert gap.largest < ROUNDING
    assert sampling_problem(sampling.record(engine.logprobs)) is None


async def test_top_p_is_another_distribution(processed: RealVLLM, prompts: list[list[int]]) -> None:
    engine = create_engine("vllm", processed.settings(logprobs_mode="processed"))
    sampling = Sampling(max_tokens=40, top_p=0.5, seed=1)
    generation = (await engine.generate(prompts[2], sampling))[0]
    await engine.close()
    assert difference([generation.logprobs], forward_pass([(prompts[2], generation.ids)])).mean > 0.02
    assert "top_p" in (sampling_problem(sampling.record(engine.logprobs)) or "")


async def test_generate_names_the_flag_that_it_needs(processed: RealVLLM, prompts: list[list[int]]) -> None:
    engine = create_engine("vllm-generate", processed.settings(logprobs_mode="processed"))
    with pytest.raises(RequestRejected, match="--enable-scale-out"):
        await engine.generate(prompts[0], Sampling(max_tokens=1))
    await engine.close()
