"""Routed experts of the fake model, which has none: ids of the prefix decide which ones a token gets, so that a client
that mixes up rows is found."""

from __future__ import annotations

from collections.abc import Sequence

from lachesis_testing.fake_server.model import hash_of


def experts_of(ids: Sequence[int], shape: tuple[int, int, int]) -> list[int]:
    """For each token, `layers * top_k` expert ids; `shape` is (layers, top_k, experts)."""
    layers, top_k, experts = shape
    context, found = hash_of(()), list[int]()
    for token in ids:
        context.update(token.to_bytes(4, "little"))
        digest = context.digest() * (1 + 2 * layers * top_k // 16)
        found += (int.from_bytes(digest[2 * at : 2 * at + 2]) % experts for at in range(layers * top_k))
    return found
