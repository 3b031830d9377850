"""A completion as text and as tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tool_call_parsers.tokens.tokenizer import MARK_BASE, MARK_COUNT, MARKED, mark, unmask_text


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """A completion as text and as tokens. Offsets count characters and are the same in `text` and `masked`."""

    text: str
    """The completion as it decodes."""
    masked: str
    """`text` with every stray token masked, and every marker that is not a special token. It has the same length."""
    starts: list[int]
    """The offset of every token, and `len(text)`. A token that begins within a character has its offset."""
    _ends: list[int] = field(repr=False)
    _originals: Mapping[str, str] = field(repr=False)
    _strays: Strays = field(repr=False)

    def unmask(self, s: str) -> str:
        """A part of `masked`, of any length, as it is in `text`, with a mark in the place of each stray token."""
        return unmask_text(s, self._originals)

    def first(self, count: int) -> Aligned:
        """The first `count` characters. A token that holds further ones is cut."""
        starts = [start for start in self.starts[:-1] if start < count]
        ends = [min(end, count) for end in self._ends[: len(starts)]]
        return Aligned(
            self.text[:count], self.masked[:count], [*starts, count], ends, self._originals, self._strays.first(count)
        )

    @property
    def visible(self) -> str:
        """`text` with a mark in the place of each stray token."""
        return self.unmask(self.masked) if self._strays.ids else self.text

    @property
    def strays(self) -> list[int]:
        """The ids of all stray tokens."""
        return self._strays.ids

    def without_strays(self) -> tuple[str, Callable[[int], int]]:
        """`masked` without the characters of stray tokens, and where an offset in that is in `masked`."""
        kept: list[str] = []
        at = gone = 0
        offsets, shifts = [0], [0]
        for start, end in zip(self._strays.starts, self._strays.ends, strict=True):
            kept.append(self.masked[at:start])
            offsets.append(start - gone)
            gone += end - start
            shifts.append(gone)
            at = end
        kept.append(self.masked[at:])
        return "".join(kept), lambda offset: offset + shifts[bisect_left(offsets, offset, 1) - 1]

    def stray(self, start: int, end: int) -> int | None:
        """The first stray token between the characters `start` and `end`, or in them; None without one."""
        return self._strays.find(start, end)

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """The smallest half-open range of tokens that covers the characters `start:end`.

        Tokens without text at the edges stay outside; an empty range of characters gives an empty range of tokens.
        """
        return token_span(self.starts, self._ends, start, end)


def token_span(starts: list[int], ends: list[int], start: int, end: int) -> tuple[int, int]:
    """`Aligned.token_span` of tokens at `starts` to `ends`."""
    first = bisect_right(ends, start)
    return first, max(first, bisect_left(starts, end, 0, len(ends))) if end > start else first


@dataclass(slots=True, eq=False)
class Strays:
    """The places of stray tokens, in order."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    codes: dict[int, str] = field(default_factory=dict)
    """Id -> the character that stands for it in the masked text."""
    covered: int = 0
    """How many of them are in the masked text."""

    def add(self, start: int, end: int, token_id: int) -> None:
        """A stray token has the characters `start:end`, or is before `start` if these are equal."""
        self.starts.append(start)
        self.ends.append(end)
        self.ids.append(token_id)

    def find(self, start: int, end: int) -> int | None:
        """The id of the first one in `start:end`. One without text counts only inside."""
        at = bisect_right(self.ends, start)
        return self.ids[at] if at < len(self.ids) and self.starts[at] < end else None

    def first(self, count: int) -> Strays:
        """Those in the first `count` characters."""
        kept = bisect_left(self.starts, count)
        return Strays(self.starts[:kept], self.ends[:kept], self.ids[:kept], self.codes)

    def cover(self, piece: str, begin: int) -> str:
        """`piece`, the masked text from `begin` on, with the characters of stray tokens replaced. The next piece
        follows."""
        out: list[str] = []
        done, upto = begin, begin + len(piece)
        while self.covered < len(self.ids) and (low := self.starts[self.covered]) < upto:
            high = self.ends[self.covered]
            if (first := max(low, done)) < (last := min(high, upto)):
                out.append(piece[done - begin : first - begin])
                out.append(self._code(self.ids[self.covered]) if first == low else MARKED)
                out.append(MARKED * (last - first - 1))
                done = last
            if high > upto:
                break
            self.covered += 1
        out.append(piece[done - begin :])
        return "".join(out)

    def originals(self) -> dict[str, str]:
        """What stands for each of the characters in the visible text."""
        return {code: mark(token_id) for token_id, code in self.codes.items()} | {MARKED: ""}

    def _code(self, token_id: int) -> str:
        if (code := self.codes.get(token_id)) is None:
            # All further ones look like the last: a completion with so many has no meaning.
            code = self.codes[token_id] = chr(MARK_BASE + min(len(self.codes), MARK_COUNT))
        return code
