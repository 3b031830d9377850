"""Keys and values of sequences that were sampled: the next turn of a conversation begins with the last one's tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from lachesis_train.engine.limits import KEPT_TOKENS

BLOCK: Final = 16
"""Tokens of which a prefix is looked up together; a shorter one is not found."""
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [heads, tokens, width]."""


@dataclass(frozen=True)
class Prefix:
    """A sequence of tokens, with the keys and values that one version of the weights gives it."""

    tokens: np.ndarray
    layers: Layers
    places: Sequence[int]
    """Where the cache finds it: one place for each block."""


class KeptPrefixes:
    """The sequences that were used last, of all versions of the weights together."""

    def __init__(self, limit: int = KEPT_TOKENS) -> None:
        """
        Args:
            limit: tokens of all sequences.
        """
        self.limit = limit
        self.tokens = 0
        self._kept: OrderedDict[int, Prefix] = OrderedDict()
        self._at: dict[int, Prefix] = {}

    def find(self, version: str | None, prompt: Sequence[int], most: int) -> tuple[Prefix, int] | None:
        """The sequence that begins with most of the prompt, and the number of tokens of both, at most `most`."""
        wanted = np.asarray(prompt[:most])
        for place in reversed([*_places(version, wanted)]):
            prefix = self._at.get(place)
            shared = _shared(prefix.tokens, wanted) if prefix is not None else 0
            if prefix is not None and shared >= BLOCK:
                self._kept.move_to_end(id(prefix))
                return prefix, shared
        return None

    def keep(self, version: str | None, tokens: Sequence[int], layers: Layers) -> None:
        """Keep a sequence in the place of those that it begins with. The tensors are copied."""
        array = np.asarray(tokens)
        places = [*_places(version, array)]
        if not places or len(array) > self.limit:
            return
        for place in places:
            old = self._at.get(place)
            if old is not None and _shared(old.tokens, array) == len(old.tokens):
                self._drop(old)
        new = Prefix(array, [(keys.clone(), values.clone()) for keys, values in layers], places)
        self._kept[id(new)] = new
        self._at |= dict.fromkeys(places, new)
        self.tokens += len(array)
        while self.tokens > self.limit:
            self._drop(next(iter(self._kept.values())))

    def _drop(self, prefix: Prefix) -> None:
        del self._kept[id(prefix)]
        self.tokens -= len(prefix.tokens)
        for place in prefix.places:
            if self._at.get(place) is prefix:
                del self._at[place]

    def clear(self) -> None:
        """Forget all, and free their memory."""
        self._kept.clear()
        self._at.clear()
        self.tokens = 0


def _places(version: str | None, tokens: np.ndarray) -> Iterator[int]:
    """A number for each beginning of whole blocks. Different ones may have the same: the tokens are compared."""
    place = hash(version)
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        place = hash((place, tokens[at : at + BLOCK].tobytes()))
        yield place


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
