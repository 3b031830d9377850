"""Small real tokenizers: a byte-level BPE, and one with the design of Llama 2's."""

from __future__ import annotations

from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>", '<|"|>', "<|a", "b|>"]
ADDED = ["\n\n", "  ", "word"]  # added tokens that are not markers
CORPUS = [
    "The quick brown fox calls get_weather with Oslo, Bergen and Tromsø.",
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}',
    "你好，世界。天气怎么样？今天天气很好。",
    "emoji 🙂🙃 and 👩‍👩‍👧‍👦 families, naïve café",
    "<tool_call> tool_call </tool_call> think <think> im_end",
] * 3


def byte_level() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL[:2]])
    raw.add_tokens([AddedToken(name, special=False, normalized=False) for name in SPECIAL[2:] + ADDED])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")


def sentencepiece_like() -> Any:
    """The design of Llama 2's tokenizer: "▁" for blanks, bytes as a last resort, a decoder that strips one blank."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    words = [" ", "▁", *'abcdefghijklmnopqrstuvwxyz{}":,.<>/_|', "▁th", "▁the", "to", "ol", "tool", "ca", "ll", "call"]
    vocabulary: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for name in [*(f"<0x{byte:02X}>" for byte in range(256)), *words]:
        vocabulary.setdefault(name, len(vocabulary))
    merges = [("t", "o"), ("o", "l"), ("to", "ol"), ("c", "a"), ("l", "l"), ("ca", "ll")]
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ["<unk>", "<s>", "</s>"]])
    raw.add_tokens([AddedToken(name, special=False, normalized=False) for name in SPECIAL[2:6]])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")


BPE = byte_level()


def spelled(text: str) -> list[int]:
    """The text as ordinary tokens only."""
    return [token.id for token in BPE._tokenizer.model.tokenize(_bytes_as_characters(text))]


def _bytes_as_characters(text: str) -> str:
    from tokenizers import pre_tokenizers

    (pieces,) = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)]
    return "".join(piece for piece, _ in pieces)
