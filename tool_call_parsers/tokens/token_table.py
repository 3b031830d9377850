"""The special tokens of one tokenizer, and the texts of its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any, Final, TypeAlias

from tool_call_parsers.tokens.tokenizer import (
    DECODE_OPTIONS,
    MASK_BASE,
    REPLACEMENT,
    Tokenizer,
    as_ids,
    concatenates,
    is_markup,
    mark,
    never_text,
    plain_decoder,
    special_tokens,
)

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_ANCHOR_CANDIDATES: Final = 2048

_Trie: TypeAlias = dict[str, Any]


class TokenTable:
    """The special tokens of one tokenizer, and the texts of all of its tokens.

    Treats special tokens and other added tokens alike, because models write `<tool_call>` as either.
    Added tokens of only blanks, or only letters and digits, are never masked: they are words and not markers.
    Immutable, except for a cache of decoded tokens; safe to share between threads.

    A *stray* token has no meaning inside a completion: an id without text, and, where `belongs` is given, a token that
    the tokenizer flags as special and whose text does not belong to the format. The ends of a turn are stray before
    the end of the completion.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, belongs: Callable[[str], bool] | None = None, ends: Collection[str] = ()
    ) -> None:
        """Read the special tokens. Raises TypeError if `tokenizer` cannot decode or lists none.

        belongs: whether the text of a special token is a marker of the format.
        ends: the texts of tokens that end a turn.
        """
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(f"tokenizer: {type(tokenizer).__name__} has no decode()")
        self._special = special_tokens(tokenizer)
        probe = [next(iter(self._special), 0)]
        decoder = plain_decoder(tokenizer)
        for options in DECODE_OPTIONS:
            try:
                decoder.decode(probe, **options)
            except TypeError:
                continue
            break
        else:
            raise TypeError(f"tokenizer: {type(tokenizer).__name__}.decode() takes no list of token ids")
        self._options = options
        self.tokenizer = tokenizer
        """The tokenizer."""
        self._decoder = decoder
        self._names: Callable[[int], Any] | None = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(
            tokenizer, "id_to_token", None
        )
        self._concatenates = concatenates(decoder)
        self._pieces: dict[int, tuple[str, bool]] = {}
        self._whole: dict[int, str] = {}
        self._ends = frozenset(token_id for token_id, name in self._special.items() if name in ends)
        self._stray: dict[int, None] = {}
        if belongs is not None:
            foreign = {number for number in never_text(tokenizer) if not belongs(self._special.get(number, ""))}
            self._stray = dict.fromkeys(foreign - self._ends)
        """Stray tokens, without the ends of a turn."""
        self._anchor, self._anchor_text = self._find_anchor()
        markers = {name for name in self._special.values() if is_markup(name)}
        self._trie: _Trie = {}
        for marker in markers:
            node = self._trie
            for character in marker:
                node = node.setdefault(character, {})
            node[""] = marker
        characters = sorted({character for marker in markers for character in marker})
        self._masks = {ord(character): MASK_BASE + k for k, character in enumerate(characters)}
        self._originals = {chr(mask): chr(character) for character, mask in self._masks.items()}
        # Two characters, to skip most "<" of a page of HTML; or one at the end, where a marker may begin.
        heads = sorted({re.escape(marker[:2]) for marker in markers})
        tails = sorted({re.escape(marker[0]) for marker in markers})
        self._candidate = re.compile("|".join([*heads, *(f"{tail}\\Z" for tail in tails)])) if markers else None

    def is_special(self, token_id: int) -> bool:
        """Whether the id belongs to a special or added token."""
        return token_id in self._special

    def whole_text(self, token_ids: Sequence[int]) -> str | None:
        """The text of a completion, if each of its tokens is text of its own and none is stray; else see `align`."""
        ids = as_ids(token_ids)
        pieces = self._whole_texts(ids)
        if pieces is None or not self._concatenates or not self._ends.isdisjoint(ids):
            return None
        joined = "".join(pieces)
        return None if REPLACEMENT in joined else joined

    def marked(self, ids: list[int]) -> str:
        """The decoded ids, special tokens included, with a mark for each id without text."""
        self._whole_texts(ids)
        if self._stray.keys().isdisjoint(ids):
            return self._decode(ids)
        parts: list[str] = []
        for silent, group in groupby(ids, self.is_silent):
            run = list(group)
            if silent:
                parts += map(mark, run)
            else:
                parts.append(self._decode_within(run) if parts else self._decode(run))
        return "".join(parts)

    def is_silent(self, token_id: int) -> bool:
        """Whether the id has no text: it is beyond the vocabulary, or unused in it."""
        return not self._piece(token_id)[0] and token_id in self._stray

    def _decode(self, ids: list[int]) -> str:
        try:
            return str(self._decoder.decode(ids, **self._options))
        except (TypeError, ValueError, OverflowError, LookupError) as error:
            raise ValueError(f"token_ids cannot be decoded: {error}") from error

    def _decode_within(self, ids: list[int]) -> str:
        """The text of tokens after other tokens. A sentencepiece decoder drops the blank at the start of a text."""
        if self._anchor is None:
            return self._decode(ids)
        return self._decode([self._anchor, *ids])[len(self._anchor_text) :]

    def _piece(self, token_id: int) -> tuple[str, bool]:
        """A token's text, and whether it depends on neighbouring tokens because the token holds parts of characters."""
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self._decode_within([token_id]) if self._has_entry(token_id) else ""
            special = token_id in self._special
            if not text and (self._anchor is not None or not self._has_entry(token_id)):
                self._stray[token_id] = None
            # A byte token depends on its neighbours even if its byte is a character: such decoders reject
            # a whole run of byte tokens if one of its bytes is wrong.
            partial = not special and (REPLACEMENT in text or _BYTE_TOKEN.fullmatch(self._name(token_id)) is not None)
            piece = self._pieces[token_id] = text, partial
        return piece

    def _whole_texts(self, ids: list[int]) -> list[str] | None:
        """The texts of tokens; None if one of them holds parts of characters."""
        try:
            return list(map(self._whole.__getitem__, ids))
        except KeyError:  # new, or a part of a character
            pieces = list(zip(ids, map(self._piece, ids), strict=True))
            self._whole |= {
                token_id: piece for token_id, (piece, partial) in pieces if not partial and token_id not in self._stray
            }
        return [self._whole[token_id] for token_id in ids] if self._whole.keys() >= set(ids) else None

    def _name(self, token_id: int) -> str:
        if self._names is None:
            return ""
        try:
            return str(self._names(token_id))
        except (TypeError, ValueError, OverflowError, LookupError):
            return ""

    def _has_entry(self, token_id: int) -> bool:
        """Whether the tokenizer has a token of this id. True where it does not say."""
        if self._names is None:
            return True
        try:
            return self._names(token_id) is not None
        except (IndexError, KeyError):
            return False
        except (OverflowError, TypeError, ValueError):
            return True  # `decode` says what is wrong

    def _find_anchor(self) -> tuple[int | None, str]:
        """An ordinary token with the same text at the start of a text and after another token."""
        for token_id in range(_ANCHOR_CANDIDATES):
            if token_id in self._special or _BYTE_TOKEN.fullmatch(self._name(token_id)):
                continue
            try:
                text = self._decode([token_id])
                if text.isascii() and text.isalpha() and self._decode([token_id, token_id]) == text + text:
                    return token_id, text
            except ValueError:
                continue
        return None, ""
