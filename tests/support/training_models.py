"""Adapters of the embedded engine for tests."""

from __future__ import annotations

from typing import Any

import torch

from lachesis_train.engine.model import LoraSpec, Model
from lachesis_train.engine.training import TrainingModel, create_training_model


def changed_adapter(model: Model, name: str, seed: int = 0, spec: LoraSpec | None = None) -> TrainingModel:
    """An adapter whose second matrices are not zero, so it changes the model."""
    made = create_training_model(model, name, spec or LoraSpec(rank=4), "run", seed)
    random = torch.Generator().manual_seed(seed)
    for key, parameter in model.parameters(made.adapter).items():
        if "lora_B" in key:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=random)
    return made


def done(future: Any) -> Any:
    """The SDK 0.38 returns futures where 0.25 returns clients."""
    return future.result() if hasattr(future, "result") else future
