"""`gspo` and `dppo` against formulas of numpy in float64: values, and gradients by differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lachesis_train.engine.losses import LOSSES

Array = NDArray[np.float64]
LENGTHS = (3, 1, 9, 6)
LOW, HIGH, DELTA_LOW, DELTA_HIGH = 0.97, 1.05, 0.05, 0.1


def data(seed: int) -> tuple[Array, Array, Array, Array]:
    """Logprobs of the trainer and of the sampler, one advantage a sequence, and which tokens are trained."""
    random = np.random.default_rng(seed)
    count = sum(LENGTHS)
    sampled = np.log(random.uniform(0.05, 0.95, count))
    new = np.minimum(sampled + 0.2 * random.standard_normal(count), -0.01)
    advantages = np.repeat(random.standard_normal(len(LENGTHS)), LENGTHS)
    trained = random.random(count) < 0.7
    trained[[0, 3, 4, 13]] = True  # at least one of each sequence
    return new, sampled, advantages, trained


def gspo(new: Array, sampled: Array, advantages: Array, trained: Array) -> float:
    """GSPO, arXiv 2507.18071: one ratio and one advantage a sequence."""
    total, start = 0.0, 0
    for length in LENGTHS:
        part = slice(start, start + length)
        ratio = np.exp((new - sampled)[part][trained[part]].mean())
        total -= min(ratio * advantages[start], min(max(ratio, LOW), HIGH) * advantages[start])
        start += length
    return total


def dppo(new: Array, sampled: Array, advantages: Array, trained: Array) -> float:
    """DPPO, arXiv 2602.04879, with the mask of equation 13."""
    total = 0.0
    for p, q, advantage in zip(np.exp(new[trained]), np.exp(sampled[trained]), advantages[trained], strict=True):
        if not ((advantage > 0 and p - q > DELTA_HIGH) or (advantage < 0 and q - p > DELTA_LOW)):
            total -= p / q * advantage
    return total


def gradient(of: Callable[..., float], new: Array, *rest: Array, step: float = 1e-6) -> Array:
    ends = [[of(new + sign * step * unit, *rest) for sign in (1, -1)] for unit in np.eye(len(new))]
    return np.array([(up - down) / (2 * step) for up, down in ends])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["gspo", "dppo"])
def test_value_and_gradient_are_those_of_the_paper_in_float64(name: str, seed: int) -> None:
    new, sampled, advantages, trained = data(seed)
    formula = {"gspo": gspo, "dppo": dppo}[name]
    counts = np.repeat([part.sum() for part in np.split(trained, np.cumsum(LENGTHS)[:-1])], LENGTHS)
    scaled = np.where(trained, advantages / counts if name == "gspo" else advantages, 0.0)
    inputs = {
        "logprobs": torch.from_numpy(np.where(trained, sampled, 0.0)),  # as the trainer sends those it has none of
        "advantages": torch.from_numpy(scaled),
        "weights": torch.from_numpy(trained.astype(np.float64)),
        "sequences": torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
    }
    settings = {
        "gspo": {"clip_low_threshold": LOW, "clip_high_threshold": HIGH},
        "dppo": {"delta_low": DELTA_LOW, "delta_high": DELTA_HIGH},
    }[name]
    logprobs = torch.from_numpy(new).requires_grad_()
    loss = LOSSES[name].compute(logprobs, inputs, settings).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(formula(new, sampled, advantages, trained), abs=1e-9)
    assert logprobs.grad is not None
    wanted = gradient(formula, new, sampled, advantages, trained)
    np.testing.assert_allclose(logprobs.grad.numpy(), wanted, atol=1e-7)


def test_a_sequence_whose_ratio_is_beyond_the_bounds_is_clipped_as_a_whole() -> None:
    """Single tokens of the first are far beyond the bounds, their mean is not; of the second all are a little."""
    logs = torch.tensor([0.5, -0.5, 0.1, 0.1])
    inputs = {
        "logprobs": torch.zeros(4),
        "advantages": torch.ones(4),
        "weights": torch.ones(4),
        "sequences": torch.tensor([0, 0, 1, 1]),
    }
    bounds = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}
    logprobs = logs.clone().requires_grad_()
    LOSSES["gspo"].compute(logprobs, inputs, bounds).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, -1.0, 0.0, 0.0]
    clipped = LOSSES["gspo"].clipped
    assert clipped is not None
    assert clipped(logs, inputs, bounds).tolist() == [False, False, True, True]
