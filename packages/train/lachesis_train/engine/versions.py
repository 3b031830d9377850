"""Versions of the weights that sample: on disk all of them, in memory the newest few."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import torch

from lachesis_train.engine.checkpoints import Checkpoints, set_parameters
from lachesis_train.engine.limits import FULL_IN_MEMORY
from lachesis_train.engine.model import LoraSpec, Model

IN_MEMORY: Final = 4
"""Versions whose tensors stay in memory; older ones are read from disk again when they are asked for."""


class Versions:
    """Puts a version into use. Each form of adapter has one slot in the model, which versions share; full weights take
    the place of the model's."""

    def __init__(self, model: Model, checkpoints: Checkpoints) -> None:
        self.model = model
        self.checkpoints = checkpoints
        self._tensors: OrderedDict[str, tuple[LoraSpec, dict[str, torch.Tensor]]] = OrderedDict()
        self._slots: dict[LoraSpec, str] = {}
        self._holds: dict[str, str] = {}

    def use(self, path: str | None) -> None:
        """Make the model sample from a checkpoint, or from the base model. Raises RequestError without it."""
        if path is None:
            self.model.use(None)
            return
        spec, tensors = self._load(path)
        if spec.full:
            self.model.use(path)
            return
        slot = self._slots.get(spec)
        if slot is None:
            slot = self._slots[spec] = f"sampler_{len(self._slots)}"
            self.model.add_adapter(slot, spec, seed=0)
        if self._holds.get(slot) != path:
            set_parameters(self.model.parameters(slot), tensors)
            self._holds[slot] = path
        self.model.use(slot)

    def _load(self, path: str) -> tuple[LoraSpec, dict[str, torch.Tensor]]:
        if path not in self._tensors:
            found = self.checkpoints.find(path)
            tensors = self.checkpoints.tensors(found)
            if found.spec.full:
                self.model.add_weights(path, tensors)
                tensors = {}
            self._tensors[path] = found.spec, tensors
            while len(self._tensors) > (FULL_IN_MEMORY if found.spec.full else IN_MEMORY):
                old, (spec, _) = self._tensors.popitem(last=False)
                if spec.full:
                    self.model.remove_adapter(old)
        self._tensors.move_to_end(path)
        return self._tensors[path]
