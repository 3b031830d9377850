"""A batch samples what its requests would get alone, and its logprobs are those that the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lachesis_train.engine import sampling
from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.model import Model
from lachesis_train.engine.sampling import SamplingBatch, SamplingParameters, SamplingTask, check_request
from lachesis_train.engine.training import TrainingDatum, TrainingModel, forward_backward
from lachesis_train.engine.wire import sample_request

PROMPTS: list[list[int]] = [[65] * 3, [66, 67, 68, 69, 70, 71, 72], list(range(40)), [200]]


def request(prompt: Sequence[int], count: int = 1, **parameters: Any) -> SamplingTask:
    wanted = {"max_tokens": 12, "seed": 5, **parameters}
    return SamplingTask(list(prompt), count, SamplingParameters(**wanted), lambda _: None, prompt_logprobs=len(prompt))


def play(model: Model, *arrivals: Sequence[SamplingTask]) -> None:
    """Requests that arrive one group after another, two tokens apart."""
    batch = SamplingBatch(model)
    for group in arrivals:
        batch.add(group)
        batch.step()
        batch.step()
    while batch.rows:
        batch.step()


def assert_same(one: SamplingTask, other: SamplingTask) -> None:
    assert [sequence.tokens for sequence in one.sequences] == [sequence.tokens for sequence in other.sequences]
    for ours, theirs in zip(one.sequences, other.sequences, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    np.testing.assert_allclose(one.found_prompt, other.found_prompt, atol=1e-5)


def test_a_batch_equals_its_requests_one_by_one(model: Model, trained: TrainingModel) -> None:
    model.use(trained.adapter)
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.7, "max_tokens": 3}, {"top_p": 0.5}, {"top_k": 4}]
    together = [request(prompt, 3, **one) for prompt, one in zip(PROMPTS, settings, strict=True)]
    apart = [request(prompt, 3, **one) for prompt, one in zip(PROMPTS, settings, strict=True)]
    play(model, together[:1], together[1:3], together[3:])
    for one in apart:
        play(model, [one])
    for one, other in zip(together, apart, strict=True):
        assert_same(one, other)


def test_sampled_logprobs_are_those_of_the_trainer(model: Model, trained: TrainingModel) -> None:
    model.use(trained.adapter)
    requests = [request(prompt, 4, max_tokens=30, temperature=1.3) for prompt in PROMPTS]
    play(model, requests[:2], requests[2:])
    for one in requests:
        for sequence in one.sequences:
            tokens = np.array([*one.prompt, *sequence.tokens])
            datum = TrainingDatum(tokens[:-1], {"target_tokens": tokens[1:]})
            result = forward_backward(model, trained, [datum], "cross_entropy", {}, forward_only=True)
            np.testing.assert_allclose(result.logprobs[0], [*one.found_prompt, *sequence.logprobs], atol=1e-5)


def logprobs_of_both(model: Model, trained: TrainingModel) -> dict[str, np.ndarray]:
    """Logprobs of sampled tokens by the sampler, by the trainer, and by a plain forward pass of each sequence alone."""
    model.use(trained.adapter)
    requests = [request(prompt, 4, max_tokens=30, temperature=1.3) for prompt in PROMPTS]
    play(model, requests[:2], requests[2:])
    sampled = [(one.prompt, sequence) for one in requests for sequence in one.sequences]
    wholes = [torch.tensor([*prompt, *sequence.tokens]) for prompt, sequence in sampled]
    data = []
    for (prompt, _), whole in zip(sampled, wholes, strict=True):
        own = (torch.arange(1, len(whole)) >= len(prompt)).float().numpy()
        data.append(TrainingDatum(whole[:-1].numpy(), {"target_tokens": whole[1:].numpy(), "weights": own}))
    trainer = forward_backward(model, trained, data, "cross_entropy", {}, forward_only=False).logprobs
    plain = []
    with torch.no_grad():
        for whole in wholes:
            every = model.network(whole[None]).logits[0, :-1].log_softmax(-1)
            plain.append(every.gather(1, whole[1:, None])[:, 0].numpy())
    starts = [len(prompt) - 1 for prompt, _ in sampled]
    return {
        "sampler": np.concatenate([sequence.logprobs for _, sequence in sampled]),
        "trainer": np.concatenate([one[start:] for one, start in zip(trainer, starts, strict=True)]),
        "plain": np.concatenate([one[start:] for one, start in zip(plain, starts, strict=True)]),
    }


def test_where_sampler_and_trainer_differ_it_is_float32(
    model: Model, trained: TrainingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights as large as a high learning rate makes them: float32 is off by more than 1e-5, in a plain pass too."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for key, parameter in model.parameters(trained.adapter).items():
        if "lora_B" in key:
            parameter.data *= 30
    single = logprobs_of_both(model, trained)
    assert np.abs(single["sampler"] - single["trainer"]).max() > 1e-5
    assert np.abs(single["sampler"] - single["plain"]).max() > 1e-5

    def forward(self: Qwen3RMSNorm, hidden: torch.Tensor) -> torch.Tensor:  # the real one computes in float32
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)
    model.network.double()
    exact = logprobs_of_both(model, trained)
    np.testing.assert_allclose(exact["sampler"], exact["plain"], atol=1e-10)
    np.testing.assert_allclose(exact["trainer"], exact["plain"], atol=1e-10)


def test_the_samples_of_a_request_differ_and_a_seed_repeats_them(model: Model) -> None:
    first, again, other = request(PROMPTS[0], 4), request(PROMPTS[0], 4), request(PROMPTS[0], 4, seed=6)
    play(model, [first, again, other])
    assert_same(first, again)
    assert len({tuple(sequence.tokens) for sequence in (*first.sequences, *other.sequences)}) == 8


def test_without_a_seed_samples_differ_each_time(model: Model) -> None:
    first, second = request(PROMPTS[0], seed=None), request(PROMPTS[0], seed=None)
    play(model, [first, second])
    assert first.sequences[0].tokens != second.sequences[0].tokens


def test_temperature_0_and_top_k_1_take_the_most_likely_token(model: Model) -> None:
    cold, narrow, hot = request(PROMPTS[1], temperature=0.0), request(PROMPTS[1], top_k=1), request(PROMPTS[1])
    play(model, [cold, narrow, hot])
    assert cold.sequences[0].tokens == narrow.sequences[0].tokens != hot.sequences[0].tokens
    logits = model.network(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1]
    assert cold.sequences[0].tokens[0] == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e-38, 1e-50])
def test_a_tiny_temperature_takes_the_most_likely_token(model: Model, temperature: float) -> None:
    tiny, cold = request(PROMPTS[1], temperature=temperature), request(PROMPTS[1], temperature=0.0)
    play(model, [tiny, cold])
    assert_same(tiny, cold)


def test_weights_that_diverged_sample_nothing(model: Model, trained: TrainingModel) -> None:
    for parameter in model.parameters(trained.adapter).values():
        parameter.data.fill_(1e30)
    model.use(trained.adapter)
    with pytest.raises(RequestError, match="the weights have diverged"):
        play(model, [request(PROMPTS[1])])


def test_tokens_are_drawn_with_their_probabilities() -> None:
    probabilities = torch.zeros(1, 700)
    probabilities[0, [0, 2, 300, 699]] = torch.tensor([0.1, 0.4, 0.3, 0.2])
    chance = torch.arange(0, 1, 1e-3, dtype=torch.float64) + 5e-4
    drawn = sampling._inverse(probabilities.expand(1000, -1), chance)
    assert torch.bincount(drawn, minlength=700)[[0, 2, 300, 699]].tolist() == [100, 400, 300, 200]
    highest = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert sampling._inverse(probabilities[:, :600], highest).tolist() == [300]  # never a token of probability 0


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    for top_p, kept in ((0.5, [1]), (0.51, [1, 3]), (0.9, [1, 2, 3]), (0.91, [0, 1, 2, 3])):
        found = sampling._truncated(probabilities, SamplingParameters(1, top_p=top_p))
        assert found.nonzero()[:, 0].tolist() == kept


def wired(model: Model, stop: Any, **parameters: Any) -> SamplingTask:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [65, 66]}]},
        "sampling_params": {"max_tokens": 6, "temperature": 0.0, "stop": stop, **parameters},
    }
    return sample_request(model, body, lambda _: None)


def forced(model: Model, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make the model say a text."""
    ids = model.tokenizer(text).input_ids
    drawn = iter(ids)

    def sample(logits: torch.Tensor, logprobs: torch.Tensor, rows: Any) -> torch.Tensor:
        return torch.tensor([next(drawn)] * len(rows))

    monkeypatch.setattr(sampling, "_sample", sample)


