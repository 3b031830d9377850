"""Losses and gradients against a plain loop: one sequence at a time, all logits, and the formula of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lachesis_train.engine import training
from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.losses import LOSSES
from lachesis_train.engine.model import LoraSpec, Model
from lachesis_train.engine.training import TrainingDatum, TrainingModel, forward_backward, optim_step
from tests.support.training_models import changed_adapter

Tensor = torch.Tensor
PLAIN: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "cross_entropy": lambda new, x: -(new * x["weights"]).sum(),
    "importance_sampling": lambda new, x: -((new - x["logprobs"]).exp() * x["advantages"]).sum(),
    "ppo": lambda new, x: (
        -torch.min(
            (new - x["logprobs"]).exp() * x["advantages"],
            (new - x["logprobs"]).exp().clamp(0.9, 1.3) * x["advantages"],
        ).sum()
    ),
    "cispo": lambda new, x: -((new - x["logprobs"]).exp().clamp(0.9, 1.3).detach() * new * x["advantages"]).sum(),
    "gspo": lambda new, x: gspo(new, x),
    "dppo": lambda new, x: dppo(new, x),
}
CONFIGS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1},
    "dppo": {"delta_low": 0.001, "delta_high": 0.002},
}


def gspo(new: Tensor, x: dict[str, Tensor]) -> Tensor:
    """GSPO-token, written with one ratio a sequence, of which the gradient of each token is taken apart."""
    trained = x["weights"] != 0
    value = (new - x["logprobs"])[trained].mean().exp().detach()
    total = torch.zeros(())
    for token, advantage in zip(new[trained], x["advantages"][trained], strict=True):
        ratio = value * (token - token.detach()).exp()
        total = total - torch.min(ratio * advantage, ratio.clamp(0.95, 1.1) * advantage)
    return total


def dppo(new: Tensor, x: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(())
    for token, sampled, advantage in zip(new, x["logprobs"], x["advantages"], strict=True):
        rise = float(token.detach().exp() - sampled.exp())
        if (advantage > 0 and rise > 0.002) or (advantage < 0 and rise < -0.001):
            continue
        total = total - (token - sampled).exp() * advantage
    return total


def batch(lengths: tuple[int, ...] = (7, 31, 12, 30), loss: str = "") -> list[TrainingDatum]:
    random = np.random.default_rng(0)
    data = []
    for length in lengths:
        tokens = random.integers(0, 256, length + 1)
        masked = np.arange(length) < 3
        inputs = {
            "target_tokens": tokens[1:].copy(),
            "weights": np.where(masked, 0, random.random(length) if loss != "gspo" else 1).astype(np.float32),
            "logprobs": (-5.6 + 0.3 * random.standard_normal(length)).astype(np.float32),
            "advantages": np.where(masked, 0, random.standard_normal(length)).astype(np.float32),
        }
        data.append(TrainingDatum(tokens[:-1], inputs))
    return data


def plain(
    model: Model, trained: TrainingModel, data: list[TrainingDatum], loss: str
) -> tuple[float, list[Tensor], list[Any]]:
    model.use(trained.adapter)
    total, logprobs = torch.zeros(()), []
    for datum in data:
        logits = model.network(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
        new = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]
        logprobs.append(new.detach().numpy())
        total = total + PLAIN[loss](new, {key: torch.from_numpy(value) for key, value in datum.inputs.items()})
    parameters = list(model.parameters(trained.adapter).values())
    return float(total.detach()), list(torch.autograd.grad(total, parameters)), logprobs


@pytest.mark.parametrize("parts", [4096, 40], ids=["one part", "many parts"])
@pytest.mark.parametrize("loss", PLAIN)
def test_a_loss_and_its_gradients_are_those_of_the_plain_formula(
    model: Model, trained: TrainingModel, loss: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MICRO_BATCH_TOKENS", parts)
    monkeypatch.setattr(training, "LOGITS_AT_ONCE", parts * 10)  # with 40: few positions at once, checkpointed
    data = batch(loss=loss)
    config = CONFIGS.get(loss, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3})
    result = forward_backward(model, trained, data, loss, config, forward_only=False)
    if loss not in ("cross_entropy", "importance_sampling"):
        assert 0 < result.metrics["clipped_tokens:sum"] < result.metrics["trained_tokens:sum"]
    wanted, gradients, logprobs = plain(model, trained, data, loss)
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    for found, one in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(found, one, atol=1e-5)
    for parameter, gradient in zip(model.parameters(trained.adapter).values(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-3)


IMPOSSIBLE = (-50.0, -100.0, -9999.0, -3e38)
"""Logprobs of the sampler with which the ratio, or the norm of the gradients, was not finite in float32."""


@pytest.mark.parametrize("impossible", IMPOSSIBLE)
@pytest.mark.parametrize("loss", [name for name in PLAIN if name != "cross_entropy"])
def test_a_step_with_a_token_that_cannot_have_been_sampled_is_that_without_it(
    model: Model, trained: TrainingModel, loss: str, impossible: float
) -> None:
    """`cispo` gives it the weight of its bound, `gspo` takes its sequence out."""
    data = batch(loss=loss)
    places = slice(0, len(data[0].tokens)) if loss == "gspo" else slice(4, 5)
    data[0].inputs["logprobs"][places] = impossible
    result = forward_backward(model, trained, data, loss, CONFIGS.get(loss, {}), forward_only=False)
    assert result.metrics["impossible_tokens:sum"] == (4 if loss == "gspo" else 1)
    parameters = list(model.parameters(trained.adapter).values())
    found = [parameter.grad.clone() for parameter in parameters]
    optim_step(model, trained, {"learning_rate": 0.0})
    if loss != "cispo":
        data[0].inputs["weights" if loss == "gspo" else "advantages"][places] = 0.0
        forward_backward(model, trained, data, loss, CONFIGS.get(loss, {}), forward_only=False)
        for parameter, gradient in zip(parameters, found, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("impossible", IMPOSSIBLE)
@pytest.mark.parametrize("loss", [name for name in PLAIN if name != "cross_entropy"])
def test_a_token_that_cannot_have_been_sampled_leaves_the_gradients_of_others_to_the_bit(
    loss: str, impossible: float
) -> None:
    def gradients(sampled: float, advantage: float) -> list[float]:
        logprobs = torch.tensor([-0.5, -1.0, -0.7, -0.2], requires_grad=True)
        inputs = {
            "logprobs": torch.tensor([-0.6, -1.1, sampled, -0.2]),
            "advantages": torch.tensor([1.0, -0.5, advantage, 0.3]),
            "weights": torch.ones(4),
            "sequences": torch.tensor([0, 0, 1, 2]),
        }
        LOSSES[loss].compute(logprobs, inputs, LOSSES[loss].settings).sum().backward()
        assert logprobs.grad is not None
        return logprobs.grad.tolist()

    for advantage in (1.0, -1.0):
        *before, one, last = gradients(impossible, advantage)
        wanted = gradients(-0.7, 0.0)
        assert [*before, last] == [*wanted[:2], wanted[3]]
        assert abs(one) <= (1.21 if loss == "cispo" else 0.0)


def family(*, masked: bool) -> list[TrainingDatum]:
    """Rollouts of two prompts: suffixes of one token, sequences that are the beginning of others, and two of a kind."""
    random = np.random.default_rng(1)
    data = []
    for prompt in (random.integers(0, 256, 20), random.integers(0, 256, 12)):
        for own in ([1], [1, 2, 3], [1, 2, 3, 4, 5, 6], [9] * 10, [9] * 10):
            tokens = np.array([*prompt, *own])
            trained = np.arange(len(tokens) - 1) >= (len(prompt) - 1 if masked else 0)
            weights = np.where(trained, random.standard_normal(len(tokens) - 1), 0).astype(np.float32)
            sampled = (-5.6 + random.standard_normal(len(tokens) - 1)).astype(np.float32)
            inputs = {"target_tokens": tokens[1:], "weights": weights, "advantages": weights, "logprobs": sampled}
            data.append(TrainingDatum(tokens[:-1], inputs))
    data[0].inputs["target_tokens"] = np.array([*data[0].inputs["target_tokens"][:4], 7, *data[0].tokens[6:], 8])
    return [data[place] for place in random.permutation(len(data))]


@pytest.mark.parametrize(
    "spec", [LoraSpec(4), LoraSpec(4, layers=1, train_unembed=False), LoraSpec(2, train_attn=False)]
)
@pytest.mark.parametrize("masked", [True, False])
def test_a_common_beginning_that_goes_through_the_model_once_changes_nothing(
    model: Model, spec: LoraSpec, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MICRO_BATCH_TOKENS", 60)
    trained = changed_adapter(model, "run:train:0", spec=spec)
    data = family(masked=masked)
    parts = list(training._micro_batches(data, "weights", 60))
    assert any(shared for _, shared in parts) == masked
    for places, shared in parts:  # what is held at once, whether or not the beginning is trained
        assert shared + sum(len(data[place].tokens) - shared for place in places) <= 60
    result = forward_backward(model, trained, data, "importance_sampling", {}, forward_only=False)
    wanted, gradients, logprobs = plain(model, trained, data, "importance_sampling")
    assert result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    scored = forward_backward(model, trained, data, "importance_sampling", {}, forward_only=True)
    for found, again, one in zip(result.logprobs, scored.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(found, one, atol=1e-5)
        np.testing.assert_allclose(again, one, atol=1e-5)
    for parameter, gradient in zip(model.parameters(trained.adapter).values(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-4 * gradient.norm()


def test_on_a_gpu_a_family_that_fits_into_a_part_goes_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MICRO_BATCH_TOKENS", 60)
    data = family(masked=True)
    parts = list(training._micro_batches(data, "weights", 4096))
    assert not any(shared for _, shared in parts)
    assert sorted(place for places, _ in parts for place in places) == list(range(len(data)))
    assert len(parts) < len(list(training._micro_batches(data, "weights", 60)))
    monkeypatch.setattr(training, "MICRO_BATCH_TOKENS", 10)  # now all are long
    assert all(shared or len(places) == 1 for places, shared in training._micro_batches(data, "weights", 4096))


def test_gradients_of_several_batches_add_up(model: Model, trained: TrainingModel) -> None:
    data = batch()
    for part in (data[:1], data[1:]):
        forward_backward(model, trained, part, "ppo", {}, forward_only=False)
    twice = [p.grad.clone() for p in model.parameters(trained.adapter).values()]
    trained.optimizer.zero_grad()
    forward_backward(model, trained, data, "ppo", {}, forward_only=False)
    for parameter, gradient in zip(model.parameters(trained.adapter).values(), twice, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


def test_a_batch_that_fails_in_the_middle_leaves_the_gradients_as_they_were(
    model: Model, trained: TrainingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "MICRO_BATCH_TOKENS", 31)
    forward_backward(model, trained, batch((5,)), "importance_sampling", {}, forward_only=False)
    before = [p.grad.clone() for p in model.parameters(trained.adapter).values()]
    broken = batch((31, 9))
    broken[1].inputs["advantages"][:] = 3e38  # their sum is not finite, in the second part
    with pytest.raises(RequestError, match="the loss is"):
        forward_backward(model, trained, broken, "importance_sampling", {}, forward_only=False)
    for parameter, gradient in zip(model.parameters(trained.adapter).values(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_forward_only_needs_targets_only_and_leaves_no_gradient(model: Model, trained: TrainingModel) -> None:
    data = [TrainingDatum(datum.tokens, {"target_tokens": datum.inputs["target_tokens"]}) for datum in batch()]
    result = forward_backward(model, trained, data, "cross_entropy", {}, forward_only=True)
    assert [len(one) for one in result.logprobs] == [len(datum.tokens) for datum in data]
    assert all(p.grad is None for p in model.parameters(trained.adapter).values())
    with pytest.raises(RequestError, match="there are no gradients"):
        optim_step(model, trained, {})


def test_an_optimizer_step_clips_and_reports(model: Model, trained: TrainingModel) -> None:
    forward_backward(model, trained, batch(), "cross_entropy", {}, forward_only=False)
    parameters = list(model.parameters(trained.adapter).values())
    norm = float(torch.stack([p.grad.norm() for p in parameters]).norm())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad * (0.5 / norm)
    torch.optim.AdamW(copies, lr=1e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1).step()
    given = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    metrics = optim_step(model, trained, given)
    assert metrics == {"grad_norm": pytest.approx(norm, rel=1e-4), "clipped": 1.0, "learning_rate": 1e-2, "step": 1.0}
    for copy, parameter in zip(copies, parameters, strict=True):
        torch.testing.assert_close(copy, parameter, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.inputs.pop("advantages"), "no 'advantages'"),
        (lambda d: d.inputs.update(advantages=d.inputs["advantages"][:-1]), "has the shape"),
        (lambda d: d.inputs["advantages"].fill(np.nan), "not finite"),
        (lambda d: d.inputs["target_tokens"].fill(5000), "ids from 5000 to 5000"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused_by_name(
    model: Model, trained: TrainingModel, change: Callable[[TrainingDatum], Any], message: str
) -> None:
    data = batch()
    change(data[2])
    with pytest.raises(RequestError, match=f"datum 2.*{message}"):
        forward_backward(model, trained, data, "ppo", {}, forward_only=False)


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("dro", {}, "loss_fn 'dro'"),
        ("dppo", {"clip_low_threshold": 0.8}, "key 'clip_low_threshold' is unknown to loss 'dppo', .* delta_low"),
        ("cispo", {"clip_low": 1.0}, "key 'clip_low' is unknown"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold 2.0 is above"),
    ],
)
def test_a_loss_that_the_engine_lacks_is_refused_by_name(
    model: Model, trained: TrainingModel, loss: str, config: dict[str, float], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        forward_backward(model, trained, batch(), loss, config, forward_only=False)
