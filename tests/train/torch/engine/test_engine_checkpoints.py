"""Checkpoints: training goes on from one as if it had not stopped, and a killed save leaves the older one whole."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lachesis_train.engine.checkpoints import SAMPLER_WEIGHTS, WEIGHTS, Checkpoints
from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.model import LoraSpec, Model
from lachesis_train.engine.promises import Promises
from lachesis_train.engine.samplers import EPHEMERAL, KEPT_EPHEMERAL, Samplers
from lachesis_train.engine.sampling import SamplingParameters, SamplingTask
from lachesis_train.engine.training import TrainingModel, create_training_model, forward_backward, optim_step
from lachesis_train.engine.versions import IN_MEMORY, Versions
from lachesis_train.engine.worker import EngineWorker
from tests.train.torch.engine.test_losses import batch

KILLS = 8


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, "tiny")


def step(model: Model, trained: TrainingModel) -> None:
    forward_backward(model, trained, batch(), "cross_entropy", {}, forward_only=False)
    optim_step(model, trained, {"learning_rate": 1e-2})


def weights(model: Model, trained: TrainingModel) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters(trained.adapter).values()]


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    model: Model, trained: TrainingModel, checkpoints: Checkpoints
) -> None:
    step(model, trained)
    step(model, trained)
    path = checkpoints.save(model, trained, WEIGHTS, "two")
    step(model, trained)
    wanted = weights(model, trained)
    found = checkpoints.find(path)
    again = checkpoints.create(model, found, "other:train:1", "other", optimizer=True)
    assert again.steps == 2
    step(model, again)
    for one, other in zip(wanted, weights(model, again), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    fresh = checkpoints.create(model, found, "other:train:2", "other", optimizer=False)
    step(model, fresh)
    assert any(not torch.equal(one, other) for one, other in zip(wanted, weights(model, fresh), strict=True))


def test_kill_9_during_a_save_leaves_a_whole_checkpoint(
    model: Model, trained: TrainingModel, checkpoints: Checkpoints
) -> None:
    step(model, trained)
    path = checkpoints.save(model, trained, WEIGHTS, "last", overwrite=True)
    for kill in range(KILLS):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            for number in range(1, 1 << 30):
                trained.steps = number
                checkpoints.save(model, trained, WEIGHTS, "last", overwrite=True)
                os.write(writer, number.to_bytes(8, "big"))
        os.close(writer)
        saved = 0
        for _ in range(1 + kill % 3):
            saved = int.from_bytes(os.read(reader, 8), "big")
        time.sleep(random.random() * 0.01)  # somewhere in the next save
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while rest := os.read(reader, 8):
            saved = int.from_bytes(rest, "big")
        os.close(reader)
        found = checkpoints.find(path)
        assert found.steps in (saved, saved + 1)
        checkpoints.load(model, trained, found, optimizer=True)
    checkpoints.save(model, trained, WEIGHTS, "last", overwrite=True)
    assert [file.name for file in found.file.parent.iterdir()] == ["last.safetensors"]


def test_what_a_killed_save_left_goes_with_the_next_one(
    model: Model, trained: TrainingModel, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        checkpoints.save(model, trained, SAMPLER_WEIGHTS, "step-1")
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    folder = checkpoints.root / trained.id / SAMPLER_WEIGHTS
    assert list(folder.iterdir())
    checkpoints.save(model, trained, SAMPLER_WEIGHTS, "step-2")
    assert [file.name for file in folder.iterdir()] == ["step-2.safetensors"]
    assert (folder / "step-2.safetensors").stat().st_mode & 0o777 == 0o644, "others may read it, as all of the run"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x" * 201])
def test_a_name_that_is_no_file_name_is_refused(
    model: Model, trained: TrainingModel, checkpoints: Checkpoints, name: str
) -> None:
    with pytest.raises(RequestError, match="checkpoint name"):
        checkpoints.save(model, trained, WEIGHTS, name)


def test_a_checkpoint_is_replaced_only_on_request(
    model: Model, trained: TrainingModel, checkpoints: Checkpoints
) -> None:
    checkpoints.save(model, trained, WEIGHTS, "a")
    with pytest.raises(RequestError, match="'a' of run:train:0 exists"):
        checkpoints.save(model, trained, WEIGHTS, "a")
    checkpoints.save(model, trained, WEIGHTS, "a", overwrite=True)
    path = checkpoints.save(model, trained, SAMPLER_WEIGHTS, "b")
    assert checkpoints.save(model, trained, SAMPLER_WEIGHTS, "b") == path  # the same weights
    step(model, trained)
    with pytest.raises(RequestError, match="'b' of run:train:0 exists"):
        checkpoints.save(model, trained, SAMPLER_WEIGHTS, "b")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("run/weights/a", "not of the form tinker://"),
        ("tinker://run/weights/../../etc", "not of the form tinker://"),
        ("tinker://run/weights/a", "there is no checkpoint"),
    ],
)
def test_a_path_without_a_checkpoint_is_refused_by_name(checkpoints: Checkpoints, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checkpoints.find(path)


def test_a_checkpoint_of_another_model_or_form_is_refused(
    model: Model, trained: TrainingModel, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoints.save(model, trained, SAMPLER_WEIGHTS, "a")
    with pytest.raises(RequestError, match="is of the base model tiny, this engine serves other"):
        Checkpoints(tmp_path, "other").find(path)
    wider = create_training_model(model, "run:train:9", LoraSpec(rank=8), "run")
    with pytest.raises(RequestError, match=r"rank=4.*rank=8"):
        checkpoints.load(model, wider, checkpoints.find(path), optimizer=False)
    with pytest.raises(RequestError, match="no optimizer state"):
        checkpoints.load(model, trained, checkpoints.find(path), optimizer=True)


def test_versions_that_left_memory_are_read_from_disk_again(
    model: Model, trained: TrainingModel, checkpoints: Checkpoints
) -> None:
    versions = Versions(model, checkpoints)
    ids = torch.tensor([[65, 66, 67]])

    def logits(path: str | None) -> Any:
        versions.use(path)
        with torch.no_grad():
            return model.network(input_ids=ids).logits

    model.use(None)
    base = logits(None)
    wanted = {}
    for number in range(IN_MEMORY + 2):
        step(model, trained)
        model.use(trained.adapter)
        path = checkpoints.save(model, trained, SAMPLER_WEIGHTS, str(number))
        with torch.no_grad():
            wanted[path] = model.network(input_ids=ids).logits
    for path, expected in [*wanted.items(), *wanted.items()]:
        torch.testing.assert_close(logits(path), expected, atol=0, rtol=0)
        assert len(versions._tensors) <= IN_MEMORY
    torch.testing.assert_close(logits(None), base, atol=0, rtol=0)


def test_a_session_keeps_its_newest_weights_without_a_name(
    checkpoints: Checkpoints, model: Model, trained: TrainingModel
) -> None:
    samplers = Samplers(EngineWorker(model, Versions(model, checkpoints)), checkpoints, Promises(), ())
    named = checkpoints.save(model, trained, SAMPLER_WEIGHTS, "named")
    samplers.add("one", 0, named)
    for number in range(1, KEPT_EPHEMERAL + 3):
        for session in ("one", "two")[: 1 + (number == 1)]:
            path = checkpoints.save(model, trained, SAMPLER_WEIGHTS, f"{EPHEMERAL}{session}-{number}")
            samplers.add(session, number, path)
    left = {file.stem for file in checkpoints.find(named).file.parent.iterdir()}
    newest = {f"{EPHEMERAL}one-{number}" for number in range(3, KEPT_EPHEMERAL + 3)}
    assert left == {"named", f"{EPHEMERAL}two-1", *newest}


def test_weights_that_a_completion_still_needs_are_kept(
    checkpoints: Checkpoints, model: Model, trained: TrainingModel
) -> None:
    worker, ended = EngineWorker(model, Versions(model, checkpoints)), threading.Event()
    samplers = Samplers(worker, checkpoints, Promises(), (), kept=2)
    paths = [checkpoints.save(model, trained, SAMPLER_WEIGHTS, f"{EPHEMERAL}{number}") for number in range(6)]
    asked = SamplingTask([1, 2, 3], 1, SamplingParameters(max_tokens=2), lambda _: ended.set())
    worker.sample(paths[0], asked)
    for number, path in enumerate(paths[:5]):
        samplers.add("one", number, path)
    assert {file.stem for file in checkpoints.find(paths[4]).file.parent.iterdir()} == {
        f"{EPHEMERAL}{number}" for number in (0, 3, 4, 5)
    }
    worker.start()
    assert ended.wait(60) and asked.sequences
    worker.close()
    samplers.add("one", 5, paths[5])
    assert {file.stem for file in checkpoints.find(paths[5]).file.parent.iterdir()} == {
        f"{EPHEMERAL}{number}" for number in (4, 5)
    }


def test_requests_for_weights_whose_file_cannot_be_read_are_answered_and_others_go_on(
    checkpoints: Checkpoints, model: Model, trained: TrainingModel
) -> None:
    path = checkpoints.save(model, trained, SAMPLER_WEIGHTS, "torn")
    file = checkpoints.find(path).file
    file.write_bytes(file.read_bytes()[:-1000])
    worker, answers = EngineWorker(model, Versions(model, checkpoints)), queue.Queue[SamplingTask | Exception]()
    for _ in range(2):
        worker.sample(path, SamplingTask([1, 2, 3], 1, SamplingParameters(max_tokens=2), answers.put))
    worker.start()
    assert [type(answers.get(timeout=60)).__name__ for _ in range(2)] == ["SafetensorError"] * 2
    worker.sample(None, SamplingTask([1, 2, 3], 1, SamplingParameters(max_tokens=2), answers.put))
    assert isinstance(answers.get(timeout=60), SamplingTask)
    worker.close()
