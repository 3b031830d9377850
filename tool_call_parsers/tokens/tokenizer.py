"""The special tokens of a tokenizer, its way to decode, and masks: private-use characters in place of the characters of
markers that are not tokens.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

MASK_BASE: Final = 0xF0000
ESCAPE_BASE: Final = 0x100000
ESCAPE_COUNT: Final = 0xFFFE
MARK_BASE: Final = 0xF8000
MARK_COUNT: Final = 0x7FF0
MARKED: Final = "\U000ffffd"
"""Stands for the characters of a marked token after the first."""
PRIVATE: Final = re.compile("[\U000f0000-\U0010ffff]")
_PRIVATE_ESCAPE: Final = re.compile(r"\\U(000f[0-9a-f]{4}|0010[0-9a-f]{4})")
REPLACEMENT: Final = "\ufffd"
DECODE_OPTIONS: Final[tuple[dict[str, bool], ...]] = (
    {"skip_special_tokens": False, "clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False},
    {"skip_special_tokens": False, "clean_up_tokenization_spaces": False},
    {"skip_special_tokens": False},
    {},
)
"""Arguments of `decode`. The first that a tokenizer accepts are used."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here. A `tokenizers.Tokenizer` has it as well.

    Besides `decode`, special tokens are read from whichever of `get_added_vocab()`, `added_tokens_decoder`,
    `get_added_tokens_decoder()` and `all_special_ids` with `all_special_tokens` exist.
    """

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """The text of token ids."""
        ...


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Id to text of the special and added tokens."""
    special: dict[int, str] = {}
    listed = False
    for source in ("added_tokens_decoder", "get_added_tokens_decoder"):
        table = getattr(tokenizer, source, None)
        table = table() if callable(table) else table
        if isinstance(table, Mapping):
            listed = True
            special |= {int(k): str(getattr(token, "content", token)) for k, token in table.items()}
    if callable(added := getattr(tokenizer, "get_added_vocab", None)):
        listed = True
        special |= {int(token_id): str(name) for name, token_id in added().items()}
    ids, names = getattr(tokenizer, "all_special_ids", None), getattr(tokenizer, "all_special_tokens", None)
    if ids is not None and names is not None:
        listed = True
        special |= {int(token_id): str(name) for token_id, name in zip(ids, names, strict=False)}
    if not listed:
        raise TypeError(
            f"tokenizer: {type(tokenizer).__name__} lists no special tokens "
            "(get_added_vocab, added_tokens_decoder, or all_special_ids with all_special_tokens)"
        )
    return special


def never_text(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids of the tokens that the tokenizer flags as special: roles, ends of turns, padding, reserved ones."""
    flagged = {int(token_id) for token_id in getattr(tokenizer, "all_special_ids", None) or ()}
    for source in ("added_tokens_decoder", "get_added_tokens_decoder"):
        table = getattr(tokenizer, source, None)
        table = table() if callable(table) else table
        if isinstance(table, Mapping):
            flagged |= {int(token_id) for token_id, token in table.items() if getattr(token, "special", False)}
    return frozenset(flagged)


def mark(token_id: int) -> str:
    """What a text shows in the place of a token without meaning there: U+FFFD and its id. It has no blanks."""
    return f"{REPLACEMENT}[token:{token_id}]"


def concatenates(tokenizer: Any) -> bool:
    """Whether a text is the concatenation of the texts of its tokens, as long as each token is whole characters."""
    # No other decoder does in all cases: most treat the start of a text or a word specially.
    kind = type(getattr(tokenizer, "decoder", None))
    return kind.__name__ == "ByteLevel" and kind.__module__.startswith("tokenizers")


def plain_decoder(tokenizer: Any) -> Any:
    """The decoder of a tokenizer: the one that transformers wraps, if it does, for a fraction of the time."""
    own = getattr(type(tokenizer), "_decode", None)
    wrapped = getattr(tokenizer, "backend_tokenizer", None)
    wraps = getattr(own, "__module__", "").startswith("transformers.tokenization_utils")
    return wrapped if wrapped is not None and wraps else tokenizer


def is_markup(name: str) -> bool:
    """Whether a token's text is a marker rather than a word or blanks, which code and prose contain often."""
    return (
        len(name) > 1
        and not all(character.isalnum() or character.isspace() for character in name)
        and not PRIVATE.search(name)
    )


def as_ids(token_ids: Iterable[Any]) -> list[int]:
    """The ids as plain integers. Raises `TypeError` if one is not an integer."""
    ids = list(token_ids)
    if set(map(type, ids)) <= {int}:
        return ids
    try:
        return [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise TypeError(f"token_ids must be integers: {error}") from None


def unmask_text(s: str, originals: Mapping[str, str]) -> str:
    """`s` with the originals of all masks."""
    return s if s.isascii() else PRIVATE.sub(lambda match: originals.get(match[0], match[0]), s)


def unmask_json(s: str, unmask: Callable[[str], str]) -> str:
    """`s` unmasked inside JSON text, where the original of a mask may need an escape."""
    if s.isascii():
        return s
    return PRIVATE.sub(lambda match: json.dumps(unmask(match[0]), ensure_ascii=False)[1:-1], s)


def unmask_repr(s: str, unmask: Callable[[str], str]) -> str:
    """`s` unmasked, including masks that `repr` has escaped."""
    return _PRIVATE_ESCAPE.sub(lambda match: unmask(chr(int(match[1], 16))), unmask(s))
