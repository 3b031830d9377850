"""Routed experts and sampling masks, as vLLM and SGLang report them. The fake model has no experts: ids of the prefix
decide which ones a token gets, so that a client that mixes up rows is found."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from lachesis_testing.fake_server.completions import Call
from lachesis_testing.fake_server.model import IMPOSSIBLE, hash_of
from lachesis_testing.fake_server.shapes import Host, Shown, by_model


def experts_of(ids: Sequence[int], shape: tuple[int, int, int]) -> list[int]:
    """For each token, `layers * top_k` expert ids; `shape` is (layers, top_k, experts)."""
    layers, top_k, experts = shape
    context, found = hash_of(()), list[int]()
    for token in ids:
        context.update(token.to_bytes(4, "little"))
        digest = context.digest() * (1 + 2 * layers * top_k // 16)
        found += (int.from_bytes(digest[2 * at : 2 * at + 2]) % experts for at in range(layers * top_k))
    return found


def vllm_experts(host: Host, each: Shown, start: int) -> str | None:
    """Base64 of a `.npy` file of [tokens - 1 - start, layers, top_k], in the smallest type that has all experts."""
    if host.experts is None or not each.made.ids:
        return None
    layers, top_k, experts = host.experts
    size = 1 if experts <= 256 else 2
    ids = experts_of([*each.prompt_ids, *each.made.ids[:-1]], host.experts)[start * layers * top_k :]
    shape = (len(ids) // (layers * top_k), layers, top_k)
    header = f"{{'descr': '{'|u1' if size == 1 else '<u2'}', 'fortran_order': False, 'shape': {shape}, }}"
    header = header.ljust((len(header) + 11 + 63) // 64 * 64 - 11) + "\n"
    data = b"".join(index.to_bytes(size, "little") for index in ids)
    return b64encode(b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header.encode() + data).decode()


def sglang_experts(host: Host, each: Shown, start: int) -> str | None:
    """Base64 of int32 [tokens - 1 - start, layers, top_k]."""
    if host.experts is None or not each.made.ids:
        return None
    ids = experts_of([*each.prompt_ids, *each.made.ids[:-1]], host.experts)[start * host.experts[0] * host.experts[1] :]
    return b64encode(b"".join(index.to_bytes(4, "little") for index in ids)).decode()


def sampling_masks(call: Call, each: Shown) -> list[list[int]]:
    """For each sampled token, the ids that top-k, top-p and min-p left."""
    sampling = call.sampling
    likeliest = by_model(
        call, each.made, lambda model, before, ids: model.top(before, ids, sampling, "processed", sampling.top_k)
    )
    return [[index for index, logprob in best if logprob > IMPOSSIBLE] for best in likeliest]
