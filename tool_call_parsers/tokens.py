"""Completions given as token ids: which markup the model wrote as special tokens, and where every token stands.

A marker that the tokenizer knows as an added token counts only as that token; the same characters spelled out of
ordinary tokens are plain text, as when a model quotes its own format. `TokenMap.align` therefore gives the parsers a
*masked* text: the same length, with every spelled-out marker replaced character by character by private-use
characters. Positions are those of the text, and `Aligned.unmask` undoes it in whatever was cut out.

    tokens = TokenMap(tokenizer)                    # once per tokenizer, shared between threads
    aligned = tokens.align(None, completion_ids)
    parsed = parser.parse(aligned.masked)           # then unmask its texts and look up token spans
    aligned.token_span(start, end)
"""

from __future__ import annotations

import json
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Protocol, TypeAlias

REPLACEMENT: Final = "\ufffd"
_MASK_BASE: Final = 0xF0000
_ESCAPE_BASE: Final = 0x100000
_ESCAPE_COUNT: Final = 0xFFFE
_PRIVATE: Final = re.compile("[\U000f0000-\U0010ffff]")
_PRIVATE_ESCAPE: Final = re.compile(r"\\U(000f[0-9a-f]{4}|0010[0-9a-f]{4})")
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_CLOSE_STEPS: Final = 8
_WAIT: Final = -1
"""The text so far agrees, and more of it must come."""
_MISFIT: Final = -2
"""The text does not agree, or the tokens are no whole characters yet."""
_ANCHOR_CANDIDATES: Final = 2048
_DECODE_OPTIONS: Final[tuple[dict[str, bool], ...]] = (
    {"skip_special_tokens": False, "clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False},
    {"skip_special_tokens": False, "clean_up_tokenization_spaces": False},
    {"skip_special_tokens": False},
    {},
)

_Trie: TypeAlias = dict[str, Any]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is needed here, which a `tokenizers.Tokenizer` has as well.

    Besides `decode`, special tokens are read from whichever of `get_added_vocab()`, `added_tokens_decoder`,
    `get_added_tokens_decoder()` and `all_special_ids` with `all_special_tokens` there is.
    """

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """The text of token ids."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """A completion as text and as tokens. Offsets count characters and are the same in `text` and `masked`."""

    text: str
    """The completion as it decodes."""
    masked: str
    """`text` with every marker that is not a special token's made unrecognisable. Same length."""
    starts: list[int]
    """Offset of every token, and `len(text)`. A token that begins within a character stands at that character."""
    _ends: list[int] = field(repr=False)
    _originals: Mapping[str, str] = field(repr=False)

    def unmask(self, s: str) -> str:
        """Text cut out of `masked`, from anywhere and of any length, as it stands in `text`."""
        return _unmask(s, self._originals)

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """The smallest half-open range of tokens that covers the characters `start:end`.

        Tokens without text at the edges stay outside; an empty range of characters gives an empty range of tokens.
        """
        return _token_span(self.starts, self._ends, start, end)


class TokenMap:
    """The special tokens of one tokenizer, and how text aligns with its tokens.

    Makes no difference between special tokens and other added tokens: models write `<tool_call>` as one either way.
    Added tokens of blanks or of letters and digits alone are never masked, since they are words and not markup.
    Fixed after construction, but for a memo of what single tokens decode to; safe to share between threads.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the special tokens. TypeError when `tokenizer` cannot decode or does not tell its special tokens."""
        if not callable(getattr(tokenizer, "decode", None)):
            raise TypeError(f"tokenizer: {type(tokenizer).__name__} has no decode()")
        self._special = _special_tokens(tokenizer)
        probe = [next(iter(self._special), 0)]
        decoder = _plain_decoder(tokenizer)
        for options in _DECODE_OPTIONS:
            try:
                decoder.decode(probe, **options)
            except TypeError:
                continue
            break
        else:
            raise TypeError(f"tokenizer: {type(tokenizer).__name__}.decode() takes no list of token ids")
        self._options = options
        self.tokenizer = tokenizer
        """What the tokens are of."""
        self._decoder = decoder
        self._names: Callable[[int], Any] | None = getattr(tokenizer, "convert_ids_to_tokens", None) or getattr(
            tokenizer, "id_to_token", None
        )
        self._concatenates = _concatenates(decoder)
        self._pieces: dict[int, tuple[str, bool]] = {}
        self._whole: dict[int, str] = {}
        self._anchor, self._anchor_text = self._find_anchor()
        markers = {name for name in self._special.values() if _is_markup(name)}
        self._trie: _Trie = {}
        for marker in markers:
            node = self._trie
            for character in marker:
                node = node.setdefault(character, {})
            node[""] = marker
        characters = sorted({character for marker in markers for character in marker})
        self._masks = {ord(character): _MASK_BASE + k for k, character in enumerate(characters)}
        self._originals = {chr(mask): chr(character) for character, mask in self._masks.items()}
        # Two characters, so that every "<" of a page of HTML is not looked at. Hit or tail: a marker may just begin.
        heads = sorted({re.escape(marker[:2]) for marker in markers})
        tails = sorted({re.escape(marker[0]) for marker in markers})
        self._candidate = re.compile("|".join([*heads, *(f"{tail}\\Z" for tail in tails)])) if markers else None

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a special or added token's."""
        return token_id in self._special

    def align(self, text: str | None, token_ids: Sequence[int]) -> Aligned:
        """Place every token in the completion's text; `text` None takes what the ids decode to.

        A trailing character that is cut off within its bytes may be U+FFFD in `text` or missing from it. ValueError
        naming `token_ids` when they do not decode to `text`.
        """
        ids = _as_ids(token_ids)
        pieces = self._whole_texts(ids)
        joined = "".join(pieces) if pieces is not None else None
        if text is None:
            told = joined is not None and self._concatenates and REPLACEMENT not in joined
            text = joined if joined is not None and told else self._decode(ids)
        stream = TokenStream(self)
        if pieces is not None and joined == text:
            stream.take_whole(text, ids, pieces)
        else:
            stream.feed(text, ids)
        return stream.finish()

    def _decode(self, ids: list[int]) -> str:
        try:
            return str(self._decoder.decode(ids, **self._options))
        except (TypeError, ValueError, OverflowError, LookupError) as error:
            raise ValueError(f"token_ids cannot be decoded: {error}") from error

    def _decode_within(self, ids: list[int]) -> str:
        """The text of tokens that follow others: a sentencepiece decoder drops the blank that opens a text."""
        if self._anchor is None:
            return self._decode(ids)
        return self._decode([self._anchor, *ids])[len(self._anchor_text) :]

    def _piece(self, token_id: int) -> tuple[str, bool]:
        """A token's text, and whether its text depends on the tokens around it since it holds parts of characters."""
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self._decode_within([token_id])
            special = token_id in self._special
            # A byte token counts with its neighbours even where its byte is a character: decoders of that kind
            # give up a whole run of byte tokens when one of its bytes is wrong.
            partial = not special and (REPLACEMENT in text or _BYTE_TOKEN.fullmatch(self._name(token_id)) is not None)
            piece = self._pieces[token_id] = text, partial
        return piece

    def _whole_texts(self, ids: list[int]) -> list[str] | None:
        """The texts of tokens; None where one of them holds parts of characters."""
        try:
            return list(map(self._whole.__getitem__, ids))
        except KeyError:  # seen for the first time, or a part of a character
            pieces = zip(ids, map(self._piece, ids), strict=True)
            self._whole |= {token_id: piece for token_id, (piece, partial) in pieces if not partial}
        return [self._whole[token_id] for token_id in ids] if self._whole.keys() >= set(ids) else None

    def _name(self, token_id: int) -> str:
        if self._names is None:
            return ""
        try:
            return str(self._names(token_id))
        except (TypeError, ValueError, OverflowError, LookupError):
            return ""

    def _find_anchor(self) -> tuple[int | None, str]:
        """An ordinary token that is a word's part with and without a token before it."""
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


class TokenStream:
    """A completion aligned while it arrives: `feed` deltas, then `finish`.

    The deltas' texts make up the completion's text and their ids its ids, but need not keep step: a server may hold
    text back until a character is whole, and tokens may arrive before or after their text. What `feed` returned makes
    up a beginning of `finish().masked`; the rest of it is what was still uncertain. One stream serves one completion.
    """

    __slots__ = (
        "_complete",
        "_ends",
        "_escapes",
        "_failed",
        "_genuine",
        "_hits",
        "_ids",
        "_map",
        "_masked",
        "_next",
        "_open",
        "_open_text",
        "_parts",
        "_pending",
        "_pos",
        "_scanned",
        "_starts",
        "_tail",
        "_tail_at",
    )

    def __init__(self, tokens: TokenMap) -> None:
        """A stream over the tokens of `tokens`."""
        self._map = tokens
        self._parts: list[str] = []
        self._ids: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._next = 0  # the first token that has no place yet, but for those in _open
        self._open: list[int] = []  # tokens with parts of characters, waiting for the rest
        self._open_text = 0, ""  # how many of them were decoded last, and their text
        self._pos = 0  # where the next token stands
        self._tail = ""  # the text from _tail_at on, but for what is in _pending
        self._tail_at = 0
        self._pending: list[str] = []
        self._scanned = 0  # up to here the text is in _masked
        self._genuine: list[tuple[int, int]] = []  # special tokens' own text that scanning has not passed
        self._hits: list[tuple[int, int]] = []  # markers' text, whosesoever, likewise
        self._masked: list[str] = []
        self._escapes: dict[str, str] = {}
        self._complete = False  # no more text will come
        self._failed = False

    def feed(self, text: str, token_ids: Sequence[int]) -> str:
        """Take a delta; returns the masked text that is certain now.

        Uncertain are text whose tokens have not come, tokens that end within a character, and the beginning of what
        may become a spelled-out marker. Never raises on ids that do not fit the text: then no more is certain, and
        `finish` tells.
        """
        self._ids.extend(_as_ids(token_ids))
        if text:
            self._parts.append(text)
            self._pending.append(text)
        if not self._failed:
            self._place()
        return "" if self._failed else self._scan()

    def take_whole(self, text: str, ids: list[int], texts: list[str]) -> None:
        """Take a whole completion at once: tokens that are whole characters, and whose `texts` make up `text`."""
        self._ends = list(accumulate(map(len, texts)))
        self._starts = [0, *self._ends[:-1]] if ids else []
        special = self._map._special
        for place in [place for place, token_id in enumerate(ids) if token_id in special]:
            name, start = special[ids[place]], self._starts[place]
            if name and (offset := texts[place].find(name)) >= 0:
                self._genuine.append((start + offset, start + offset + len(name)))
        self._parts, self._ids, self._next = [text], ids, len(ids)
        self._tail, self._pos = text, len(text)

    def finish(self) -> Aligned:
        """The whole completion. ValueError naming `token_ids` when they do not decode to the text."""
        text = "".join(self._parts)
        self._complete = True
        if not self._failed:
            self._place()
        if self._failed or self._pos != len(text) or self._next != len(self._ids) or self._open:
            self._place_coarsely(text)
        self._scan()
        return Aligned(
            text,
            "".join(self._masked),
            [*self._starts, len(text)],
            self._ends,
            self._originals(),
        )

    def unmask(self, s: str) -> str:
        """Text cut out of what `feed` returned so far, as it stands in the completion."""
        return _unmask(s, self._originals())

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """`Aligned.token_span` for characters that `feed` has returned."""
        return _token_span(self._starts, self._ends, start, end)

    def _originals(self) -> Mapping[str, str]:
        masks = self._map._originals
        return masks | {code: original for original, code in self._escapes.items()} if self._escapes else masks

    def _place(self) -> None:
        """Give a place to every token whose text is there."""
        ids, count = self._ids, len(self._ids)
        if self._next == count and not (self._complete and self._open):
            return
        if self._pending:
            self._tail = self._tail[self._scanned - self._tail_at :] + "".join(self._pending)
            self._tail_at = self._scanned
            self._pending.clear()
        tail, base = self._tail, self._tail_at
        special, piece_of, starts, ends = self._map._special, self._map._piece, self._starts, self._ends
        try:
            while self._next < count:
                token_id = ids[self._next]
                piece, partial = piece_of(token_id)
                at = self._pos - base
                if at == len(tail) and piece and not self._complete:
                    return
                if partial:
                    self._open.append(token_id)
                    if self._close(ended=False) == _WAIT:
                        self._open.pop()  # tried again with more text, before a further token joins
                        return
                    self._next += 1
                    continue
                if self._open:
                    length = self._close(ended=True)
                    if length < 0:
                        self._failed = length == _MISFIT
                        return
                    at = self._pos - base
                length = len(piece) if tail.startswith(piece, at) else self._fit(piece)
                if length < 0:
                    self._failed = length == _MISFIT
                    return
                starts.append(self._pos)
                ends.append(self._pos + length)
                name = special.get(token_id)
                if name:
                    offset = tail.find(name, at, at + length)
                    if offset >= 0:
                        self._genuine.append((base + offset, base + offset + len(name)))
                self._pos += length
                self._next += 1
            if self._complete and self._open:
                self._close(ended=True, last=True)
        except ValueError:
            self._failed = True

    def _fit(self, piece: str, *, last: bool = False) -> int:
        """How many characters of the text `piece` is, else `_WAIT` or `_MISFIT`."""
        at = self._pos - self._tail_at
        available = len(self._tail) - at
        readings = [piece]
        if self._pos == 0 and piece.startswith(" "):
            readings.append(piece[1:])  # as a sentencepiece decoder has it
        rest = self._tail[at : at + len(piece)]
        for reading in readings:
            if rest.startswith(reading) and (available or not piece):
                return len(reading)
            if reading.startswith(rest) and not self._complete:
                return _WAIT
        if last:
            # A character cut off at the very end: decoders write U+FFFD, servers often write nothing.
            for reading in readings:
                if reading.endswith(REPLACEMENT) and self._tail[at:] == reading[:-1]:
                    return len(reading) - 1
        return _MISFIT

    def _close(self, *, ended: bool, last: bool = False) -> int:
        """Place the open tokens if they end with a character (`ended`: however they end); see `_fit`."""
        count = len(self._open)
        # Decoding after every token would be quadratic where characters never end, as in a run of broken bytes.
        if not ended and count > _CLOSE_STEPS and count & (count - 1):
            return _MISFIT
        if self._open_text[0] != count:
            self._open_text = count, self._map._decode_within(self._open)
        text = self._open_text[1]
        if not ended and text.endswith(REPLACEMENT):
            return _MISFIT
        length = self._fit(text, last=last)
        if length < 0:
            return length
        begin, end = self._pos, self._pos + length
        skipped = 0 if last else len(text) - length
        at = edge = begin
        for k in range(1, count):
            self._starts.append(at)
            if count > _CLOSE_STEPS:
                self._ends.append(end)
                continue
            part = self._map._decode_within(self._open[:k])
            edge = min(max(begin + len(part) - skipped, edge), end)
            self._ends.append(edge)
            at = max(at, min(edge - part.endswith(REPLACEMENT), end - 1))
        self._starts.append(at)
        self._ends.append(end)
        self._pos = end
        self._open.clear()
        self._open_text = 0, ""
        return length

    def _place_coarsely(self, text: str) -> None:
        """Place the special tokens by their text, and the others between them, for decoders that join tokens freely."""
        tokens, ids = self._map, self._ids
        decoded = tokens._decode(ids)
        if decoded != text:
            where = next(
                (k for k, (a, b) in enumerate(zip(decoded, text, strict=False)) if a != b), min(len(decoded), len(text))
            )
            excerpts = [repr(side[max(where - 20, 0) : where + 20]) for side in (text, decoded)]
            raise ValueError(
                f"token_ids do not decode to the text: from character {where} the text has {excerpts[0]}, "
                f"the ids {excerpts[1]}"
            )
        self._starts, self._ends, genuine = [], [], []
        at = group = 0
        for token_id in [*ids, None]:
            name = tokens._special.get(token_id) if token_id is not None else None
            found = text.find(name, at) if name else (len(text) if token_id is None else -1)
            if found < 0:
                group += 1
                continue
            self._starts += [at] * group
            self._ends += [found] * group
            group = 0
            if token_id is not None and name:
                self._starts.append(found)
                at = found + len(name)
                self._ends.append(at)
                genuine.append((found, at))
        self._genuine = [span for span in genuine if span[1] > self._scanned]
        self._tail, self._tail_at, self._pos = text[self._scanned :], self._scanned, len(text)
        self._pending.clear()

    def _scan(self) -> str:
        """Mask the text up to the last placed token, or to where a marker may be beginning; returns what was added."""
        begin, limit = self._scanned - self._tail_at, self._pos - self._tail_at
        if limit <= begin:
            return ""
        pattern, trie, base = self._map._candidate, self._map._trie, self._tail_at
        window = self._tail[:limit]
        at, stop = begin, limit
        while pattern is not None and (match := pattern.search(window, at)):
            at = match.start()
            node, k, longest = trie, at, 0
            while k < limit and (step := node.get(window[k])) is not None:
                node = step
                k += 1
                if "" in node:
                    longest = k
            if k == limit and not self._complete and (len(node) > 1 or "" not in node):
                stop = at
                break
            if longest:
                self._hits.append((base + at, base + longest))
            at += 1
        piece = window[begin:stop]
        if self._hits:
            piece = self._mask(piece)
        if not piece.isascii() and _PRIVATE.search(window, begin, stop):
            piece = self._escape(piece, window[begin:stop])
        self._scanned = base + stop
        for spans in (self._hits, self._genuine):
            if spans and spans[0][1] <= self._scanned:
                spans[:] = [span for span in spans if span[1] > self._scanned]
        self._masked.append(piece)
        return piece

    def _mask(self, piece: str) -> str:
        """`piece`, which stands where scanning has got to, with the hits masked, but for special tokens' own text."""
        begin, end = self._scanned, self._scanned + len(piece)
        out: list[str] = []
        done = at = begin
        genuine, g = self._genuine, 0
        for low, high in self._hits:
            at, high = max(low, at), min(high, end)
            while at < high:
                while g < len(genuine) and genuine[g][1] <= at:
                    g += 1
                own, own_end = genuine[g] if g < len(genuine) else (high, high)
                if own <= at:
                    at = own_end
                    continue
                upto = min(high, own)
                out.append(piece[done - begin : at - begin])
                out.append(piece[at - begin : upto - begin].translate(self._map._masks))
                done = at = upto
        out.append(piece[done - begin :])
        return "".join(out)

    def _escape(self, piece: str, original: str) -> str:
        """Private-use characters that are the text's own give way to others, in their order of appearance."""
        escaped = list(piece)
        for match in _PRIVATE.finditer(original):
            character = match[0]
            if character not in self._escapes and len(self._escapes) < _ESCAPE_COUNT:
                self._escapes[character] = chr(_ESCAPE_BASE + len(self._escapes))
            escaped[match.start()] = self._escapes.get(character, character)
        return "".join(escaped)


def _unmask(s: str, originals: Mapping[str, str]) -> str:
    return s if s.isascii() else _PRIVATE.sub(lambda match: originals.get(match[0], match[0]), s)


def unmask_json(s: str, unmask: Callable[[str], str]) -> str:
    """`s` unmasked as JSON text: what a mask stands for may be a quote, and masks stand in strings."""
    if s.isascii():
        return s
    return _PRIVATE.sub(lambda match: json.dumps(unmask(match[0]), ensure_ascii=False)[1:-1], s)


def unmask_repr(s: str, unmask: Callable[[str], str]) -> str:
    """`s` unmasked, masks that `repr` has written as escapes among it."""
    return _PRIVATE_ESCAPE.sub(lambda match: unmask(chr(int(match[1], 16))), unmask(s))


def _token_span(starts: list[int], ends: list[int], start: int, end: int) -> tuple[int, int]:
    first = bisect_right(ends, start)
    return first, max(first, bisect_left(starts, end, 0, len(ends))) if end > start else first


def _special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Id to text of the special and added tokens."""
    special: dict[int, str] = {}
    told = False
    for source in ("added_tokens_decoder", "get_added_tokens_decoder"):
        table = getattr(tokenizer, source, None)
        table = table() if callable(table) else table
        if isinstance(table, Mapping):
            told = True
            special |= {int(k): str(getattr(token, "content", token)) for k, token in table.items()}
    if callable(added := getattr(tokenizer, "get_added_vocab", None)):
        told = True
        special |= {int(token_id): str(name) for name, token_id in added().items()}
    ids, names = getattr(tokenizer, "all_special_ids", None), getattr(tokenizer, "all_special_tokens", None)
    if ids is not None and names is not None:
        told = True
        special |= {int(token_id): str(name) for token_id, name in zip(ids, names, strict=False)}
    if not told:
        raise TypeError(
            f"tokenizer: {type(tokenizer).__name__} tells no special tokens "
            "(get_added_vocab, added_tokens_decoder, or all_special_ids with all_special_tokens)"
        )
    return special


def _concatenates(tokenizer: Any) -> bool:
    """Whether the text of tokens is that of each, one behind the other, as long as each is whole characters."""
    # No other decoder does so in every case: most of them know where a text or a word begins.
    kind = type(getattr(tokenizer, "decoder", None))
    return kind.__name__ == "ByteLevel" and kind.__module__.startswith("tokenizers")


def _plain_decoder(tokenizer: Any) -> Any:
    """What decodes for a tokenizer: where transformers only wraps another one, that, for a fraction of the time."""
    own = getattr(type(tokenizer), "_decode", None)
    wrapped = getattr(tokenizer, "backend_tokenizer", None)
    wraps = getattr(own, "__module__", "").startswith("transformers.tokenization_utils")
    return wrapped if wrapped is not None and wraps else tokenizer


def _is_markup(name: str) -> bool:
    """Whether a token's text is a marker rather than a word or blanks, which code and prose are full of."""
    return (
        len(name) > 1
        and not all(character.isalnum() or character.isspace() for character in name)
        and not _PRIVATE.search(name)
    )


def _as_ids(token_ids: Iterable[Any]) -> list[int]:
    ids = list(token_ids)
    if set(map(type, ids)) <= {int}:
        return ids
    try:
        return [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise TypeError(f"token_ids must be integers: {error}") from None