@pytest.mark.parametrize(
    ("stop", "text", "length", "stopped"),
    [
        (None, "ab<|im_end|>cdefg", 3, True),
        ([], "ab<|im_end|>cdefg", 6, False),
        (["cd"], "abcdefgh", 4, True),
        ("é", "aéb<|im_end|>fgh", 3, True),
        (["zz"], "ab<|im_end|>cdefg", 3, True),
        ([99], "abcdefgh", 3, True),
        (["zz"], "abcdefgh", 6, False),
    ],
)
def test_stop_none_is_the_end_of_the_turn_and_an_empty_list_is_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch, stop: Any, text: str, length: int, stopped: bool
) -> None:
    one = wired(model, stop)
    forced(model, monkeypatch, text)
    play(model, [one])
    assert (len(one.sequences[0].tokens), one.sequences[0].stopped) == (length, stopped)
    assert len(one.sequences[0].logprobs) == length


def test_without_max_tokens_the_context_is_the_limit(model: Model) -> None:
    assert wired(model, None, max_tokens=None).parameters.max_tokens == model.context_length - 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request([]), "the prompt is empty"),
        (request([5000]), "ids from 5000 to 5000"),
        (request([1] * 5000), "5000 tokens of prompt and max_tokens 12 exceed the context of the model, 4096"),
        (request([1], max_tokens=0), "max_tokens is 0"),
        (request([1], temperature=-1.0), "temperature is -1.0"),
        (request([1], top_p=0.0), "top_p is 0.0"),
        (request([1], count=0), "num_samples is 0"),
        (SamplingTask([1], 1, SamplingParameters(1), print, topk=-1), "topk_sample_logprobs"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(model: Model, wrong: SamplingTask, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_request(model, wrong)


def test_a_cancelled_request_leaves_the_batch(model: Model) -> None:
    stays, leaves = request(PROMPTS[0]), request(PROMPTS[2], 3)
    batch = SamplingBatch(model)
    batch.add([stays, leaves])
    leaves.cancelled = True
    batch.step()
    assert len(batch.rows) == 1
    assert batch._mask.shape[1] < 10  # and the padding that it needed
    while batch.rows:
        batch.step()
    alone = request(PROMPTS[0])
    play(model, [alone])
    assert_same(stays, alone)
