"""The result of every reader of literals, and their limits."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

MAX_DEPTH: Final = 200
"""The maximum number of open brackets."""
MAX_DIGITS: Final = 4300
"""The maximum length of an integer: Python's default for int <-> str, kept even if the process has lifted it, because
a longer integer could not be written again."""
INFINITE: Final = (float("inf"), float("-inf"))
UNCLOSED: Final = "missing closing bracket"
SPACE: Final = re.compile(r"[ \t\r\n]*")
SURROGATE: Final = re.compile("[\ud800-\udfff]")


def surrogate_in(text: str) -> int | None:
    """Where the text has a lone surrogate. Encoding it is faster than a search."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


class LiteralError(ValueError):
    """No literal can be read.

    `position` is an index into the text, `reason` a sentence for people. `incomplete` is True if the text ended before
    the literal did, so that more text could complete it, and False if the literal is wrong whatever follows.
    """

    def __init__(self, reason: str, position: int, incomplete: bool = False) -> None:
        super().__init__(reason, position, incomplete)
        self.reason = reason
        self.position = position
        self.incomplete = incomplete

    def __str__(self) -> str:
        return f"{self.reason} at {self.position}"


class Literal(NamedTuple):
    """A value that was read."""

    value: Any
    """None, bool, int, finite float, str, list or dict with str keys, nested."""
    end: int
    """The index after the literal."""
    notes: tuple[str, ...] = ()
    """The repairs; () if the text is well formed in its dialect."""

    @property
    def unclosed(self) -> bool:
        """Whether closing brackets are missing at the end of the text, which a cut text lacks as well."""
        return any(UNCLOSED in note for note in self.notes)
