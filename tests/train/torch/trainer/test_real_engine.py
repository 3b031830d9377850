"""What reaches a real engine is what the group says, and the run survives the death of its engine."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lachesis_messages.records.jsonl import read_lines
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.samples.group_shapes import GroupSettings, RolloutSamples, TrainingGroup, build_group
from lachesis_tokens.samples.samples import samples
from lachesis_train.tinker_sdk import Adam, LoraShape, RefusedBounds, Service, TrainingEngineError
from lachesis_train.trainer.checkpoints import Checkpoint
from lachesis_train.trainer.datums import PreparedBatch, penalise_divergence, prepare
from lachesis_train.trainer.off_policy import correct, scored
from lachesis_train.trainer.settings import TrainingSettings
from tests.support.token_trees import Tree
from tests.train.torch.trainer.conftest import GROUPS_A_STEP, RunningEngine, filled_api
from tests.train.torch.trainer.test_kills import STEPS, launch

SHAPE = LoraShape(rank=4, seed=1)


async def sampled_batch(sampler, rules: TrainingSettings | None = None, **shape: Any) -> PreparedBatch:
    """A group of four rollouts of two turns, sampled from the engine; with equal scores if these may be the same."""
    draw, rollouts = random.Random(0), []
    for number in range(4):
        tree, prefix = Tree(), TokenPrefix(draw.choices(range(256), k=10))
        for _ in range(2):
            (found,) = await sampler.sample(
                list(prefix.ids), n=1, max_tokens=6, temperature=1.0, top_p=1.0, top_k=-1, seed=number, stop=None
            )
            ids = [token if token != 9 else 10 for token in found.tokens]
            assert list(found.tokens) == ids  # 9 ends a turn in these trees
            prefix = tree.sample(prefix, ids, logprobs=found.logprobs).extend(draw.choices(range(10, 256), k=3))
        tree.path = tree.recorded
        score = float(number) if not shape else 1.0
        rollouts.append(RolloutSamples(f"r{number}", score, samples(tree, rollout_id=f"r{number}")))
    group = build_group(rollouts, GroupSettings(4, **shape))
    assert isinstance(group, TrainingGroup), group
    return prepare([group.to_atropos()], rules or TrainingSettings())


async def test_the_engine_computes_the_logprobs_that_the_sampler_reported_and_gets_our_advantages(
    to_engine: RunningEngine,
) -> None:
    service = Service()
    training = await service.train("tiny", SHAPE)
    batch = await sampled_batch(await training.sampler())
    data = [each.datum() for each in batch.samples]
    trained = await training.step(data, "importance_sampling", Adam(1e-2))
    losses = []
    for each, datum, logprobs in zip(batch.samples, data, trained.logprobs, strict=True):
        of_trainer = np.asarray(logprobs)[each.sample.trained - 1]
        assert np.abs(of_trainer - each.sample.logprobs).max() < 1e-5
        ratios = np.exp(np.asarray(logprobs) - np.asarray(datum.inputs["logprobs"]))
        losses.append(-np.sum(ratios * np.asarray(datum.inputs["advantages"])))
        wanted = (int(each.sample.rollout[1:]) - 1.5) / each.sample.trained.size / 4
        assert each.advantages * each.scale == pytest.approx([wanted] * each.sample.trained.size)
    assert trained.metrics["loss:sum"] == pytest.approx(math.fsum(losses), abs=1e-5)
    # The same batch again: the weights have moved towards the better rollouts.
    again = await training.step(data, "importance_sampling", Adam(0.0))
    assert again.metrics["loss:sum"] < trained.metrics["loss:sum"]
    await service.close()


async def test_sequences_of_the_trained_weights_have_the_ratio_1_and_those_of_others_do_not(
    to_engine: RunningEngine,
) -> None:
    service = Service()
    training = await service.train("tiny", SHAPE)
    batch = await sampled_batch(await training.sampler())
    rules = TrainingSettings(
        max_sequence_ratio=1.0001, reject_ratio="product", reject_ratio_below=0.999, reject_ratio_above=1.001
    )
    kept, figures = correct(batch, (await training.forward(scored(batch))).logprobs, rules)
    assert len(kept.samples) == 4
    assert figures["sequence_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    trained = await training.step([each.datum() for each in kept.samples], "importance_sampling", Adam(1e-2))
    assert trained.metrics["ratio:sum"] == pytest.approx(trained.metrics["trained_tokens:sum"], abs=1e-5)
    moved, _ = correct(batch, (await training.forward(scored(batch))).logprobs, rules)
    assert moved.samples == []
    assert len(moved.left_out) == 4
    await service.close()


async def test_a_policy_that_solves_everything_is_pulled_back_to_the_base_model(to_engine: RunningEngine) -> None:
    service = Service()
    training = await service.train("tiny", SHAPE)
    for _ in range(3):
        data = [each.datum() for each in (await sampled_batch(await training.sampler())).samples]
        await training.step(data, "importance_sampling", Adam(3e-2))
    sampler = await training.sampler()
    batch = await sampled_batch(sampler, TrainingSettings(kl_penalty=0.1), ensure_scores_are_not_same=False)
    assert len(batch.samples) == 4 and not any(each.advantages.any() for each in batch.samples)
    base = await service.base_sampler("tiny")
    found = [await base.logprobs(list(each.sample.tokens)) for each in batch.samples]
    penalise_divergence(batch, found, 1.0)
    data = [each.datum() for each in batch.samples]
    trained = await training.step(data, "importance_sampling", Adam(1e-2))
    differences, losses = [], []
    for each, of_base in zip(batch.samples, found, strict=True):
        differences.append(each.sample.logprobs - np.asarray(of_base, np.float64)[each.sample.trained])
    mean = np.mean(np.concatenate(differences))
    for each, datum, logprobs, difference in zip(batch.samples, data, trained.logprobs, differences, strict=True):
        places = each.sample.trained - 1
        ratios = np.exp(np.asarray(logprobs)[places] - np.asarray(datum.inputs["logprobs"], np.float64)[places])
        losses.append(np.sum(ratios * (difference - mean)) / places.size / 4)
    assert trained.metrics["loss:sum"] == pytest.approx(math.fsum(losses), abs=1e-5)
    again = await training.step(data, "importance_sampling", Adam(0.0))
    assert again.metrics["loss:sum"] < trained.metrics["loss:sum"] - 1e-3
    (record,) = batch.records(trained.logprobs)
    assert record.skipped is None and not any(sample.skipped for sample in record.samples)
    await service.close()


async def test_an_engine_that_knows_the_loss_and_not_its_parameters_ends_the_run_with_what_to_set(
    to_engine: RunningEngine,
) -> None:
    service = Service()
    training = await service.train("tiny", SHAPE)
    data = [each.datum() for each in (await sampled_batch(await training.sampler())).samples]
    with pytest.raises(RefusedBounds, match=r"the loss cispo with eps_clip.*set training\.loss to") as refused:
        await training.step(data, "cispo", Adam(1e-2), {"eps_clip": 0.2})
    assert refused.value.final, "another try would not help"
    await service.close()


async def test_truncated_ratios_give_the_weights_of_a_hand_truncated_loss(to_engine: RunningEngine) -> None:
    service = Service()
    finals = []
    for loss, parameters in (
        ("importance_sampling", {}),
        ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 1.5}),
    ):
        training = await service.train("tiny", SHAPE)
        batch = await sampled_batch(await training.sampler())
        data = [each.datum() for each in batch.samples]
        for each, datum in zip(batch.samples, data, strict=True):
            logprobs, advantages = np.asarray(datum.inputs["logprobs"]), np.asarray(datum.inputs["advantages"])
            places = each.sample.trained - 1
            logprobs[places] -= 1.0  # as if other weights had sampled: the ratio is e
            if not parameters:
                advantages[places] *= 1.5 / math.e
        await training.step(data, loss, Adam(1e-2), parameters)
        finals.append(to_engine.tensors(await training.save_sampler("final")))
    first, second = finals
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5
    await service.close()


async def test_a_state_is_loaded_with_its_optimizer(to_engine: RunningEngine) -> None:
    service, finals = Service(), []
    training = await service.train("tiny", SHAPE)
    batch = await sampled_batch(await training.sampler())
    data = [each.datum() for each in batch.samples]
    await training.step(data, "importance_sampling", Adam(1e-2))
    state = await training.save_state("middle")
    for each in (training, await Service().resume(state, "tiny", SHAPE)):
        await each.step(data, "importance_sampling", Adam(1e-2))
        finals.append(to_engine.tensors(await each.save_sampler("final")))
    import torch

    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])


@pytest.mark.filterwarnings("error::FutureWarning")
async def test_what_is_deleted_is_gone_and_the_rest_is_not(to_engine: RunningEngine) -> None:
    training = await Service().train("tiny", SHAPE)
    states = [await each for each in (training.save_state("old"), training.save_state("new"))]
    sampler = await training.save_sampler("old")
    for path in (states[0], sampler):
        await training.forget(path)
        with pytest.raises(TrainingEngineError, match=f"cannot delete {path}.*there is no checkpoint"):
            await training.forget(path)
    with pytest.raises(TrainingEngineError, match="there is no checkpoint"):
        await Service().resume(states[0], "tiny", SHAPE)
    await Service().resume(states[1], "tiny", SHAPE)


async def test_what_the_engine_refuses_is_final_and_says_why(to_engine: RunningEngine) -> None:
    with pytest.raises(TrainingEngineError, match="cannot load tinker://nobody/weights/x") as caught:
        await Service().resume("tinker://nobody/weights/x", "tiny", SHAPE)
    assert caught.value.final
    sampler = await (await Service().train("tiny", SHAPE)).sampler()
    with pytest.raises(ValueError, match="cannot sample"):
        await sampler.sample([1] * 5000, n=1, max_tokens=6, temperature=1.0, top_p=1.0, top_k=-1, seed=None, stop=None)


async def test_a_run_goes_on_with_a_new_engine_when_its_own_is_killed(tmp_path: Path, monkeypatch) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    async with filled_api(tmp_path, STEPS * GROUPS_A_STEP) as api:
        process = await launch(run, api.url, None)
        try:
            async with asyncio.timeout(250):
                while True:
                    assert process.returncode is None, (tmp_path / "run.log").read_text()
                    if (run / "metrics.jsonl").exists() and len(list(read_lines(run / "metrics.jsonl"))) > 3:
                        break
                    await asyncio.sleep(0.05)
                (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(child), signal.SIGKILL)
                assert await process.wait() == 0, (tmp_path / "run.log").read_text()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert "the embedded engine has ended" in (tmp_path / "run.log").read_text()
    found = Checkpoint.read(run)
    assert found is not None
    assert found.group_ids == [f"g{at}" for at in range(STEPS * GROUPS_A_STEP)]
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
