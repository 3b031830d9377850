"""A completion as text and as tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from tool_call_parsers.tokens.masks import unmask_text


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """A completion as text and as tokens. Offsets count characters and are the same in `text` and `masked`."""

    text: str
    """The completion as it decodes."""
    masked: str
    """`text` with every marker masked that is not a special token. It has the same length."""
    starts: list[int]
    """The offset of every token, and `len(text)`. A token that begins within a character has its offset."""
    _ends: list[int] = field(repr=False)
    _originals: Mapping[str, str] = field(repr=False)

    def unmask(self, s: str) -> str:
        """A part of `masked`, of any length, as it is in `text`."""
        return unmask_text(s, self._originals)

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """The smallest half-open range of tokens that covers the characters `start:end`.

        Tokens without text at the edges stay outside; an empty range of characters gives an empty range of tokens.
        """
        return token_span(self.starts, self._ends, start, end)


def token_span(starts: list[int], ends: list[int], start: int, end: int) -> tuple[int, int]:
    """`Aligned.token_span` of tokens at `starts` to `ends`."""
    first = bisect_right(ends, start)
    return first, max(first, bisect_left(starts, end, 0, len(ends))) if end > start else first
