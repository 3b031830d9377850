"""Text to ids, so that the ids of a part equal its ids inside the whole text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from backends.text import without_lone_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEIGHBOURS: Final = ("\n", "x", ".", "1")
_SAMPLES: Final = ("word", " word", "[INST] word", "\nword", "  word")
_FINGERPRINT: Final = "Tokens of\n\tthis text: naïve 東京 🙂 {\"a\": [1, 2.5e-3]} don't I'LL\r\n\n  for i in range(10):"


class TextEncoder:
    """Encodes without begin- and end-of-sequence tokens, and without an added blank inside other text.

    SentencePiece-like tokenizers put a blank before each text; text after other text must have none. `added` maps the
    text of added tokens, which match as a whole, to their ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._fast: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = tokenizer.added_tokens_decoder
        self.added: dict[str, int] = {str(token): token_id for token_id, token in decoder.items()}
        self.special = frozenset(str(token) for token in decoder.values() if token.special)
        """The texts of those that the tokenizer marks as special."""
        self._texts: dict[int, str] = {token_id: text for text, token_id in self.added.items()}
        self._writes_blank = any(self.encode(text) != self._inside(text) for text in _SAMPLES)

    def encode(self, text: str, cuts: Sequence[int] = ()) -> list[int]:
        """The ids that `apply_chat_template(tokenize=True)` gives for a rendering.

        Lone surrogates, which models write as escapes and no tokenizer accepts, become U+FFFD. No token contains one of
        the offsets `cuts`.
        """
        if cuts:
            return [*self.encode(text[: cuts[0]]), *self._rest(text, cuts)]
        try:
            return self._encode(text)
        except (TypeError, UnicodeEncodeError):
            replaced = without_lone_surrogates(text)
            if replaced == text:
                raise
            return self._encode(replaced)

    def _encode(self, text: str) -> list[int]:
        fast = self._fast
        # The Python layer costs more than the encoding. It is needed to reset options that an earlier caller set.
        if fast is None or fast.truncation or fast.padding or fast.encode_special_tokens:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        # The same ids as `encode`, which also computes offsets and takes half as long again.
        ids: list[int] = fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_after(self, text: str, last: int | None = None, cuts: Sequence[int] = ()) -> list[int]:
        """The ids of text after other text. `last` is the added token right before it, if there is one."""
        if cuts:
            return [*self.encode_after(text[: cuts[0]], last), *self._rest(text, cuts)]
        if not text:
            return []
        before = self._texts.get(last) if last is not None else None
        if before is not None:  # an added token may consume the whitespace after it
            ids = self.encode(before + text)
            if ids[:1] == [last]:
                return ids[1:]
        return self._inside(text) if self._writes_blank else self.encode(text)

    def _rest(self, text: str, cuts: Sequence[int]) -> list[int]:
        return [number for start, end in pairwise((*cuts, len(text))) for number in self.encode_after(text[start:end])]

    def token(self, token_id: int) -> str:
        """The text of an added token, "" for any other."""
        return self._texts.get(token_id, "")

    def fingerprint(self) -> bytes:
        """A digest that is equal for tokenizers with the same vocabulary and the same ids of a sample text."""
        facts = [len(self._tokenizer), sorted(self.added.items()), self.encode(_FINGERPRINT)]
        return blake2b(json.dumps(facts).encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def _inside(self, text: str) -> list[int]:
        encode: Callable[[str], list[int]] = self.encode
        for neighbour in _NEIGHBOURS:
            alone, both = encode(neighbour), encode(neighbour + text)
            if both[: len(alone)] == alone:
                return both[len(alone) :]
        return encode(text)
