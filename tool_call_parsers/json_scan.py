"""JSON inside a text that grows: where a value ends, and its status.

The scan follows strings and brackets and never searches for a bracket or a tag, so the contents of a string stay in the
string. Only text that is not JSON is cut at the format's next marker, and then repaired or rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tool_call_parsers.engine import Needles, Run, Step
from tool_call_parsers.literals.literal import MAX_DEPTH, Literal, LiteralError
from tool_call_parsers.literals.strict import read_json
from tool_call_parsers.types import CallStatus

# What may occur outside strings and brackets. A backslash, a quote or an angle bracket means that it is not JSON.
_OUTSIDE = re.compile(r"[\w\s+\-.,:]*")
_INSIDE = re.compile(r'[^"\\]*')
_OPENING = {"{": "}", "[": "]"}
MANY_REJECTIONS = 16
"""After so many rejections, values are found by their brackets first."""
_BEFORE_OPENING = frozenset(",:[{ \t\r\n")


@dataclass(slots=True)
class JsonMember:
    """A member of the outermost object whose value is a string, an object or an array."""

    start: int
    """The start of the value."""
    end: int | None = None
    """The end of the value; None until it is known."""


@dataclass(slots=True)
class JsonScan:
    """Follows the JSON object or array at `start` through a growing text, and reads each character once."""

    start: int
    ends: tuple[str, ...] = ()
    """Markers that look like lists and cannot be part of the JSON."""
    position: int = field(init=False)
    """The scan has read everything before; after the end of the value once it is closed."""
    closed: bool = False
    broken: bool = False
    """It is not JSON, whatever follows."""
    members: dict[str, JsonMember] = field(default_factory=dict)
    """Members of an object by key; of a repeated key, the first."""
    doubles: set[str] = field(default_factory=set)
    """Keys that occur twice in the outermost object."""
    _stack: list[str] = field(default_factory=list)
    _inside: int | None = None
    """Where the current string begins."""
    _key: str | None = None
    _key_next: bool = False

    def __post_init__(self) -> None:
        self.position = self.start

    @property
    def depth(self) -> int:
        """The number of open brackets."""
        return len(self._stack)

    def advance(self, text: str) -> None:
        """Read on to the end of the value or of the text."""
        position, end, stack = self.position, len(text), self._stack
        while position < end and not self.closed:
            if self._inside is not None:
                position = _INSIDE.match(text, position).end()  # type: ignore[union-attr]  # matches anywhere
                if position == end:
                    break
                if text[position] == "\\":
                    if position + 1 == end:
                        break
                    position += 2
                    continue
                position += 1
                if len(stack) == 1:
                    self._end_string(text, position)
                self._inside = None
                continue
            begin = position
            position = _OUTSIDE.match(text, position).end()  # type: ignore[union-attr]
            if len(stack) == 1 and position > begin:
                self._punctuation(text[begin:position])
            if position == end:
                break
            character = text[position]
            if character == '"':
                self._inside = position
            elif character in _OPENING:
                if len(stack) >= MAX_DEPTH or (stack and text[position - 1] not in _BEFORE_OPENING):
                    self.broken = True
                    break
                if len(stack) == 1:
                    self._begin_value(position)
                stack.append(_OPENING[character])
                self._key_next = self._key_next or (len(stack) == 1 and character == "{")
            elif stack and character == stack[-1]:
                if character == "]" and self.ends and text.endswith(self.ends, self.start, position + 1):
                    self.broken = True
                    break
                stack.pop()
                if len(stack) == 1:
                    self._end_value(position + 1)
                self.closed = not stack
            else:
                self.broken = True
                break
            position += 1
        self.position = position

    def _punctuation(self, between: str) -> None:
        comma = between.rfind(",")
        if comma >= 0:
            self._key, self._key_next = None, self._stack[0] == "}"
        if between.rfind(":") > comma:
            self._key_next = False

    def _end_string(self, text: str, end: int) -> None:
        assert self._inside is not None
        if self._key_next:
            self._key, self._key_next = text[self._inside + 1 : end - 1], False
            if "\\" in self._key:
                try:
                    self._key = json.loads(f'"{self._key}"')
                except ValueError:
                    self._key = None
            if self._key in self.members:
                self.doubles.add(self._key)
                self._key = None
        else:
            self._begin_value(self._inside)
            self._end_value(end)

    def _begin_value(self, start: int) -> None:
        if self._key is not None:
            self.members[self._key] = JsonMember(start)

    def _end_value(self, end: int) -> None:
        if self._key is not None and (member := self.members.get(self._key)) is not None:
            member.end = end
        self._key = None


@dataclass(frozen=True, slots=True)
class JsonValue:
    """The text in the place of a JSON value, with a status."""

    status: CallStatus
    """`OK`, `REPAIRED`, `INVALID_JSON` or `INCOMPLETE`."""
    start: int
    end: int
    value: Any = None
    error: str | None = None
    scan: JsonScan | None = None


def read_value(
    run: Run, start: int, ends: Needles | None, watch: Callable[[JsonScan], None] | None = None
) -> Step[JsonValue]:
    """Read the JSON object or array that begins at `start`.

    ends: markers that end a value which is not JSON. None: its brackets end it.
    watch: called with the scan after each step, if the run streams.
    """
    if not run.streams and run.rejections < MANY_REJECTIONS:
        try:
            literal = read_json(run.text, start)
            return _whole(literal, start, literal.end)
        except LiteralError:
            run.rejections += 1
    scan = JsonScan(start, ends.literals if ends is not None else ())
    while True:
        scan.advance(run.text)
        if watch is not None and run.streams:
            watch(scan)
        if scan.closed or scan.broken or run.final:
            break
        yield
    reason = "the text ends inside"
    if scan.closed:
        try:
            literal = read_json(run.text[start : scan.position])
            if start + literal.end == scan.position:
                return _whole(literal, start, scan.position, scan)
        except LiteralError as error:
            reason = f"{error.reason} at {start + error.position}"
    if ends is None:
        return _without_ends(run, scan, reason)
    marker = yield from run.find_bound(ends, start)
    stop, after = marker if marker is not None else (len(run.text), len(run.text))
    cut = JsonValue(CallStatus.INCOMPLETE, start, len(run.text), error="the text ends inside the JSON", scan=scan)
    try:
        literal = read_damaged(run.text, start, stop)
        if marker is not None or not literal.unclosed:
            return JsonValue(CallStatus.REPAIRED, start, literal.end, literal.value, ", ".join(literal.notes), scan)
    except LiteralError as error:
        reason = str(error)
        if error.incomplete and marker is None:
            return cut
    if not (scan.closed or scan.broken):
        # The text ends inside a string. A marker in that string is data if free text follows it to the end.
        if marker is None or (run.text[after:].strip() and ends.pattern.search(run.text, after) is None):
            return cut
    elif scan.closed and scan.position < stop:
        stop = scan.position
    return JsonValue(CallStatus.INVALID_JSON, start, stop, error=reason, scan=scan)


def read_damaged(text: str, start: int, end: int) -> Literal:
    """`read_tolerant`. It is loaded, in some milliseconds, by the first text that is not JSON: many runs meet none."""
    from tool_call_parsers.literals.tolerant import read_tolerant

    return read_tolerant(text, start, end)


def _whole(literal: Literal, start: int, end: int, scan: JsonScan | None = None) -> JsonValue:
    """JSON without a defect, except that keys may be repeated."""
    status = CallStatus.REPAIRED if literal.notes else CallStatus.OK
    return JsonValue(status, start, end, literal.value, ", ".join(literal.notes) or None, scan)


def _without_ends(run: Run, scan: JsonScan, reason: str) -> JsonValue:
    """A value that is not JSON and that only its brackets end."""
    start, end = scan.start, scan.position
    if not (scan.closed or scan.broken):
        return JsonValue(CallStatus.INCOMPLETE, start, len(run.text), error="the text ends inside the JSON", scan=scan)
    try:
        literal = read_damaged(run.text, start, end)
        if scan.closed and literal.end == end:
            return JsonValue(CallStatus.REPAIRED, start, end, literal.value, ", ".join(literal.notes), scan)
    except LiteralError as error:
        reason = str(error)
    return JsonValue(CallStatus.INVALID_JSON, start, end, error=reason, scan=scan)
