"""Routed experts on the wires of vLLM and SGLang."""

from __future__ import annotations

from base64 import b64encode

from lachesis_tokens.model_routes.host import ModelHost, ShownCompletion


def vllm_experts(host: ModelHost, each: ShownCompletion, start: int) -> str | None:
    """Base64 of a `.npy` file of [tokens - 1 - start, layers, top_k], in the smallest type that has all experts."""
    if host.experts is None or not each.made.ids:
        return None
    layers, top_k, experts = host.experts
    size = 1 if experts <= 256 else 2
    ids = host.experts_of([*each.prompt_ids, *each.made.ids[:-1]])[start * layers * top_k :]
    shape = (len(ids) // (layers * top_k), layers, top_k)
    header = f"{{'descr': '{'|u1' if size == 1 else '<u2'}', 'fortran_order': False, 'shape': {shape}, }}"
    header = header.ljust((len(header) + 11 + 63) // 64 * 64 - 11) + "\n"
    data = b"".join(index.to_bytes(size, "little") for index in ids)
    return b64encode(b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header.encode() + data).decode()


def sglang_experts(host: ModelHost, each: ShownCompletion, start: int) -> str | None:
    """Base64 of int32 [tokens - 1 - start, layers, top_k]."""
    if host.experts is None or not each.made.ids:
        return None
    ids = host.experts_of([*each.prompt_ids, *each.made.ids[:-1]])[start * host.experts[0] * host.experts[1] :]
    return b64encode(b"".join(index.to_bytes(4, "little") for index in ids)).decode()
