"""Exceptions of an environment's own code, for its author: a headline with the likely cause, then the author's lines
that it went through, without frames of this project. What the headline says is not said again below it."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from lachesis import ours
from lachesis.authors import ENVIRONMENTS, AuthorError, is_of_an_author, leads_there, place

_LONGEST = 20_000
"""Characters of a traceback, which may quote an agent's files."""


def explained(error: BaseException) -> str:
    """The headline, then the author's lines; several lines."""
    from lachesis.likely_causes import guess  # a run without exceptions needs none

    trace = traceback.TracebackException.from_exception(error, compact=True)
    refused = _is_refusal(error)
    if refused and not _has_own_lines(error.__cause__ or error.__context__):
        trace.__cause__ = trace.__context__ = None
    chain = _chain(trace)
    expected = refused or _is_ours(error) or (isinstance(error, OSError | TypeError) and bool(guess(error)))
    if expected or place(error):  # otherwise the mistake is ours
        for each in chain:
            _remove_ours(each, expected=expected)
        _cut_packages(chain)
    said = headline(error)
    framed = [each for each in chain if each.stack]
    if len(framed) > 1 or not all(_is_told(each, said) for each in chain[1:]):
        return _shown(f"{said}\n{''.join(trace.format())}")
    rest = "".join(trace.format_exception_only()).splitlines()
    rest = rest[:-1] if isinstance(error, SyntaxError) else rest[1:]  # its line, and the place there
    title = ["Traceback (most recent call last):"] if framed and len(framed[0].stack) > 1 else []
    shown = "".join(framed[0].stack.format()).splitlines() if framed else []
    return _shown("\n".join([said, *title, *shown, *rest]) + "\n")


def headline(error: BaseException) -> str:
    """The error and, if there is one, a guess at its cause, in one line. For a group, the first one."""
    from lachesis.likely_causes import guess

    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = (_text(error).splitlines() or [""])[0]
    if not (isinstance(error, AuthorError) or _is_refusal(error)):  # their texts name the thing
        said = f"{type(error).__name__}: {said}".removesuffix(": ")
    return "; ".join(filter(None, [said, guess(error)]))


def in_one_line(trace: str) -> str:
    """The result of `explained`, shortened: the headline, and the line of the author's code that failed."""
    said, line = trace.partition("\n")[0], last_line(trace)
    return f"{said} ({line})" if line else said


def last_line(trace: str) -> str:
    """The line of the author's code that failed, as `env.py, line 12`; empty where the trace names none."""
    found = re.findall(r'^  File "([^"]+)", line (\d+)', trace.partition("\n")[2], re.MULTILINE)
    found = [each for each in found if is_of_an_author(each[0]) and "-packages/" not in each[0]] or found
    return f"{Path(found[-1][0]).name}, line {found[-1][1]}" if found else ""


def lines_of(trace: str) -> str:
    """Of the result of `explained`, what it shares with others of one mistake, whose texts name other items: the type
    and the lines of code. Empty where it has no lines."""
    lines = re.findall(r'^\s*File "[^"]+", line \d+.*', trace, re.MULTILINE)
    return "\n".join([trace.partition(":")[0], *lines]) if lines else ""


def _is_told(trace: traceback.TracebackException, said: str) -> bool:
    """Whether the headline says what an exception that led to it says."""
    return trace.exceptions is None and "".join(trace.format_exception_only()).strip() in said


def _is_refusal(error: BaseException) -> bool:
    """Whether our code refuses what an author's code gave it: the message says why, and the lines that raised nothing.

    Such a place is a `raise` of ours; where our code fails by mistake it is another statement.
    """
    if not isinstance(error, TypeError | ValueError) or error.__traceback__ is None:
        return False
    *_, (frame, number) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    of_ours = file.startswith(ours.folders()) and not file.startswith(ENVIRONMENTS)
    return of_ours and linecache.getline(file, number).lstrip().startswith("raise ") and bool(place(error))


def _has_own_lines(error: BaseException | None) -> bool:
    """Whether a file of the author's, and of no library, is among the places that an exception went through."""
    frames = traceback.walk_tb(None if error is None else error.__traceback__)
    files = {frame.f_code.co_filename for frame, _ in frames}
    return any(is_of_an_author(file) and "-packages/" not in file and file[:1] != "<" for file in files)


def _text(error: BaseException) -> str:
    try:
        return _shown(str(error))
    except Exception:  # an author wrote it
        return "its text cannot be shown"


def _shown(text: str) -> str:
    """The text as every file and console takes it: halves of characters escaped, and the middle of a long one left
    out."""
    if len(text) > _LONGEST:
        left_out = len(text) - _LONGEST
        text = f"{text[: _LONGEST // 2]} ... {left_out} characters left out ... {text[-_LONGEST // 2 :]}"
    return text.encode(errors="backslashreplace").decode()


def _chain(trace: traceback.TracebackException) -> list[traceback.TracebackException]:
    others = (trace.__cause__, trace.__context__, *(trace.exceptions or ()))
    return [trace, *(each for other in others if other is not None for each in _chain(other))]


def _remove_ours(trace: traceback.TracebackException, *, expected: bool) -> None:
    """Remove the frames that lead to the author's code, and between its parts.

    Ours stay at the end, where something failed that the author's code called, unless the error is `expected` to be
    read without them.
    """
    frames = list(trace.stack)
    first = next((at for at, frame in enumerate(frames) if is_of_an_author(frame.filename)), len(frames))
    last = max((at for at, frame in enumerate(frames) if not leads_there(frame.filename)), default=0)
    theirs = [frame for frame in frames[first : last + 1] if not leads_there(frame.filename)]
    end = frames[last + 1 :] if theirs and not expected else []
    trace.stack = traceback.StackSummary.from_list([*theirs, *end])
    if not trace.stack:
        trace.stack = None  # type: ignore[assignment]  # no "Traceback" above nothing


def _cut_packages(chain: Sequence[traceback.TracebackException]) -> None:
    """Of the frames within installed packages leave the one where each exception was raised, unless the author's code
    is such a package."""
    if not any(not _is_installed(frame) for each in chain for frame in each.stack or ()):
        return
    for each in chain:
        if each.stack:
            *before, last = each.stack
            each.stack = traceback.StackSummary.from_list([*(f for f in before if not _is_installed(f)), last])


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return "-packages/" in frame.filename


def _is_ours(error: BaseException) -> bool:
    return ours.is_ours(type(error).__module__)
