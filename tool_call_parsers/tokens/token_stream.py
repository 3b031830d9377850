"""Aligns the tokens of one completion with its text while both arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from tool_call_parsers.tokens.aligned import Aligned, Strays, token_span
from tool_call_parsers.tokens.token_table import TokenTable
from tool_call_parsers.tokens.tokenizer import (
    ESCAPE_BASE,
    ESCAPE_COUNT,
    PRIVATE,
    REPLACEMENT,
    as_ids,
    mark,
    unmask_text,
)

_CLOSE_STEPS: Final = 8
_WAIT: Final = -1
"""The text agrees so far, and more of it must arrive."""
_MISFIT: Final = -2
"""The text does not agree, or the tokens are not whole characters yet."""


@dataclass(slots=True, eq=False)
class TokenStream:
    """A completion that is aligned while it arrives: `feed` deltas, then `finish`.

    The texts of the deltas make up the completion's text, and their ids its ids, but they need not correspond: a server
    may hold text back until a character is complete, and tokens may arrive before or after their text. The results of
    `feed` are a prefix of `finish().masked`; the rest was uncertain. One stream serves one completion.
    """

    _map: TokenTable
    own_text: bool = False
    """The text has a mark for each id without text."""
    _parts: list[str] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _next: int = 0
    """The first token without a position, except for those in `_open`."""
    _open: list[int] = field(default_factory=list)
    """Tokens with parts of characters, waiting for the rest."""
    _open_text: tuple[int, str] = (0, "")
    """The number of tokens decoded last, and their text."""
    _pos: int = 0
    """The position of the next token."""
    _tail: str = ""
    """The text from `_tail_at` on, without `_pending`."""
    _tail_at: int = 0
    _pending: list[str] = field(default_factory=list)
    _scanned: int = 0
    """The text up to here is in `_masked`."""
    _genuine: list[tuple[int, int]] = field(default_factory=list)
    """Texts of special tokens that the scan has not passed."""
    _hits: list[tuple[int, int]] = field(default_factory=list)
    """Texts of markers, special tokens or not, likewise."""
    _strays: Strays = field(default_factory=Strays)
    _last: list[tuple[int, int, int]] = field(default_factory=list)
    """Ends of the turn, with only blanks after them so far. With more text they are stray."""
    _masked: list[str] = field(default_factory=list)
    _escapes: dict[str, str] = field(default_factory=dict)
    _complete: bool = False
    """No more text follows."""
    _failed: bool = False

    def feed(self, text: str, token_ids: Sequence[int]) -> str:
        """Add a delta, and return the masked text that is now certain.

        Text without its tokens is uncertain, and so are tokens that end within a character, and the beginning of a
        possible spelled-out marker. Never raises if the ids do not fit the text: nothing more is certain then, and
        `finish` raises.
        """
        self._ids.extend(as_ids(token_ids))
        if text:
            self._parts.append(text)
            self._pending.append(text)
        if not self._failed:
            self._place()
        return "" if self._failed else self._scan()

    def take_whole(self, text: str, ids: list[int], texts: list[str]) -> bool:
        """Add a whole completion at once: tokens that are whole characters, and whose `texts` make up `text`.

        Returns False, and adds nothing, if an end of the turn is before the end.
        """
        special, turn_ends = self._map._special, self._map._ends
        places = [place for place, token_id in enumerate(ids) if token_id in special]
        last = len(ids)
        for place in reversed(places):
            if ids[place] in turn_ends:
                if place != last - 1:
                    return False
                last = place
        self._ends = list(accumulate(map(len, texts)))
        self._starts = [0, *self._ends[:-1]] if ids else []
        for place in places:
            name, start = special[ids[place]], self._starts[place]
            if name and (offset := texts[place].find(name)) >= 0:
                self._genuine.append((start + offset, start + offset + len(name)))
        self._parts, self._ids, self._next = [text], ids, len(ids)
        self._tail, self._pos = text, len(text)
        return True

    def finish(self) -> Aligned:
        """The whole completion. Raises ValueError that names `token_ids` if they do not decode to the text."""
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
            self._strays,
        )

    def unmask(self, s: str) -> str:
        """A part of the results of `feed`, as it is in the completion."""
        return unmask_text(s, self._originals())

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """`Aligned.token_span` for characters that `feed` has returned."""
        return token_span(self._starts, self._ends, start, end)

    def _originals(self) -> Mapping[str, str]:
        masks = self._map._originals
        if self._escapes:
            masks = masks | {code: original for original, code in self._escapes.items()}
        return masks | self._strays.originals() if self._strays.codes else masks

    def stray(self, start: int, end: int) -> int | None:
        """`Aligned.stray` for characters that `feed` has returned."""
        return self._strays.find(start, end)

    def _place(self) -> None:
        """Find the position of every token whose text has arrived."""
        ids, count = self._ids, len(self._ids)
        if self._next == count and not (self._complete and self._open):
            return
        if self._pending:
            self._tail = self._tail[self._scanned - self._tail_at :] + "".join(self._pending)
            self._tail_at = self._scanned
            self._pending.clear()
        tail, base = self._tail, self._tail_at
        special, piece_of, starts, ends = self._map._special, self._map._piece, self._starts, self._ends
        strays, turn_ends = self._map._stray, self._map._ends
        try:
            while self._next < count:
                token_id = ids[self._next]
                piece, partial = piece_of(token_id)
                if not piece and self.own_text and token_id in strays:
                    piece = mark(token_id)
                at = self._pos - base
                if at == len(tail) and piece and not self._complete:
                    return
                if partial:
                    self._open.append(token_id)
                    if self._close(ended=False) == _WAIT:
                        self._open.pop()  # tried again with more text, before a further token is added
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
                if token_id in turn_ends:
                    self._last.append((self._pos, self._pos + length, token_id))
                elif token_id in strays:
                    self._end_inside()
                    self._strays.add(self._pos, self._pos + length, token_id)
                elif self._last and piece.strip():
                    self._end_inside()
                self._pos += length
                self._next += 1
            if self._complete and self._open:
                self._close(ended=True, last=True)
        except ValueError:
            self._failed = True

    def _end_inside(self) -> None:
        """More text follows the tokens that could have ended the turn."""
        for start, end, token_id in self._last:
            self._strays.add(start, end, token_id)
        self._last.clear()

    def _fit(self, piece: str, *, last: bool = False) -> int:
        """How many characters of the text match `piece`, else `_WAIT` or `_MISFIT`."""
        at = self._pos - self._tail_at
        available = len(self._tail) - at
        readings = [piece]
        if self._pos == 0 and piece.startswith(" "):
            readings.append(piece[1:])  # as a sentencepiece decoder writes it
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
        """Place the open tokens if they end with a character (`ended`: in any case). Returns as `_fit`."""
        count = len(self._open)
        # Decoding after every token would be quadratic for characters that never end, as in a run of broken bytes.
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
        if self._last and text.strip():
            self._end_inside()
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
        decoded = tokens.marked(ids) if self.own_text else tokens._decode(ids)
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
        self._strays = Strays(codes=self._strays.codes)
        self._last.clear()
        at = group = 0
        silent: list[int] = []
        for token_id in [*ids, None]:
            name = tokens._special.get(token_id) if token_id is not None else None
            if token_id is not None and tokens.is_silent(token_id):
                name = mark(token_id) if self.own_text else None
                silent += [] if self.own_text else [token_id]
            found = text.find(name, at) if name else (len(text) if token_id is None else -1)
            if found < 0:
                group += 1
                continue
            self._starts += [at] * group
            self._ends += [found] * group
            if text[at:found].strip():
                self._end_inside()
            for each in silent:  # somewhere in these characters
                self._end_inside()
                self._strays.add(at, found, each)
            silent.clear()
            group = 0
            if token_id is not None and name:
                self._starts.append(found)
                at = found + len(name)
                self._ends.append(at)
                genuine.append((found, at))
                if token_id in tokens._ends:
                    self._last.append((found, at, token_id))
                elif token_id in tokens._stray:
                    self._end_inside()
                    self._strays.add(found, at, token_id)
                else:
                    self._end_inside()
        self._genuine = [span for span in genuine if span[1] > self._scanned]
        self._tail, self._tail_at, self._pos = text[self._scanned :], self._scanned, len(text)
        self._pending.clear()

    def _scan(self) -> str:
        """Mask the text up to the last placed token, or up to a possible marker. Return the added text."""
        certain = self._pos if self._complete or not self._last else self._last[0][0]
        begin, limit = self._scanned - self._tail_at, certain - self._tail_at
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
        if not piece.isascii() and PRIVATE.search(window, begin, stop):
            piece = self._escape(piece, window[begin:stop])
        if self._strays.covered < len(self._strays.ids):
            piece = self._strays.cover(piece, self._scanned)
        self._scanned = base + stop
        for spans in (self._hits, self._genuine):
            if spans and spans[0][1] <= self._scanned:
                spans[:] = [span for span in spans if span[1] > self._scanned]
        self._masked.append(piece)
        return piece

    def _mask(self, piece: str) -> str:
        """`piece`, which follows the scanned text, with the hits masked, except for the text of special tokens."""
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
        """Replace private-use characters of the text by others, in their order of appearance."""
        escaped = list(piece)
        for match in PRIVATE.finditer(original):
            character = match[0]
            if character not in self._escapes and len(self._escapes) < ESCAPE_COUNT:
                self._escapes[character] = chr(ESCAPE_BASE + len(self._escapes))
            escaped[match.start()] = self._escapes.get(character, character)
        return "".join(escaped)
