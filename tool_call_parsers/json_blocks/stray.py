"""Calls without the markers of the format: they are recorded as failed attempts, and their text stays content.

A JSON object counts if it names an offered tool and has arguments, or follows an offered tool's name, and nothing shows
that it is only quoted: no quotes around it, no sentence that goes on after it.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tool_call_parsers.arguments import plain_name
from tool_call_parsers.engine import Marker, Markers, Needles, Run, Step
from tool_call_parsers.json_blocks.objects import LAX_ARGUMENTS, LAX_NAMES
from tool_call_parsers.json_scan import JsonValue, read_value
from tool_call_parsers.literals import LiteralError, read_python_call
from tool_call_parsers.python_scan import follow_call
from tool_call_parsers.types import CALLABLE, CallStatus

MANY_OPENERS = 4
"""After so many openers in a row, the rest is read as text."""
STRAYS = ("{", "(")
"""Where a call without a marker may be: before the object, or before the arguments in Python."""
_STRAYED, _STRAYED_RATIO = 4096, 4
"""How many characters may be read in vain, in all and per character, before such calls are ignored."""
_BRACKETS = {
    "{": r"\{(?=\s*(?:[\"'}]|\Z))",
    "(": r"\((?<=\w\()(?=\s*(?:\)|[^\W\d]\w*\s*(?:=|\Z)|\Z))",
}
_FIRST_KEYS = Needles(
    *(f"{quote}{key}{quote}" for key in (*LAX_NAMES, *LAX_ARGUMENTS, "id", "type", "tool_call_id") for quote in "\"'")
)
_DEFINITION = frozenset({"description", "properties", "input_schema", "$schema"})
"""Keys of a tool's definition, which has a name and parameters as well."""
_QUOTES = frozenset("`'\"“‘«")
_LINE_WIDTH = 256
_NO_HEADER = frozenset(("", ":", ",", "[", "{", "(", "=", "."))
"""Characters before an object that no header ends with."""
_AFTER = re.compile(r"[ \t\]);.,]*")
_HEADER = re.compile(
    r"(?:\A|[\n<>|｜\]])[ \t]*(?:function(?!s\.)|call)?[ \t:=.]{0,3}"
    r"(?P<name>(?:functions\.)?[\w.\-]{1,128})(?::\d{1,9})?"
    r"(?:[ \t]|\[[A-Z_]{1,16}\]\w{0,16}|<[^<>\n]{1,64}>|[>\])]|\n?```(?:json)?\n|json)*\n?\Z"
)
_PYTHON_HEAD = re.compile(r"(?:\A|[\n<>| ,]|(?P<bracket>(?<!`)\[\s*))(?P<name>[\w.\-]{1,128})\Z")
_TOOL_FENCE = re.compile(r"```tool_c(?:ode|all)\s*(?:print\()?\Z")
_NAMED = re.compile(r"[^\w\s]{0,3}(?:function[=.:]|functions\.|call:)?([\w.\-]{1,128})[\"'>)\]]{0,2}\s{0,8}(\W|\Z)")
_GLUED = re.compile(r"[^\s{]{0,128}\s{0,2}\{\s{0,8}\"")
"""An object right behind a marker, whatever is between."""
_GLUED_CUT = re.compile(r"[^\s{]{0,128}\s{0,2}(?:\{\s{0,8})?\Z")
_NAMED_CUT = re.compile(r"[^\w\s]{0,3}(?:[\w.\-=:]{1,128}[\"'>)\]]{0,2}\s{0,8})?\Z")
_BEHIND_NAME = frozenset("({[<:=>")


class StrayNeedles(Needles):
    """Markers and the brackets of calls without a marker. A bracket counts if an argument follows it, or the end of the
    text so far, because code is full of brackets."""

    __slots__ = ()

    def __init__(self, *literals: str) -> None:
        super().__init__(*literals)
        self.pattern = re.compile("|".join(_BRACKETS.get(literal) or re.escape(literal) for literal in self.literals))


