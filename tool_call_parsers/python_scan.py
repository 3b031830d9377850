"""Python's strings and brackets inside a text that grows: where a call ends. Each character is read once.

A quote ends a string only before text that may follow a string there, because models forget to escape quotes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tool_call_parsers.engine import Needles, Run, Step
from tool_call_parsers.literals.literal import MAX_DEPTH

_BODY = {quote: re.compile(rf"(?:[^{quote}\\]++|\\.)*", re.DOTALL) for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
# Text before the next bracket, with strings that end plainly, by the closing bracket of the open one.
_STRINGS = r"""|"(?:[^"\\]++|\\.)*"(?=\s*[,%s])|'(?:[^'\\]++|\\.)*'(?=\s*[,%s])"""
_AFTER_STRING = {")": ",)", "]": ",]", "}": ",}:"}
_OUTSIDE = {
    closing: re.compile(r"""(?:[^"'()\[\]{}<]++""" + _STRINGS.replace("%s", re.escape(followers[1:])) + ")*", re.DOTALL)
    for closing, followers in _AFTER_STRING.items()
}
# Text that makes an expression of the string before it, so that the quote did end the string.
_OPERATION = re.compile(r"[+%*]\s{0,4}[\w\"'(]|\.\w{1,24}\(|\[[-\d:]{1,12}\]|[=!]=|(?:if|for|in|is|and|or|not)\s")
_OPERATION_WIDTH = 32


class Stop(NamedTuple):
    """Where the scan of the brackets stopped."""

    position: int
    closed: bool = False
    """After the bracket that closes the first."""
    at_marker: bool = False
    """Before one of the tags."""


def follow_call(run: Run, position: int, tags: Needles) -> Step[Stop]:
    """Scan from an opening bracket to its closing bracket, or to where it cannot come any more.

    Outside strings, one of the `tags` ends the scan.
    """
    stack: list[str] = []
    closing = ")"
    while True:
        if stack:
            position = _OUTSIDE[closing].match(run.text, position).end()  # type: ignore[union-attr]  # anywhere
        if position == len(run.text):
            if run.final:
                return Stop(position)
            yield
            continue
        char = run.text[position]
        if char in _CLOSING:
            if len(stack) == MAX_DEPTH:
                return Stop(position)
            stack.append(closing)
            closing = _CLOSING[char]
            position += 1
        elif char == closing:
            closing = stack.pop()
            position += 1
            if not stack:
                return Stop(position, closed=True)
        elif char in _BODY:
            end = yield from follow_string(run, position, _AFTER_STRING[closing], tags)
            if end is None:
                return Stop(len(run.text))
            position = end
        elif char == "<":
            if (yield from run.starts(position, tags)) is not None:
                return Stop(position, at_marker=True)
            position += 1
        else:
            return Stop(position)


def follow_string(run: Run, position: int, followers: str, tags: Needles) -> Step[int | None]:
    """The end of the string whose quote is at `position`; None if the text ends first.

    A quote ends the string before one of the `followers`, before brackets and one of the `tags`, before text that
    makes an expression of it, and at the end of the text.
    """
    quote = run.text[position]
    yield from run.more(position + 3)
    if run.text.startswith(quote * 3, position):
        quote *= 3
    position += len(quote)
    # The end of a string does not depend on the text before it: one result holds for all strings that begin inside.
    known = run.memo.get(key := quote + followers)
    if known is not None and known[0] <= position < known[1]:
        return known[1] if known[1] <= len(run.text) else None
    start, body = position, _BODY[quote[0]]
    while True:
        position = body.match(run.text, position).end()  # type: ignore[union-attr]  # matches anywhere
        if position == len(run.text) or run.text[position] == "\\":
            if run.final:
                run.memo[key] = (start, len(run.text) + 1)
                return None
            yield
            continue
        if len(quote) == 3:
            yield from run.more(position + 3)
            if not run.text.startswith(quote, position):
                position += 1
                continue
        end = position + len(quote)
        after = yield from run.skip_space(end)
        if (
            after == len(run.text)
            or run.text[after] in followers
            or (run.text[after] in "<)]}" and (yield from _is_end(run, after, tags)))
            or (yield from _operates(run, after))
        ):
            run.memo[key] = (start, end)
            return end
        position += 1


def _operates(run: Run, position: int) -> Step[bool]:
    if run.text[position] not in "+%*.[=!ifan o":
        return False
    yield from run.more(position + _OPERATION_WIDTH)
    return _OPERATION.match(run.text, position, position + _OPERATION_WIDTH) is not None


def _is_end(run: Run, position: int, tags: Needles) -> Step[bool]:
    """Whether only closing brackets precede one of the tags."""
    while run.text[position : position + 1] in (")", "]", "}"):
        position = yield from run.skip_space(position + 1)
    return (yield from run.starts(position, tags)) is not None
