"""Full fine-tuning: all parameters against a plain loop of torch, checkpoints, versions, and the base model beside."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lachesis.cli import main
from lachesis_train.engine import start_engine
from lachesis_train.engine.checkpoints import SAMPLER_WEIGHTS, WEIGHTS, Checkpoints
from lachesis_train.engine.limits import FULL_IN_MEMORY
from lachesis_train.engine.model import FULL, LoraSpec, Model
from lachesis_train.engine.training import TrainingModel, create_training_model, forward_backward, optim_step
from lachesis_train.engine.versions import Versions
from lachesis_train.tinker_sdk import LOCAL_KEY, Adam, Datum, LoraShape, Service
from tests.support.training_models import changed_adapter
from tests.train.torch.engine.test_losses import batch, plain

IDS = torch.arange(3, 40)[None]


@pytest.fixture(params=["own head", "tied head"])
def any_model(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Model:
    """`tiny`, or the same with embeddings that are its head too."""
    if request.param == "tied head":
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        config = AutoConfig.from_pretrained(folder)
        config.tie_word_embeddings = True
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "tied")
        folder = tmp_path / "tied"
    return Model(folder)


def full(model: Model, name: str = "run:train:0") -> TrainingModel:
    return create_training_model(model, name, FULL, "run")


def step(model: Model, trained: TrainingModel) -> None:
    forward_backward(model, trained, batch(), "ppo", {}, forward_only=False)
    optim_step(model, trained, {"learning_rate": 1e-3, "weight_decay": 0.1})


def logits(model: Model, name: str | None) -> torch.Tensor:
    model.use(name)
    with torch.inference_mode():
        return model.logits(model.hidden(IDS)).clone()


def test_three_steps_are_those_of_plain_transformers_in_float64(any_model: Model) -> None:
    from transformers import AutoModelForCausalLM

    any_model.network.double()
    for each in any_model._base.values():  # the copies are of its type
        assert each.dtype == torch.float64
    network: Any = AutoModelForCausalLM.from_pretrained(any_model.folder).double()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    trained = full(any_model)
    for _ in range(3):
        optimizer.zero_grad()
        for datum in batch():
            new = network(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].log_softmax(-1)
            new = new.gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]
            ratio = (new - torch.from_numpy(datum.inputs["logprobs"])).exp()
            advantages = torch.from_numpy(datum.inputs["advantages"])
            (-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()).backward()
        forward_backward(any_model, trained, batch(), "ppo", {}, forward_only=False)
        ours = any_model.parameters(trained.adapter)
        for key, parameter in network.named_parameters():
            torch.testing.assert_close(ours[key].grad, parameter.grad, atol=1e-9, rtol=1e-6)
        optim_step(any_model, trained, {"learning_rate": 1e-3, "weight_decay": 0.1})
        optimizer.step()
    assert ours.keys() == dict(network.named_parameters()).keys()
    for key, parameter in network.named_parameters():
        torch.testing.assert_close(ours[key], parameter, atol=1e-5, rtol=1e-5)


def test_a_killed_run_goes_on_with_the_same_bits(any_model: Model, tmp_path: Path) -> None:
    checkpoints, trained = Checkpoints(tmp_path / "state", "tiny"), full(any_model)
    step(any_model, trained)
    path = checkpoints.save(any_model, trained, WEIGHTS, "one")
    step(any_model, trained)
    step(any_model, trained)
    again = Model(any_model.folder)
    found = checkpoints.find(path)
    assert (found.spec, found.steps) == (FULL, 1)
    resumed = checkpoints.create(again, found, "other:train:1", "other", optimizer=True)
    step(again, resumed)
    step(again, resumed)
    wanted, ours = any_model.parameters(trained.adapter), again.parameters(resumed.adapter)
    assert wanted.keys() == ours.keys()
    assert all(torch.equal(wanted[key], ours[key]) for key in wanted)
    base = Model(any_model.folder)
    assert not any(torch.equal(each, wanted[key]) for key, each in base._base.items())


def test_each_version_and_the_base_model_sample_their_own_weights(any_model: Model, tmp_path: Path) -> None:
    checkpoints, trained = Checkpoints(tmp_path / "state", "tiny"), full(any_model)
    versions = Versions(any_model, checkpoints)
    base, found = logits(any_model, None), {}
    for number in range(FULL_IN_MEMORY + 2):
        path = checkpoints.save(any_model, trained, SAMPLER_WEIGHTS, f"step-{number}")
        found[path] = logits(any_model, trained.adapter)
        versions.use(path)
        step(any_model, trained)
    adapter = changed_adapter(any_model, "run:train:1")  # beside them, in the same model
    with_adapter = logits(any_model, adapter.adapter)
    assert not torch.equal(with_adapter, base)
    for path, wanted in [*found.items(), *found.items()]:
        versions.use(path)
        with torch.inference_mode():
            assert torch.equal(any_model.logits(any_model.hidden(IDS)), wanted)
        assert torch.equal(logits(any_model, None), base)
        assert len(versions._tensors) <= FULL_IN_MEMORY
    assert torch.equal(found[next(iter(found))], base), "the first is untrained"
    assert torch.equal(logits(any_model, adapter.adapter), with_adapter)
    step(any_model, trained)  # the adapter took no gradient away
    assert trained.steps == FULL_IN_MEMORY + 3


def test_an_adapter_beside_full_weights_is_trained_on_the_base_model(model: Model) -> None:
    step(model, full(model))
    adapter = changed_adapter(model, "run:train:1", spec=LoraSpec(rank=4))
    forward_backward(model, adapter, batch(), "importance_sampling", {}, forward_only=False)
    alone = Model(model.folder)
    wanted, gradients, _ = plain(alone, changed_adapter(alone, "run:train:1"), batch(), "importance_sampling")
    assert math.isfinite(wanted)
    for parameter, gradient in zip(model.parameters(adapter.adapter).values(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-3)


async def test_the_engine_trains_and_samples_all_parameters_through_the_sdk(tmp_path: Path) -> None:
    ids = list(range(40, 60))
    datum = Datum(ids[:-1], ids[1:], {"weights": [1.0] * (len(ids) - 1)})
    async with start_engine("tiny", state_dir=tmp_path, full_finetuning=True) as url:
        service = Service(url, LOCAL_KEY)
        training = await service.train("tiny", LoraShape(rank=8))
        base = await service.base_sampler("tiny")
        before = await base.logprobs(ids)
        for _ in range(3):
            await training.step([datum], "cross_entropy", Adam(1e-2))
        sampler = await training.sampler()
        trained = (await training.forward([datum])).logprobs[0]
        assert (await sampler.logprobs(ids))[1:] == pytest.approx(trained, abs=1e-4)
        assert sum(trained) > sum(before[1:]) + 1
        assert (await base.logprobs(ids))[1:] == before[1:]
        state = await training.save_state("three")
        resumed = await service.resume(state, "tiny", LoraShape(rank=8))
        assert (await resumed.forward([datum])).logprobs[0] == trained
        await service.close()


@pytest.mark.parametrize("also", [["--lora-layers", "1"], ["--dtype", "bfloat16"]])
def test_what_would_be_passed_over_in_silence_is_refused(also: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--model", "tiny", "--full-finetuning", *also]) == 2
    assert "trains all layers, in float32" in capsys.readouterr().err
