"""Several environments in one run: a loss of each in the same step, and a trainer that is killed between its steps."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from lachesis_train.tinker_sdk import Adam, Datum, LoraShape, LossPart, Service, Training
from tests.train.torch.trainer.conftest import RunningEngine

ADAM = Adam(learning_rate=0.01)
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def batch(count: int = 6) -> list[Datum]:
    draw = random.Random(7)
    found = []
    for _ in range(count):
        ids = [draw.randrange(3, 250) for _ in range(draw.randrange(5, 12))]
        inputs = {
            "logprobs": np.asarray([draw.uniform(-7, -4) for _ in ids[1:]], np.float32),
            "advantages": np.asarray([draw.uniform(-1, 1) for _ in ids[1:]], np.float32),
        }
        found.append(Datum(ids[:-1], ids[1:], inputs))
    return found


async def trained(engine: RunningEngine, data: list[Datum], parts: list[LossPart]) -> tuple[dict[str, Any], Any]:
    """The weights after two steps, and what the first one answered."""
    service = await asyncio.to_thread(Service, engine.url, "tml-local")
    training: Training = await service.train("tiny", LoraShape(rank=4, seed=3))
    answer = await training.step_in_parts(data, parts, ADAM)
    await training.step_in_parts(data, parts, ADAM)
    return engine.tensors(await training.save_sampler("parts")), answer


async def test_two_parts_with_the_same_loss_are_one(engine: RunningEngine) -> None:
    import torch

    data = batch()
    whole, of_whole = await trained(engine, data, [LossPart(range(6), "ppo", CLIP)])
    halves = [LossPart([4, 1, 0], "ppo", CLIP), LossPart([2, 5, 3], "ppo", CLIP)]
    divided, of_parts = await trained(engine, data, halves)
    for name, tensor in whole.items():
        torch.testing.assert_close(divided[name], tensor, rtol=0, atol=1e-5)
    for one, other in zip(of_whole.logprobs, of_parts.logprobs, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)
    assert of_whole.metrics["loss:sum"] == pytest.approx(of_parts.metrics["loss:sum"], abs=1e-5)
    assert of_whole.metrics["grad_norm"] == pytest.approx(of_parts.metrics["grad_norm"], rel=1e-5)


async def test_each_part_has_its_own_loss_and_one_step_has_the_sum_of_their_gradients(engine: RunningEngine) -> None:
    data = batch()
    mixed = [LossPart([0, 3, 5], "importance_sampling"), LossPart([1, 2, 4], "ppo", CLIP)]
    _, answer = await trained(engine, data, mixed)
    lost = 0.0
    for at, datum in enumerate(data):
        advantages = np.asarray(datum.inputs["advantages"], np.float64)
        ratio = np.exp(np.asarray(answer.logprobs[at], np.float64) - np.asarray(datum.inputs["logprobs"], np.float64))
        won = ratio * advantages
        if at in (1, 2, 4):
            won = np.minimum(won, np.clip(ratio, 0.9, 1.1) * advantages)
        lost -= won.sum()
    assert answer.metrics["loss:sum"] == pytest.approx(lost, rel=1e-5)