def with_stray(markers: Markers) -> Markers:
    """The markers, and the brackets of calls without a marker."""
    kinds = {**dict.fromkeys(STRAYS, Marker.OPEN), **markers.kinds}
    return replace(markers, kinds=kinds, all=StrayNeedles(*kinds))


def too_much(run: Run, start: int) -> bool:
    """Whether too much was read in vain before `start`."""
    return run.strayed > _STRAYED + _STRAYED_RATIO * start


def may_stray(run: Run, start: int) -> bool:
    """Whether the bracket at `start` may belong to a call that lacks its marker."""
    if run.in_reasoning or too_much(run, start):
        return False
    before = run.text[max(0, start - 8) : start].rstrip("[ \t")
    return before[-1:] not in _QUOTES or before.endswith("```")


class Stray(NamedTuple):
    """An attempt without the markers of the format."""

    start: int
    end: int
    status: CallStatus
    name: str


def stray(
    run: Run, start: int, closers: Needles, marks: tuple[str, ...] = (), *, single_key: bool = False
) -> Step[int]:
    """Record the call whose bracket is at `start` as a failed attempt if it is one. Return the position where the text
    goes on. For the arguments see `find_stray`."""
    if run.text[start] == "(":
        found = yield from _find_python(run, start, closers)
    else:
        found = yield from find_stray(run, start, closers, marks, single_key=single_key)
    if isinstance(found, int):
        return found
    record_stray(run, start, found)
    return found.end


def record_stray(run: Run, start: int, found: Stray) -> None:
    """Record an attempt whose bracket is at `start`."""
    run.begin_block(start)
    error = "a call without the markers of the format"
    run.end_call(found.start, found.end, found.status, found.name, error=error)


def find_stray(
    run: Run,
    start: int,
    closers: Needles,
    marks: tuple[str, ...] = (),
    *,
    single_key: bool = False,
    headers: re.Pattern[str] = _HEADER,
) -> Step[Stray | int]:
    """The object at `start` as a failed attempt if it is a call, else the position where the text goes on.

    closers: markers that only follow calls. marks: markers that only precede arguments.
    single_key: the key of the object's only member is the tool's name.
    headers: what may precede arguments, with the tool's `name`.
    """
    header = None
    if run.text[max(0, start - 1) : start] not in _NO_HEADER:
        header = headers.search(run.text, max(0, start - _LINE_WIDTH), start)
    before = header["name"] if header is not None else ""
    named = _offered(run, before)
    if named is None and run.text.endswith(marks, max(0, start - _LINE_WIDTH), start):
        named = ""
    first = _begins_line(run, start)
    key = yield from run.skip_space(start + 1)
    if run.text[key : key + 1] not in tuple("\"'}" if named is not None else "\"'"):
        return start + 1
    if named is None and not single_key and not first and (yield from run.starts(key, _FIRST_KEYS)) is None:
        return start + 1
    read = yield from read_value(run, start, None)
    begin, name = start, None
    if named is not None and read.status is not CallStatus.INVALID_JSON:
        begin, name = (header.start("name") if header is not None and named else start), named
    elif named is None:
        name = (_only_key(run, read) if single_key else None) or _named(run, read)
    end = read.end
    position = yield from run.skip_space(end)
    while run.text.startswith("]", position):
        position = yield from run.skip_space(position + 1)
    closer = yield from run.starts(position, closers)
    if closer is not None:
        end, name = position + len(closer), name or ""
    elif name is not None and (not first if named is None else read.value == {}):
        name = name if (yield from _ends_line(run, end)) else None
    if name is None:
        if read.status in CALLABLE:
            return read.end
        run.strayed += read.end - read.start
        return start + 1
    status = CallStatus.MALFORMED if read.status is not CallStatus.INCOMPLETE else read.status
    return Stray(begin, end, status, name)


