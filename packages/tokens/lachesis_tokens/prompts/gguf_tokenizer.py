"""The tokenizer of a GGUF file as a transformers tokenizer, so that prompts have the served model's ids.

It supports byte-level BPE with the pre-tokenizers listed here. An unknown one is an error: another pre-tokenizer would
split text differently and give ids that the model never saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backends.lazy import quiet_imports
from lachesis_tokens.prompts.gguf_metadata import GGUFError, read_metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4
"""Token types: control tokens, which text never contains, and user-defined tokens, which always match as a whole."""
_ROLES: Final[Mapping[str, str]] = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3: Final = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def tokenizer_from_gguf(path: str | Path, *, template: str | Path | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of the model in `path`, as llama.cpp uses it.

    `template` is a chat template or its path. The default is the file's template, if it has one. Raises `GGUFError` if
    the file is not GGUF, or if its tokenizer cannot be rebuilt exactly.
    """
    with quiet_imports():  # transformers warns that there is no PyTorch, which nothing here needs
        from transformers import PreTrainedTokenizerFast

    path = Path(path)
    metadata = read_metadata(path)
    tokens: list[str] = _wanted(metadata, "tokens", path)
    roles = {
        name: tokens[number]
        for role, name in _ROLES.items()
        if isinstance(number := metadata.get(f"tokenizer.ggml.{role}_token_id"), int) and number < len(tokens)
    }
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=_build(metadata, tokens, path),
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template") if template is None else _text_of(template),
        **({"model_max_length": context} if isinstance(context, int) else {}),
        **roles,
    )
    return tokenizer


def _build(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    advice = "set openai.tokenizer_name to that of the original model, or openai.engine to chat to play without tokens"
    if kind != "gpt2":
        raise GGUFError(
            path, f"its tokenizer is of kind {kind!r}, and only byte-level BPE ('gpt2') is supported", advice
        )
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise GGUFError(path, f"its pre-tokenizer {pre!r} is not among those known ({known})", advice)
    merges = [tuple(merge.split(" ", 1)) for merge in _wanted(metadata, "merges", path)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    ignore_merges = pre in _WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    of_type = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in of_type if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in of_type if kind == _USER_DEFINED])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and isinstance(bos, int):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="BOS $A", pair="BOS $A BOS $B", special_tokens=[("BOS", bos)]
        )
    return tokenizer


def _gpt2() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_PRE_TOKENIZERS: Final[Mapping[str, Callable[[], PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "qwen2": _split_by(_QWEN2),
    "llama-bpe": _split_by(_LLAMA3),
}
"""By `tokenizer.ggml.pre`."""
_WHOLE_WORDS_FIRST: Final = frozenset({"llama-bpe"})
"""Pre-tokenizers whose models look up a whole word in the vocabulary before they merge."""


def _wanted(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not found:
        raise GGUFError(path, f"it has no tokenizer.ggml.{key}", "give a file with the whole model, tokenizer included")
    return found


def _text_of(template: str | Path) -> str:
    """The template, or the text of its file. A template has braces or line breaks, a path has none."""
    if isinstance(template, Path) or not ("{" in template or "\n" in template):
        return Path(template).read_text(encoding="utf-8")
    return template
