"""Which examples are held out, and which are trained in which step: decided by the settings and the data alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from lachesis_train.sft.readers import Example
from lachesis_train.sft.settings import SftSettings


def split(examples: Sequence[Example], settings: SftSettings) -> tuple[list[Example], list[Example]]:
    """Those that are trained, and those that are held out: all examples of an item are on one side."""
    parts: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        drawn = blake2b(f"{settings.seed}:{example.item}".encode(), digest_size=8).digest()
        parts[int.from_bytes(drawn) < settings.validation_share * 2**64].append(example)
    return parts


def batches(examples: Sequence[Example], settings: SftSettings) -> list[list[list[Example]]]:
    """The batches of each epoch. Every example is in each epoch once."""
    return [_epoch(examples, settings, epoch) for epoch in range(settings.epochs)]


def _epoch(examples: Sequence[Example], settings: SftSettings, epoch: int) -> list[list[Example]]:
    order = list(examples)
    random.Random(f"{settings.seed}:{epoch}").shuffle(order)
    found: list[list[Example]] = []
    tokens = 0
    for example in order:
        tokens += len(example.tokens)
        if settings.batch_tokens is None:
            full = not found or len(found[-1]) >= settings.batch_size
        else:
            full = not found or tokens > settings.batch_tokens
        if full:
            found.append([])
            tokens = len(example.tokens)
        found[-1].append(example)
    return found


def digest(examples: Sequence[Example]) -> str:
    """Of all that is trained: a run that is continued must read the same."""
    seal = blake2b(digest_size=16)
    for example in examples:
        seal.update(repr((list(example.tokens), list(example.trained), example.item)).encode())
    return seal.hexdigest()
