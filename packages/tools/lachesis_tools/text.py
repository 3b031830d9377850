"""Text for the model: bounded, printable, valid UTF-8, with markers where text was omitted."""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any

from pydantic_core import to_jsonable_python

HEAD_SHARE = 0.4
"""The share of a shortened text that comes from its start; errors and results are at the end."""

MAX_CANDIDATES = 500
"""The most names to compare with a misspelled one: the event loop waits meanwhile."""

_ANSI = re.compile(
    r"""
    \x1b (?: \[ [0-?]* [ -/]* [@-~]            # CSI: colours, cursor movement
           | \] [^\x07\x1b]* (?: \x07 | \x1b\\ )  # OSC: titles, hyperlinks
           | [PX^_] [^\x1b]* \x1b\\            # DCS, SOS, PM, APC
           | [ -/]* [0-~] )                    # two-character escapes
    """,
    re.VERBOSE,
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def cap_text(text: str, limit: int, *, already_elided: int = 0) -> tuple[str, int]:
    """Cut the middle out of `text` so that the result, marker included, has at most `limit` characters.

    The result keeps 40 % head and 60 % tail. Returns the text and the number of missing characters, including
    `already_elided`, the number that was cut from the same middle before.
    """
    if len(text) <= limit and not already_elided:
        return text, 0
    room = limit - len(_marker(len(text) + already_elided))
    kept = max(0, min(room, len(text)))
    head = int(kept * HEAD_SHARE)
    elided = len(text) - kept + already_elided
    return text[:head] + _marker(elided) + text[len(text) - (kept - head) :], elided


def _marker(elided: int) -> str:
    return f"\n[... {elided} characters elided ...]\n"


class HeadTail:
    """The first `head` and the last `tail` bytes of a stream of any length."""

    def __init__(self, head: int, tail: int) -> None:
        self._head_size = head
        self._tail_size = tail
        self._head = bytearray()
        self._tail = bytearray()
        self.elided = 0
        """The number of bytes dropped between the two."""

    def add(self, data: bytes) -> None:
        room = self._head_size - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        # Trim only when twice as long: otherwise a long stream of small pieces costs quadratic time.
        if len(self._tail) > 2 * self._tail_size:
            self._trim()

    def skip(self, count: int) -> None:
        """Record that `count` bytes were lost before they could be read."""
        self.elided += len(self._tail) + count
        self._tail.clear()
        self._head_size = len(self._head)  # the head ends at the first gap

    def text(self, limit: int) -> str:
        """The stream as printable text of at most `limit` characters."""
        self._trim()
        if not self.elided:
            return cap_text(printable(bytes(self._head + self._tail)), limit)[0]
        head, tail = printable(bytes(self._head)), printable(bytes(self._tail))
        marker = _marker(len(head) + len(tail) + self.elided)
        room = max(0, limit - len(marker))
        first = head[: int(room * HEAD_SHARE)]
        last = tail[max(0, len(tail) - (room - len(first))) :]
        return first + _marker(self.elided + len(head) - len(first) + len(tail) - len(last)) + last

    def _trim(self) -> None:
        surplus = len(self._tail) - self._tail_size
        if surplus > 0:
            self.elided += surplus
            del self._tail[:surplus]


def printable(data: bytes) -> str:
    """Decode terminal output: remove ANSI sequences, replace other control characters and invalid UTF-8 by U+FFFD."""
    text = _ANSI.sub("", data.decode("utf-8", errors="replace"))
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def to_json(value: Any) -> str:
    """JSON in the style of models: spaces after separators, no escapes of non-ASCII characters."""
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)


def valid_utf8(text: str) -> str:
    """`text` without lone surrogates, which tokenizers and JSON writers reject."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def described(error: BaseException) -> str:
    """The type of an exception and its text, if it has one: a class of somebody else may raise in `__str__`."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be read"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(name: Any) -> Any:
    """A name for an error message: a model in a loop may write one of any length."""
    return f"{name[:80]}..." if isinstance(name, str) and len(name) > 80 else name


def did_you_mean(word: str, candidates: Iterable[str], *, count: int = 3) -> str:
    """`; did you mean 'a' or 'b'?`, or an empty string where no name is similar or `word` is too long for a name."""
    if len(word) > 255:
        return ""
    near = difflib.get_close_matches(word, list(itertools.islice(candidates, MAX_CANDIDATES)), n=count, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