def _find_python(run: Run, start: int, closers: Needles) -> Step[Stray | int]:
    """The call in Python whose parenthesis is at `start`, if it is alone on its line in a list, is the whole text, or
    precedes a closing marker; else the position where the text goes on."""
    head = _PYTHON_HEAD.search(run.text, max(0, start - _LINE_WIDTH), start)
    name = head["name"] if head is not None else ""
    names = run.tools.names()
    glued = next((own for own in names if name.endswith((f"call{own}", f"calls{own}", f"start{own}"))), "")
    name = name if name in names else glued or name.removeprefix("functions.")
    if head is None or name not in names:
        return start + 1
    stop = yield from follow_call(run, start, closers)
    begin, end, call = start - len(name), stop.position, None
    with suppress(LiteralError):
        call = read_python_call(run.text, begin, end)
    if not stop.closed or call is None or call.end != end or call.positional:
        run.strayed += end - start
        return start + 1
    position = yield from run.skip_space(end)
    while run.text[position : position + 1] in ("]", ","):
        position = yield from run.skip_space(position + 1)
    closer = yield from run.starts(position, closers)
    if closer is not None:
        return Stray(begin, position + len(closer), CallStatus.MALFORMED, name)
    before = run.text[max(0, begin - _LINE_WIDTH) : begin]
    fenced = _TOOL_FENCE.search(before) is not None
    listed = fenced or (head["bracket"] is not None and bool(call.arguments))  # `[f()]` may be prose
    if not (listed or (begin < _LINE_WIDTH and not before.strip())) or not (yield from _ends_line(run, end)):
        return start + 1
    return Stray(begin, end, CallStatus.MALFORMED, name)


def _offered(run: Run, name: str) -> str | None:
    """The offered tool that is named."""
    for spelled in (name, name.removeprefix("functions."), name.removeprefix("function")):
        if spelled in run.tools.names():
            return spelled
    return None


def _named(run: Run, read: JsonValue) -> str | None:
    """The tool that an object calls; None if it is not clearly a call."""
    members: dict[str, Any] = {}
    if isinstance(read.value, dict):
        members = read.value
    elif read.scan is not None:
        for key, member in read.scan.members.items():
            members[key] = run.text[member.start : member.end].strip("\"'")
    if isinstance(inner := members.get("function"), dict):
        members = {**members, **inner}
    name = next((members[key] for key in LAX_NAMES if isinstance(members.get(key), str)), None)
    given = next((members[key] for key in LAX_ARGUMENTS if key in members), None)
    if not isinstance(name, str) or given is None or not _DEFINITION.isdisjoint(members):
        return None
    if isinstance(given, dict) and not _DEFINITION.isdisjoint(given):
        return None
    name = plain_name(name.strip(), run.tools) or name.strip()
    return name if name and run.tools.offered(name) else None


def _only_key(run: Run, read: JsonValue) -> str | None:
    """The offered tool that is the only key of an object."""
    if not isinstance(read.value, dict) or len(read.value) != 1:
        return None
    ((key, value),) = read.value.items()
    return _offered(run, key) if isinstance(value, dict) else None


def _begins_line(run: Run, start: int) -> bool:
    before = run.text[max(0, start - _LINE_WIDTH) : start].rstrip(" \t[")
    return not before or before.endswith("\n")


def _ends_line(run: Run, end: int) -> Step[bool]:
    """Whether nothing but markup, or another object, follows on the line."""
    while True:
        after = _AFTER.match(run.text, end).end()  # type: ignore[union-attr]  # matches anywhere
        if after < len(run.text) or run.final:
            return run.text[after : after + 1] in ("", "\n", "\r", "<", "`", "[", "{")
        yield


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


def skip_repeated(run: Run, end: int, markers: Needles, limit: int | None = None) -> Step[tuple[int, bool]]:
    """The end of markers that repeat the one before `end`, and whether there are any. `limit`: how many at most, where
    the text may be read again from the second one."""
    if end == len(run.text) and run.final:
        return end, False
    count = 0
    while limit is None or count < limit:
        position = yield from run.skip_space(end)
        marker = yield from run.starts(position, markers)
        if marker is None:
            break
        end, count = position + len(marker), count + 1
    return end, count > 0
