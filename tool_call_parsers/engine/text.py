"""A text that grows while it is read, and the markers in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Step: TypeAlias = Generator[None, None, T]
"""Part of a lexer: yields when it waits for text, returns a `T`."""

SPACE = re.compile(r"\s*")
_SURROGATES = re.compile("[\ud800-\udfff]")


class Needles:
    """Literal markers to search for. Of several that begin at one place, the longest counts."""

    __slots__ = ("_firsts", "extendable", "literals", "longest", "nested", "pattern")

    def __init__(self, *literals: str) -> None:
        self.literals = tuple(sorted(set(filter(None, literals)), key=lambda literal: (-len(literal), literal)))
        self.pattern = re.compile("|".join(map(re.escape, self.literals)) or r"(?!)")
        self.longest = max(map(len, self.literals), default=0)
        self.extendable = frozenset(
            short for short in self.literals for long in self.literals if short != long and long.startswith(short)
        )
        self.nested = any(inner in literal[1:] for literal in self.literals for inner in self.literals)
        """One marker begins inside another, so it may be found before the other is complete."""
        self._firsts = frozenset(literal[0] for literal in self.literals)

    def begins(self, text: str, start: int) -> bool:
        """Whether the rest of `text` from `start` on is not empty and is the beginning of a marker."""
        tail = text[start : start + self.longest + 1]
        return bool(tail) and any(literal.startswith(tail) for literal in self.literals)

    def unsettled(self, text: str, start: int) -> int:
        """Where, from `start` on, a marker may begin that the end of `text` cuts off; else the length."""
        end = len(text)
        for position in range(max(start, end - self.longest + 1), end):
            if text[position] in self._firsts:
                tail = text[position:]
                if any(literal.startswith(tail) for literal in self.literals):
                    return position
        return end


class Marker(Enum):
    """The role of a marker in free text."""

    OPEN = 1
    """Begins a block."""
    CLOSE = 2
    """Ends a block. Alone it is a mistake."""
    THINK = 3
    """Opens reasoning."""
    DROP = 4
    """A tag around free text."""
    END = 5
    """Ends the turn."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers of a grammar, prepared for the search."""

    kinds: Mapping[str, Marker]
    all: Needles
    think_open: Needles
    think_close: Needles
    think: Needles
    """Markers that may end free reasoning: closing markers, openers of blocks, ends of turns."""


@dataclass(slots=True, eq=False)
class GrowingText:
    """The text so far. Questions about text that has not arrived wait for it, so every answer is certain."""

    text: str = ""
    final: bool = False
    """Nothing follows `text`."""
    _found: dict[Needles, tuple[int, tuple[int, int] | None]] = field(default_factory=dict)

    def append(self, delta: str) -> None:
        """Add text. Lone surrogates become U+FFFD, because no caller could encode them as UTF-8."""
        if not delta.isascii():
            try:
                delta.encode()  # faster than a search
            except UnicodeEncodeError:
                delta = _SURROGATES.sub("\ufffd", delta)
        # The only reference during the addition is a local one: CPython then extends the string in place, and
        # appending n small pieces costs O(n) instead of O(n^2).
        text = self.text
        self.text = ""
        text += delta
        self.text = text

    def more(self, length: int) -> Step[bool]:
        """Wait for `length` characters of text. Return False if the text is shorter."""
        while len(self.text) < length:
            if self.final:
                return False
            yield
        return True

    def skip_space(self, position: int) -> Step[int]:
        """The first position from `position` on that is not whitespace, else the end of the text."""
        while True:
            position = SPACE.match(self.text, position).end()  # type: ignore[union-attr]  # matches anywhere
            if position < len(self.text) or self.final:
                return position
            yield

    def starts(self, position: int, needles: Needles) -> Step[str | None]:
        """The marker at `position`, if any."""
        while True:
            match = needles.pattern.match(self.text, position)
            if match is not None:
                if match.group() not in needles.extendable:
                    return match.group()
                if self.final or len(self.text) - position >= needles.longest:
                    return match.group()
            elif self.final or needles.unsettled(self.text, position) != position:
                return None
            yield

    def find(
        self, needles: Needles, start: int, passed: Callable[[int], None] | None = None
    ) -> Step[re.Match[str] | None]:
        """The first marker from `start` on; None if there is none.

        passed: called before each wait with the position before which no marker begins.
        """
        while True:
            match = needles.pattern.search(self.text, start)
            if self.final or (match and self._settled(match, needles, start)):
                return match
            start = self._candidate(match, needles, start)
            if passed is not None:
                passed(start)
            yield

    def find_bound(self, needles: Needles, start: int) -> Step[tuple[int, int] | None]:
        """The span that `find` finds, searched for once when many values precede one marker."""
        known = self._found.get(needles)
        if known is None or start < known[0] or (known[1] is not None and start > known[1][0]):
            match = yield from self.find(needles, start)
            known = self._found[needles] = start, match.span() if match is not None else None
        return known[1]

    def find_pattern(self, pattern: re.Pattern[str], start: int, width: int) -> Step[re.Match[str] | None]:
        """The first match of `pattern` from `start` on. A match spans at most `width` characters, lookahead included,
        and counts only once these have arrived."""
        while True:
            match = pattern.search(self.text, start)
            if self.final or (match and match.start() + width <= len(self.text)):
                return match
            start = max(start, len(self.text) - width + 1) if match is None else match.start()
            yield

    def _settled(self, match: re.Match[str], needles: Needles, start: int) -> bool:
        """Whether more text cannot change the first marker from `start` on."""
        if needles.nested and self._candidate(match, needles, start) < match.start():
            return False
        return match.group() not in needles.extendable or len(self.text) - match.start() >= needles.longest

    def _candidate(self, match: re.Match[str] | None, needles: Needles, start: int) -> int:
        """Where the first marker from `start` on may be, given the text so far."""
        if match is None:
            return needles.unsettled(self.text, start)
        return min(match.start(), needles.unsettled(self.text, start)) if needles.nested else match.start()
