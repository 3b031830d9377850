"""What was sampled before is not computed again, and changes nothing of what is sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicLayer

from lachesis_train.engine.key_values import ROOM, RoomyLayer
from lachesis_train.engine.model import Model
from lachesis_train.engine.prefixes import BLOCK, KeptPrefixes, Layers
from lachesis_train.engine.sampling import SamplingBatch, SamplingParameters, SamplingTask
from lachesis_train.engine.training import TrainingModel


def turn(prompt: Sequence[int], seed: int, **parameters: Any) -> SamplingTask:
    return SamplingTask(prompt, 1, SamplingParameters(max_tokens=9, seed=seed, **parameters), lambda _: None)


def conversation(model: Model, prefixes: KeptPrefixes | None, seed: int) -> list[SamplingTask]:
    """Six conversations of four turns, which begin and go on at different times; some fork, some are shortened."""
    chance, batch = random.Random(seed), SamplingBatch(model, "one", prefixes)
    texts = [[chance.randrange(200) for _ in range(chance.randrange(1, 70))] for _ in range(3)] * 2
    played: list[SamplingTask] = []
    for _ in range(4):
        turns = [turn(text, seed=100 * len(played) + place) for place, text in enumerate(texts)]
        turns[0].prompt_logprobs = chance.randrange(80)
        for group in (turns[:2], turns[2:5], turns[5:]):
            batch.add(group)
            batch.step()
        while batch.rows:
            batch.step()
        played += turns
        for place, one in enumerate(turns):
            cut = chance.choice([None, None, len(one.prompt) // 2])
            said = [*one.prompt, *one.sequences[0].tokens][:cut]
            texts[place] = [*said, *(chance.randrange(200) for _ in range(chance.randrange(1, 40)))]
        texts[1] = [*texts[2][: len(texts[2]) - 1], 7]  # another way on from the same place
    return played


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [100, 10_000])
def test_turns_are_sampled_as_if_nothing_were_kept(
    model: Model, trained: TrainingModel, limit: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.use(trained.adapter)
    computed: list[int] = []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, **rest: computed.append(ids.numel()) or hidden(ids, **rest))
    plain = conversation(model, None, seed)
    all_of_it = sum(computed)
    computed.clear()
    prefixes = KeptPrefixes(limit)
    kept = conversation(model, prefixes, seed)
    assert prefixes.tokens <= limit
    assert limit < 1000 or sum(computed) < 0.75 * all_of_it
    for one, other in zip(plain, kept, strict=True):
        assert one.prompt == other.prompt
        assert one.sequences[0].tokens == other.sequences[0].tokens
        np.testing.assert_allclose(one.sequences[0].logprobs, other.sequences[0].logprobs, atol=1e-5)
        np.testing.assert_allclose(one.found_prompt, other.found_prompt, atol=1e-5)


def layers(length: int) -> Layers:
    return [(torch.zeros(2, length, 4), torch.ones(2, length, 4))]


def test_the_longest_beginning_is_found_and_only_for_the_same_weights() -> None:
    prefixes = KeptPrefixes()
    short, long = [1] * BLOCK + [2] * 5, [1] * BLOCK + [3] * 40
    for tokens in (short, long):
        prefixes.keep("one", tokens, layers(len(tokens)))

    def found(prompt: list[int], version: str | None = "one", most: int | None = None) -> int:
        kept = prefixes.find(version, prompt, len(prompt) if most is None else most)
        return kept[1] if kept else 0

    assert found([*long, 9]) == len(long)
    assert found([*long[:-1], 9]) == len(long) - 1
    assert found(long, most=len(long) - 1) == len(long) - 1
    assert found([1] * BLOCK + [4] * 40) == BLOCK
    assert found([1] * (BLOCK - 1) + [9]) == found([9, *long]) == found([]) == found([*long, 9], None) == 0


def test_a_conversation_takes_the_place_of_its_last_turn_and_the_oldest_go() -> None:
    prefixes = KeptPrefixes(limit=100)
    for length in (20, 30, 60):
        prefixes.keep(None, [5] * length, layers(length))
        assert prefixes.tokens == length
    prefixes.keep(None, [6] * 40, layers(40))
    assert prefixes.find(None, [5] * 60, 60) is not None, "it was used after the other one"
    prefixes.keep(None, [7] * 30, layers(30))
    assert (prefixes.find(None, [6] * 40, 40), prefixes.tokens) == (None, 90)
    prefixes.keep(None, [8] * 101, layers(101))
    assert prefixes.tokens == 90, "what is longer than all that is kept does not empty it"
    prefixes.clear()
    assert (prefixes.find(None, [5] * 60, 60), prefixes.tokens) == (None, 0)


def test_room_for_tokens_changes_nothing_of_what_a_layer_holds() -> None:
    """Also where somebody takes rows and columns out, or puts others in, between two tokens."""
    chance, ours, theirs = random.Random(0), RoomyLayer(), DynamicLayer()
    moved = 0
    for step in range(6 * ROOM):
        rows, before = (ours.keys.shape[0], ours.keys.data_ptr()) if step else (3, 0)
        pair = torch.rand(2, rows, 2, 5 if step % ROOM == 0 else 1, 4)
        for found, expected in zip(ours.update(*pair), theirs.update(*pair), strict=True):
            assert torch.equal(found, expected)
        moved += ours.keys.data_ptr() != before
        if chance.random() < 0.02:
            index = torch.tensor([0, chance.randrange(rows), chance.randrange(rows)])
            for layer in (ours, theirs):
                layer.keys, layer.values = layer.keys[index, :, 1:], layer.values[index, :, 1:]
    assert moved < ROOM, "most tokens are put in place"
