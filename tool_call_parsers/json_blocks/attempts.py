"""What JSON, Python and delimited formats share: attempts in another syntax, and markers that are repeated."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tool_call_parsers.arguments import plain_name
from tool_call_parsers.engine import SPACE, Needles, Run, Step
from tool_call_parsers.types import CallStatus

FENCES = Needles("```json", "```tool_call", "```tool_code", "```")
"""Code fences around calls."""
MANY_OPENERS = 4
"""After so many openers in a row, the rest is read as text."""
_STRAYED, _STRAYED_RATIO = 4096, 4
"""How many characters may be read in vain, in all and per character, before such calls are ignored."""
_NAMED = re.compile(r"[^\w\s]{0,3}(?:function[=.:]|functions\.|call:)?([\w.\-]{1,128})[\"'>)\]]{0,2}\s{0,8}(\W|\Z)")
_GLUED = re.compile(r"[^\s{]{0,128}\s{0,2}\{\s{0,8}\"")
"""An object right behind a marker, whatever is between."""
_GLUED_CUT = re.compile(r"[^\s{]{0,128}\s{0,2}(?:\{\s{0,8})?\Z")
_NAMED_CUT = re.compile(r"[^\w\s]{0,3}(?:[\w.\-=:]{1,128}[\"'>)\]]{0,2}\s{0,8})?\Z")
_BEHIND_NAME = frozenset("({[<:=>")


def too_much(run: Run, start: int) -> bool:
    """Whether too much was read in vain before `start`."""
    return run.strayed > _STRAYED + _STRAYED_RATIO * start


def named_attempt(run: Run, start: int, position: int, ends: Needles, closers: tuple[str, ...]) -> Step[int | None]:
    """Record the text after an opening marker as a failed attempt if it is a call in another syntax: an offered tool's
    name, or an object. None if it is text."""
    while (match := _NAMED.match(run.text, position)) is None or match.end() == len(run.text):
        if run.final or not _NAMED_CUT.match(run.text, position):
            break
        yield
    name = plain_name(match[1], run.tools) or match[1] if match is not None else ""
    if match is None or name not in run.tools.names() or (match[2] and match[2] not in _BEHIND_NAME):
        while (glued := _GLUED.match(run.text, position)) is None:
            if run.final or not _GLUED_CUT.match(run.text, position):
                return None
            yield
        name = ""
        assert glued is not None
    run.begin_block(start)
    marker = yield from run.find(ends, position)
    end = len(run.text) if marker is None else marker.end() if marker.group() in closers else marker.start()
    run.end_call(start, end, CallStatus.MALFORMED, name, error="a call in the syntax of another format")
    return end


def openers_behind(closes: Sequence[str], opens: Sequence[str]) -> tuple[str, ...]:
    """The opening markers that begin like a closing one: behind a call, such a marker opens the next."""
    return tuple(each for each in opens if each not in closes and each.startswith(tuple(filter(None, closes))))


def skip_repeated(
    run: Run, end: int, markers: Needles, limit: int | None = None, *, others: Collection[str] = ()
) -> Step[tuple[int, bool]]:
    """The end of markers that repeat the one before `end`, and whether there are any.

    Args:
        limit: how many at most, where the text may be read again from the second one.
        others: those of the markers that repeat nothing.
    """
    first = SPACE.match(run.text, end).end()  # type: ignore[union-attr]  # it matches everywhere
    if run.final and markers.pattern.match(run.text, first) is None:
        return end, False
    count = 0
    while limit is None or count < limit:
        position = yield from run.skip_space(end)
        marker = yield from run.starts(position, markers)
        if marker is None or marker in others:
            break
        end, count = position + len(marker), count + 1
    return end, count > 0
