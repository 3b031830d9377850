"""The keys and values of a batch that is sampled token by token."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicLayer

ROOM: Final = 32
"""Tokens for which there is room when the tensors have been copied."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Puts most tokens in place. The layer of transformers copies all keys and values for each token, which takes
    longer than the model itself."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self._roomy: tuple[Any, Any, Any, Any] = (None, None, None, None)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add [rows, heads, new tokens, width]; all keys and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.keys.shape[-2]
        end = before + key_states.shape[-2]
        keys, values, *last = self._roomy
        # Whoever took rows or columns out has put other tensors here.
        if last[0] is not self.keys or last[1] is not self.values or keys.shape[-2] < end:
            keys, values = (
                torch.cat([old, new, _room(new, ROOM if before else 0)], dim=-2)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            )
        else:
            keys[..., before:end, :] = key_states
            values[..., before:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        self._roomy = keys, values, self.keys, self.values
        return self.keys, self.values


def _room(like: torch.Tensor, tokens: int) -> torch.Tensor:
    return like.new_empty(*like.shape[:-2], tokens, like.shape[-1])


def new_cache() -> Cache:
    """An empty one, for a model whose layers all attend to the whole context."""
    return Cache(layer_class_to_replicate=RoomyLayer)
