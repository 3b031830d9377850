"""Writes GGUF files: any metadata and F32 tensors, and a Llama of transformers with a byte-level BPE tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ALIGNMENT: Final = 32
_F32: Final = 0
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_IN_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> Path:
    """A GGUF file, version 3. Integers are written as uint32, those in lists as int32, and floats as float32."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_text(key) + _typed(value) for key, value in metadata.items()]
    offset, blobs = 0, []
    for name, tensor in tensors.items():
        if tensor.dtype != "float32":
            raise ValueError(f"tensor {name} is {tensor.dtype}; convert it to float32")
        shape = tensor.shape[::-1]  # the fastest dimension comes first
        parts.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, _F32, offset))
        blobs.append(_padded(tensor.astype("<f4").tobytes()))
        offset += len(blobs[-1])
    path.write_bytes(_padded(b"".join(parts)) + b"".join(blobs))
    return path


def llama_metadata(config: Any) -> dict[str, Any]:
    """llama.cpp's metadata for a `LlamaConfig` with default rope."""
    return {
        "general.architecture": "llama",
        "general.alignment": _ALIGNMENT,
        "general.file_type": _F32,
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.vocab_size": config.vocab_size,
    }


def tokenizer_metadata(tokenizer: Any, *, pre: str) -> dict[str, Any]:
    """A byte-level BPE of transformers, with its chat template. `pre` is llama.cpp's name of its pre-tokenizer."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    added = tokenizer.added_tokens_decoder
    kinds = {index: _CONTROL if token.special else _USER_DEFINED for index, token in added.items()}
    tokens: dict[str, int] = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    if list(tokens.values()) != list(range(len(tokens))):
        raise ValueError("the vocabulary has holes, which a GGUF cannot show; fill them with unused tokens")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [kinds.get(index, _NORMAL) for index in tokens.values()],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def llama_tensors(weights: Mapping[str, NDArray[np.float32]], config: Any) -> dict[str, NDArray[np.float32]]:
    """The state of a `LlamaForCausalLM`, with llama.cpp's names and order of rows."""
    found = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in _IN_LAYER.items():
            tensor = weights[f"model.layers.{layer}.{theirs}.weight"]
            found[f"blk.{layer}.{ours}.weight"] = _pairs_adjacent(tensor, heads[ours]) if ours in heads else tensor
    return found


def _pairs_adjacent(tensor: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """transformers rotates row i of a head with row i + half of it; llama.cpp's Llama rotates neighbours."""
    rows, columns = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _typed(value: Any) -> bytes:
    """Type and value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(f"metadata cannot hold {value!r}; give a bool, a number, a text, or a list of texts or integers")


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)
