"""Makes the model folders of `tiny` and `smollm2`."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Final

from backends.errors import SettingsError
from lachesis_tokens.templates.chat_template import read_template

_LOG = logging.getLogger(__name__)

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Tokens of `tiny` above its 256 bytes."""


def make_model(name: str, folder: Path) -> None:
    """Make the model of this name in a folder that exists.

    Raises:
        ImportError: torch or transformers is not installed.
        SettingsError: the file with its weights is not on this machine.
    """
    (_make_tiny if name == "tiny" else _make_smollm2)(folder)


def _make_smollm2(folder: Path) -> None:
    from lachesis_tokens.prompts.gguf_folder import convert_gguf
    from lachesis_tokens.prompts.smollm2_file import smollm2_file

    try:
        gguf = smollm2_file()
    except FileNotFoundError as error:
        raise SettingsError(f"model 'smollm2': {error}") from None
    _LOG.warning("smollm2: converting %s to %s, once, about a minute ...", gguf.name, folder.parent)
    began = time.monotonic()
    # The file names <|im_start|> as its end token; a turn of this model ends with <|im_end|>.
    count = convert_gguf(gguf, folder, read_template("hermes"), end_of_turn="<|im_end|>")
    _LOG.warning("smollm2: %.0fM parameters in %.0f s", count / 1e6, time.monotonic() - began)


def _make_tiny(folder: Path) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = _byte_tokenizer()
    config = Qwen3Config(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,  # with a tied head a random model of this size learns nothing visible
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> Any:
    """Token `b` is the byte `b`; `SPECIAL_TOKENS` come after them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in _byte_characters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=read_template("hermes"),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(256 + place) for place, byte in enumerate(shifted)}
