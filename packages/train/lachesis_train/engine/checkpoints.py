"""Weights and optimizer states on disk. A checkpoint is one safetensors file, so a rename replaces it as a whole.

ROOT/MODEL_ID/weights/NAME.safetensors            tinker://MODEL_ID/weights/NAME           adapter and optimizer
ROOT/MODEL_ID/sampler_weights/NAME.safetensors    tinker://MODEL_ID/sampler_weights/NAME   adapter

With full fine-tuning, all parameters are in the place of the adapter.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.model import LoraSpec, Model
from lachesis_train.engine.training import TrainingModel, create_training_model
from lachesis_train.whole_files import move_atomically

WEIGHTS: Final = "weights"
SAMPLER_WEIGHTS: Final = "sampler_weights"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PATH: Final = re.compile(rf"tinker://([A-Za-z0-9][A-Za-z0-9:_-]*)/(weights|sampler_weights)/({_NAME.pattern})")
_OPTIMIZER: Final = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class CheckpointHeader:
    """A file's metadata, without its tensors."""

    file: Path
    spec: LoraSpec
    steps: int
    has_optimizer: bool


class Checkpoints:
    """The files below one folder."""

    def __init__(self, root: Path, base_model: str) -> None:
        self.root = root
        self.base_model = base_model

    def save(self, model: Model, trained: TrainingModel, kind: str, name: str, *, overwrite: bool = False) -> str:
        """Write a checkpoint and return its `tinker://` path. With kind `weights` the optimizer is in it.

        Raises RequestError for a name that cannot be one, or of another checkpoint without `overwrite`.
        """
        if not _NAME.fullmatch(name):
            raise RequestError(f"checkpoint name {name!r}: use letters, digits, '.', '_' and '-', 200 at most")
        file = self.root / trained.id / kind / f"{name}.safetensors"
        path = f"tinker://{trained.id}/{kind}/{name}"
        tensors = {key: value.detach() for key, value in model.parameters(trained.adapter).items()}
        if file.exists() and not overwrite:
            if kind == SAMPLER_WEIGHTS and _same(tensors, _read(file)):
                return path  # a client that tries a step again saves the same weights again
            raise RequestError(f"checkpoint {name!r} of {trained.id} exists; use another name or overwrite=True")
        if kind == WEIGHTS:
            tensors |= _optimizer_tensors(model, trained)
        about = {
            "base_model": self.base_model,
            "spec": trained.spec.as_dict(),
            "steps": trained.steps,
            "optimizer": kind == WEIGHTS,
        }
        _write(file, tensors, {"lachesis": json.dumps(about)})
        return path

    def find(self, path: str) -> CheckpointHeader:
        """The checkpoint of a `tinker://` path. Raises RequestError where there is none, or of another base model."""
        from safetensors import safe_open

        parts = _PATH.fullmatch(path)
        if not parts:
            raise RequestError(f"path {path!r} is not of the form tinker://MODEL_ID/weights/NAME")
        file = self.root / parts[1] / parts[2] / f"{parts[3]}.safetensors"
        if not file.is_file():
            raise RequestError(f"there is no checkpoint {path}: {file} does not exist; was it saved by another engine?")
        with safe_open(str(file), "pt") as opened:
            about = json.loads((opened.metadata() or {}).get("lachesis", "null"))
        if about is None:
            raise RequestError(f"{file} is not a checkpoint of the embedded engine")
        if about["base_model"] != self.base_model:
            raise RequestError(
                f"checkpoint {path} is of the base model {about['base_model']}, this engine serves {self.base_model}"
            )
        return CheckpointHeader(file, LoraSpec(**about["spec"]), about["steps"], about["optimizer"])

    def remove(self, path: str) -> None:
        """Remove a checkpoint, if it is there."""
        with contextlib.suppress(RequestError):
            self.find(path).file.unlink(missing_ok=True)

    def tensors(self, found: CheckpointHeader) -> dict[str, torch.Tensor]:
        """The adapter of a checkpoint."""
        return {key: value for key, value in _read(found.file).items() if not key.startswith("optimizer.")}

    def load(self, model: Model, trained: TrainingModel, found: CheckpointHeader, *, optimizer: bool) -> None:
        """Put the weights of a checkpoint, and its optimizer if asked, into a training model. Gradients are dropped."""
        if trained.spec != found.spec:
            raise RequestError(
                f"{found.file} has {found.spec}, the training model {trained.spec}: they must be the same"
            )
        if optimizer and not found.has_optimizer:
            raise RequestError(f"{found.file} has no optimizer state: it was saved for a sampler; load a state instead")
        tensors = _read(found.file)
        parameters = model.parameters(trained.adapter)
        set_parameters(parameters, tensors)
        trained.optimizer.state.clear()
        trained.optimizer.zero_grad()
        trained.steps = found.steps if optimizer else 0
        if optimizer and f"optimizer.{_OPTIMIZER[0]}.{next(iter(parameters))}" in tensors:
            for key, parameter in parameters.items():
                trained.optimizer.state[parameter] = {
                    name: tensors[f"optimizer.{name}.{key}"].to(parameter.device) for name in _OPTIMIZER
                }

    def create(
        self, model: Model, found: CheckpointHeader, model_id: str, session: str, *, optimizer: bool
    ) -> TrainingModel:
        """A new training model with the weights of a checkpoint."""
        trained = create_training_model(model, model_id, found.spec, session, seed=0)
        self.load(model, trained, found, optimizer=optimizer)
        return trained


def set_parameters(parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of the same names into parameters."""
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(tensors[key])


def _same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value.cpu(), theirs[key]) for key, value in ours.items())


def _optimizer_tensors(model: Model, trained: TrainingModel) -> dict[str, torch.Tensor]:
    states = trained.optimizer.state
    return {
        f"optimizer.{name}.{key}": states[parameter][name]
        for key, parameter in model.parameters(trained.adapter).items()
        if parameter in states
        for name in _OPTIMIZER
    }


def _read(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(str(file)))


def _write(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a whole file or none, also if the machine loses power."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    for left in file.parent.glob(".*"):  # of a process that was killed; only one saves a training model
        left.unlink(missing_ok=True)
    part = file.with_name(f".{file.name}.part")
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, part, dict(metadata))
    part.chmod(0o644)  # it makes files that only their owner reads
    move_atomically(part, file)
