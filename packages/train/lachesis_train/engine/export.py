"""The weights of a checkpoint as a model of their own, a folder of transformers or a GGUF file, or as a GGUF adapter.

In a model of its own an adapter is added to the weights of its base model, W + alpha / rank * B A, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from backends.errors import SettingsError
from lachesis_train.engine.checkpoints import Checkpoints, set_parameters
from lachesis_train.engine.model import UNEMBED, LoraSpec

DTYPES: Final = {"float32": ("F32", "ALL_F32"), "float16": ("F16", "MOSTLY_F16"), "bfloat16": ("BF16", "MOSTLY_BF16")}
"""Names of torch, those of GGUF, and of files that have it."""
ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Those of GGUF that can be written. Files of Mistral models are of `llama`."""
_EXACT: Final = ("F32", "F16", "BF16")
_ROUNDING: Final = 0.005
"""Share of the norm of a tensor that those of `_EXACT` may differ by."""


def merged_model(folder: Path, checkpoints: Path, state: str, original: Path | None = None) -> Any:
    """The base model of `folder` in float32 with the weights of a checkpoint, on the CPU.

    Raises:
        RequestError: there is no such checkpoint below the folder `checkpoints`.
        SettingsError: the GGUF file `original` is of another model than that of `folder`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    found, tensors = _read(folder, checkpoints, state)
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    if original is not None:
        _check_base(network, original)
    if found.full:
        set_parameters(dict(network.named_parameters()), tensors)
    else:
        with torch.no_grad():
            _add(network, tensors, found)
    return network


def _read(folder: Path, checkpoints: Path, state: str) -> tuple[LoraSpec, Mapping[str, torch.Tensor]]:
    store = Checkpoints(checkpoints, folder.name)
    found = store.find(state)
    return found.spec, store.tensors(found)


def _add(network: Any, tensors: Mapping[str, torch.Tensor], spec: LoraSpec) -> None:
    for key, first in tensors.items():
        name, adapter, _ = key.partition(".lora_A.")
        if not adapter:
            continue
        if name == UNEMBED and network.config.tie_word_embeddings:  # the head is not the embeddings any more
            network.config.tie_word_embeddings = False
            network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.clone())
        second = tensors[key.replace(".lora_A.", ".lora_B.")]
        network.get_submodule(name).weight += spec.alpha / spec.rank * second @ first


def _opened(original: Path) -> tuple[Any, str]:
    """A GGUF file and its architecture."""
    import gguf

    reader = gguf.GGUFReader(original)
    kind = reader.fields["general.architecture"].contents()
    if kind not in ARCHITECTURES:
        raise SettingsError(f"{original} is of the architecture {kind}; those that can be written are {ARCHITECTURES}")
    return reader, kind


def _check_base(network: Any, original: Path) -> None:
    """Compare a layer of the base model with that of its GGUF file, as far as it is not quantised."""
    import gguf

    reader, kind = _opened(original)
    ours = _named(network, kind)
    for each in reader.tensors:
        if each.name.startswith("blk.0.") and each.tensor_type.name in _EXACT and each.name in ours:
            values, own = gguf.quants.dequantize(each.data, each.tensor_type), ours[each.name]
            if values.shape != own.shape or np.linalg.norm(values - own) > _ROUNDING * np.linalg.norm(own):
                raise SettingsError(f"{original} is of another model: its {each.name} has other values or rows")


def write_gguf(network: Any, tokenizer: Any, original: Path, file: Path, dtype: str) -> None:
    """Write a GGUF file: metadata and vocabulary of the base model's own, `original`, and the weights of `network`.

    Matrices get the dtype, vectors stay in float32. The end of a turn and the chat template are the tokenizer's.

    Raises:
        SettingsError: `original` is of another model, or of a kind that cannot be written.
    """
    import gguf

    reader, kind = _opened(original)
    theirs = {each.name: each for each in reader.tensors}
    ours = _named(network, kind)
    for name, tensor in ours.items():
        if name in theirs and tuple(reversed(theirs[name].shape.tolist())) != tensor.shape:
            raise SettingsError(f"{original} is of another model: its {name} has the shape {theirs[name].shape}")
    if missing := [name for name, each in theirs.items() if name not in ours and len(each.shape) > 1]:
        raise SettingsError(f"{original} is of another model: the trained one has no {missing[0]}")
    writer = gguf.GGUFWriter(file, kind)
    _copy_metadata(reader, writer, tokenizer, dtype)
    for name, tensor in ours.items():
        to = gguf.GGMLQuantizationType[DTYPES[dtype][0] if tensor.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor, to), raw_dtype=to)
    for name, each in theirs.items():  # what no parameter is, such as frequencies of positions
        if name not in ours:
            writer.add_tensor(name, each.data, raw_dtype=each.tensor_type)
    _finish(writer)


def write_gguf_adapter(folder: Path, checkpoints: Path, state: str, file: Path, dtype: str) -> None:
    """Write the adapter of a checkpoint of the model in `folder` as llama.cpp's `--lora` reads it.

    Raises:
        RequestError: there is no such checkpoint below the folder `checkpoints`.
        SettingsError: all weights were trained, or the head of a model that shares it with the embeddings, of which
            llama.cpp knows no adapter; or the model is of an architecture that cannot be written.
    """
    import gguf
    from transformers import AutoConfig

    spec, tensors = _read(folder, checkpoints, state)
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    kind = config.model_type
    if spec.full:
        raise SettingsError("all weights were trained, so there is no adapter; leave out --adapter")
    if kind not in ARCHITECTURES:
        raise SettingsError(f"the model is of the architecture {kind}; those that can be written are {ARCHITECTURES}")
    if config.tie_word_embeddings and any(key.startswith(f"{UNEMBED}.") for key in tensors):
        raise SettingsError(
            "an adapter of a head that the model shares with its embeddings cannot be written: llama.cpp has none. "
            "Leave out --adapter, or train with --training.train_unembed false"
        )
    writer = gguf.GGUFWriter(file, kind)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, spec.alpha)
    architecture = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    to = gguf.GGMLQuantizationType[DTYPES[dtype][0]]
    for key, tensor in tensors.items():
        module, _, half = key.removesuffix(".weight").rpartition(".lora_")
        values = tensor.float().numpy()
        if half == "B":
            values = _rotated(config, kind, module, values)
        writer.add_tensor(
            f"{names.get_name(module)}.weight.lora_{half.lower()}", gguf.quants.quantize(values, to), raw_dtype=to
        )
    _finish(writer)


def _copy_metadata(reader: Any, writer: Any, tokenizer: Any, dtype: str) -> None:
    import gguf

    replaced = {
        "tokenizer.ggml.eos_token_id": (tokenizer.eos_token_id, gguf.GGUFValueType.UINT32, None),
        "tokenizer.chat_template": (tokenizer.chat_template, gguf.GGUFValueType.STRING, None),
        "general.file_type": (gguf.LlamaFileType[DTYPES[dtype][1]].value, gguf.GGUFValueType.UINT32, None),
    }
    kept = {
        name: (each.contents(), each.types[0], each.types[-1] if each.types[0] is gguf.GGUFValueType.ARRAY else None)
        for name, each in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    for name, (value, kind, of_elements) in {**kept, **replaced}.items():
        if value is not None:
            writer.add_key_value(name, value, kind, sub_type=of_elements)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(network: Any, kind: str) -> dict[str, np.ndarray]:
    """The parameters in float32 under the names of GGUF. A tied head is none."""
    import gguf

    config = network.config.get_text_config()
    architecture = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found = {}
    for key, parameter in network.named_parameters():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise SettingsError(f"the GGUF file is of another model: {kind} has no {key}")
        found[name] = _rotated(config, kind, key, parameter.detach().float().numpy())
    return found


def _rotated(config: Any, kind: str, key: str, values: np.ndarray) -> np.ndarray:
    """The rows of a parameter in the order of llama.cpp, which is that of the GGUF's architecture `kind`."""
    if kind == "llama" and ".self_attn." in key and ("q_proj" in key or "k_proj" in key):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        values = _interleaved(values, heads)
    return np.ascontiguousarray(values)


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp rotates them: pairs side by side, where transformers has them in halves."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
