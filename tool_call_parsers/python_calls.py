"""Calls as Python writes them, with literals for arguments: `[f(a='x'), g()]`, or one a line.

The reader first finds the end of a call by its strings and brackets, reading each character once, and then reads the
call. A quote ends a string only before text that may follow a string there, which tolerates unescaped quotes. If that
fails, the next place where a call must have ended bounds a second attempt.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tool_call_parsers.arguments import plain_name
from tool_call_parsers.engine import BlockGrammar, Needles, RenderCall, RenderTurn, Run, Step, cut_off
from tool_call_parsers.json_blocks.attempts import MANY_OPENERS, named_attempt, skip_repeated
from tool_call_parsers.json_blocks.blocks import JsonBlocks
from tool_call_parsers.literals.reader import CALL_NAME
from tool_call_parsers.python_elements import CallHead, Element, Gap, Kind, read_element
from tool_call_parsers.python_scan import follow_call
from tool_call_parsers.types import CallStatus

_HEAD = re.compile(rf"({CALL_NAME})[ \t]*+\(")
_HEAD_CUT = re.compile(rf"{CALL_NAME}\.?[ \t]*+\Z")
_MAX_HEAD = 256
_BARE = ("[", "{")
"""Openers that are not markers."""
_NO_BRACKET = "no closing bracket"
_BEFORE_BARE = re.compile(r"\n[ \t]*\Z")
_MAX_INDENT = 16


@dataclass(frozen=True)
class PythonCalls(BlockGrammar):
    """Calls in Python's syntax between markers."""

    openers: tuple[str, ...]
    """Opening markers. `[` among them allows a list without markers, at the beginning or on the answer's last line;
    `{` allows calls of offered tools as bare JSON, which models write under other templates."""
    closers: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()
    lines: bool = False
    """One call a line instead of a list."""
    json_strings: bool = False
    """Arguments are written as JSON."""
    json_containers: tuple[type, ...] = ()
    """The containers that are written as JSON. If only objects are, arrays are Python's throughout."""
    json_calls: bool = False
    """Models write lists of JSON objects as well, if they are asked to."""
    frame: tuple[str, str] = ("[", "]")
    """The text around the calls."""

    _marked = cached_property(lambda self: tuple(opener for opener in self.openers if opener not in _BARE))
    _opens = cached_property(lambda self: Needles(*self._marked))
    _tags = cached_property(lambda self: Needles(*self._marked, *self.closers))
    _ends = cached_property(lambda self: Needles(*self.closers))
    _junk_ends = cached_property(lambda self: Needles(*self._tags.literals, *("\n" if self.lines else ",]")))

    @cached_property
    def _json(self) -> JsonBlocks:
        """The same block around a list of JSON objects, which some models write."""
        keys = ("arguments", "parameters")
        return JsonBlocks(
            self._marked,
            self.closers,
            self.separators,
            argument_keys=keys,
            in_list=True,
            bare=True,
            bare_offered=True,
            instead="" if self.json_calls else "JSON in place of Python",
        )

    @cached_property
    def _bounds(self) -> re.Pattern[str]:
        """Where a call has ended, whatever its quotes say: at the end of the block, or before another call or block."""
        closers = "|".join(map(re.escape, self.closers)) or "(?!)"
        openers = "|".join(map(re.escape, self._marked)) or "(?!)"
        sibling = r"\n[ \t]{0,8}" if self.lines else r"\)\s{0,8},\s{0,8}"
        return re.compile(
            rf"\)\s{{0,8}}(?:\]\s{{0,8}})?(?:{closers}|(?:<[|/]{{0,2}}\w{{1,24}}\|?>)?\s{{0,8}}\Z)"
            rf"|(?:{openers})\s{{0,8}}\[?\s{{0,8}}[^\W\d][\w.-]{{0,63}}\("
            rf"|{sibling}([^\W\d][\w.-]{{0,63}})\("
        )

    _bounds_width = cached_property(lambda self: 100 + self._tags.longest)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def may_open(self, run: Run, start: int, opener: str) -> bool:
        before = run.text[max(0, start - _MAX_INDENT) : start]
        return opener not in _BARE or run.begins_answer(start) or _BEFORE_BARE.search(before) is not None

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        bare = opener in _BARE
        first = run.begins_answer(start)
        if not self.may_open(run, start, opener):
            return None
        position = yield from run.skip_space(start if bare else body)
        notes: list[str] = []
        if not bare:
            position, again = yield from skip_repeated(run, position, self._opens, MANY_OPENERS)
            if again:
                position = yield from run.skip_space(position)
                notes.append("the opening marker twice")
        listed = run.text.startswith("[", position)
        if listed:
            position = yield from run.skip_space(position + 1)
        if position == len(run.text):
            return None if bare else cut_off(run, start, self.separators)
        if bare and run.text[position] == "{":
            return (yield from self._json.block(run, start, body, opener)) if first and "{" in self.openers else None
        if not bare and (run.text[position] == "{" or (listed and run.text[position] == "]")):
            return (yield from self._json.block(run, start, body, opener))
        head = yield from self._head(run, position)
        if bare:
            if head is None or run.text[head.bracket - 1].isspace() or not (first or run.tools.offered(head.name)):
                return None
            return (yield from self._bare(run, start, position, head, first))
        if head is None and not (listed or self.lines):
            return (yield from named_attempt(run, start, position, self._tags, self.closers))
        if head is None and not _is_cut(run, position):
            closer = yield from run.find(self._tags, position)
            if closer is None or closer.group() not in self.closers:
                return (yield from named_attempt(run, start, position, self._tags, self.closers))
        run.begin_block(start, self.separators)
        begin = start
        if listed is self.lines:
            notes.append("a list" if listed else "no opening bracket")
        while True:
            element = yield from self._element(run, position, head, listed, tagged=True, first=True)
            kind, position, _ = element.gap
            more, end = list(notes), position
            if kind is not Kind.NEXT:
                closed = run.text.endswith(self.closers, element.end, position)
                more += [] if closed or not self.closers else ["no closing marker"]
                if closed:
                    end, twice = yield from skip_repeated(run, position, self._ends)
                    more += ["the closing marker twice"] if twice else []
                if listed and end == position:
                    end = yield from self._echo(run, run.text[body:position].lstrip(), position)
                    more += ["the block is repeated"] if end > position else []
            self._record(run, begin, element, more)
            if kind is not Kind.NEXT:
                if end > position and run.follows_markup(position):
                    run.skip(end)
                    return end
                return position
            if position == len(run.text):
                run.open_at_end = True
                return position
            begin = position
            head = yield from self._head(run, position)

    def _bare(self, run: Run, start: int, position: int, head: CallHead | None, first: bool) -> Step[int | None]:
        """A list without markers. It counts if nothing else is on its last line, and after content only if it is
        flawless and nothing follows at all, because prose has brackets too."""
        elements: list[Element] = []
        while True:
            element = yield from self._element(run, position, head, True, tagged=False, first=first)
            elements.append(element)
            kind, position, missing = element.gap
            if kind is not Kind.NEXT or position == len(run.text):
                break
            if (head := (yield from self._head(run, position))) is None and not _is_cut(run, position):
                kind = Kind.ODD
                break
        is_list = kind is not Kind.ODD
        if is_list and not first:
            whole = kind is Kind.OVER and not missing
            is_list = whole and all(element.status is CallStatus.OK for element in elements)
        if is_list and kind is Kind.OVER:
            following = yield from run.skip_space(position)
            if following < len(run.text) and not (first and "\n" in run.text[position:following]):
                marker = yield from run.starts(following, run.markers.all)
                is_list = run.text.endswith(self.closers, start, position) or marker not in (None, *_BARE)
        if not is_list:
            # The text is not read again, except for other markers in it.
            inside = run.markers.all.pattern.finditer(run.text, start + 1, position)
            return next((marker.start() for marker in inside if marker.group() not in _BARE), max(position, start + 1))
        run.begin_block(start, self.separators or ("\n",))
        half = ["no opening marker"] if run.text.endswith(self.closers, start, position) else []
        for element in elements:
            self._record(run, start if element is elements[0] else element.start, element, half)
        run.open_at_end |= kind is Kind.NEXT
        return position

    def _record(self, run: Run, begin: int, element: Element, notes: list[str]) -> None:
        last = element.gap.kind is not Kind.NEXT
        status, error = element.status, element.error
        notes = [*notes, element.gap.missing] if element.gap.missing else notes
        if notes and status in (CallStatus.OK, CallStatus.REPAIRED):
            status, error = CallStatus.REPAIRED, "; ".join(filter(None, (*notes, error)))
        end = element.gap.end if last else element.end
        if run.end_call(begin, end, status, element.name, element.arguments, element.raw, error=error):
            run.skip(element.gap.end)

    def _echo(self, run: Run, block: str, end: int) -> Step[int]:
        """The position after repetitions of the block without its opening marker, which are ignored."""
        if not block.endswith(self.closers):
            return end
        while True:
            same = 0
            while same < len(block):
                if not (yield from run.more(end + same + 1)):
                    return end
                piece = run.text[end + same : end + len(block)]
                if not block.startswith(piece, same):
                    return end
                same += len(piece)
            end += same

    # -- elements -----------------------------------------------------------------------------------------------------

    def _head(self, run: Run, position: int) -> Step[CallHead | None]:
        """The beginning of a call at `position`."""
        while True:
            match = _HEAD.match(run.text, position)
            if match is not None:
                return CallHead(match[1], match.end() - 1) if match.end() - position <= _MAX_HEAD else None
            if run.final or len(run.text) - position > _MAX_HEAD:
                return None
            if position < len(run.text) and not _HEAD_CUT.match(run.text, position):
                return None
            yield

    def _element(
        self, run: Run, position: int, head: CallHead | None, listed: bool, *, tagged: bool, first: bool
    ) -> Step[Element]:
        """The call at `position`, or the text in place of one."""
        if head is None:
            return (yield from self._no_call(run, position, listed))
        name = plain_name(head.name, run.tools) or head.name
        if run.streams and tagged:
            run.start_call(name)
        stop = yield from follow_call(run, head.bracket, self._tags)
        gap = Gap(Kind.ODD, stop.position)
        if stop.closed or stop.at_marker:
            gap = yield from self._gap(run, stop.position, listed)
        raw, error = run.text[head.bracket + 1 : stop.position], "brackets that do not match"
        failed = Element(position, stop.position, gap, CallStatus.INVALID_JSON, name, None, raw, error)
        if stop.closed:
            found = read_element(run, position, stop.position, gap, head)
            if gap.kind is not Kind.ODD and found.status is not CallStatus.INVALID_JSON:
                return found
            failed = found
        cut = not stop.closed and stop.position == len(run.text) and run.final
        if gap.kind is not Kind.ODD:
            inside = self._bounds.finditer(run.text, position, stop.position)
            bound = next(filter(None, (self._bound(run, match) for match in inside)), None)
        elif first:
            bound = yield from self._next_bound(run, position)
        else:
            bound = None
        if bound is not None and bound != stop.position:
            gap = yield from self._gap(run, bound, listed)
            second = read_element(run, position, bound, gap, head)
            if second.status is not CallStatus.INVALID_JSON and gap.kind is not Kind.ODD:
                return second
            if tagged and not cut:
                return second._replace(status=CallStatus.INVALID_JSON, error=second.error or "more than one call")
        if cut:
            # The rest may be the contents of an open string, so it holds no further calls.
            over, error = Gap(Kind.OVER, stop.position), "the text ends inside the arguments"
            return failed._replace(gap=over if first else failed.gap, status=CallStatus.INCOMPLETE, error=error)
        return failed._replace(status=CallStatus.INVALID_JSON, error=failed.error or "something else follows the call")

    def _no_call(self, run: Run, position: int, listed: bool) -> Step[Element]:
        """Text that is not a call, up to where one may begin."""
        if _is_cut(run, position):
            end, error = len(run.text), "the text ends where a call begins"
            return Element(position, end, Gap(Kind.OVER, end), CallStatus.INCOMPLETE, error=error)
        match = yield from run.find(self._junk_ends, position)
        end = match.start() if match is not None else len(run.text)
        gap = yield from self._gap(run, end, listed)
        return Element(position, end, gap, CallStatus.MALFORMED, error="no call")

    def _gap(self, run: Run, end: int, listed: bool) -> Step[Gap]:
        """The text after an element that ends at `end`."""
        missing = _NO_BRACKET if listed else None
        position, comma = (yield from run.skip_space(end)), False
        while run.text.startswith(",", position):
            position, comma = (yield from run.skip_space(position + 1)), True
        if position == len(run.text):
            return Gap(Kind.NEXT, position) if comma else Gap(Kind.OVER, end, missing)
        if listed and run.text[position] == "]":
            end, missing = position + 1, None
            position = yield from run.skip_space(end)
        marker = yield from run.starts(position, run.markers.all)
        if marker in self.closers:
            return Gap(Kind.OVER, position + len(marker), missing)
        if run.final and self._ends.begins(run.text, position):
            return Gap(Kind.OVER, len(run.text), missing)
        if (listed and missing is None) or marker not in (None, *_BARE):
            return Gap(Kind.OVER, end, missing)
        if comma or (self.lines and "\n" in run.text[end:position]):
            return Gap(Kind.NEXT, position)
        if position > end and (yield from self._head(run, position)) is not None:
            return Gap(Kind.NEXT, position, "no comma")
        return Gap(Kind.ODD, end)

    def _next_bound(self, run: Run, start: int) -> Step[int | None]:
        """The first place from `start` on where a call must have ended."""
        while (match := (yield from run.find_pattern(self._bounds, start, self._bounds_width))) is not None:
            bound = self._bound(run, match)
            if bound is not None:
                return bound
            start = match.start() + 1
        return None

    def _bound(self, run: Run, match: re.Match[str]) -> int | None:
        """Where a match of `_bounds` ends a call. A sibling counts only if it names a tool."""
        if match[1] is not None and match[1] not in run.tools.names():
            return None
        return match.start() + (match.group()[0] == ")")

    # -- writing ------------------------------------------------------------------------------------------------------

    def render_calls(self, turn: RenderTurn) -> str:
        between = "\n" if self.lines else ", "
        return self.frame[0] + between.join(map(self._write_call, turn.calls)) + self.frame[1]

    def _write_call(self, call: RenderCall) -> str:
        arguments = ", ".join(f"{name}={self._write(value)}" for name, value in call.arguments.items())
        return f"{call.name}({arguments})"

    def _write(self, value: Any) -> str:
        if self.json_strings or isinstance(value, self.json_containers):
            return json.dumps(value, ensure_ascii=False)
        if self.json_containers and isinstance(value, (list, tuple)):
            return repr(list(value))
        if isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
            return f"'{escaped}'"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self._write(str(key))}: {self._write(item)}" for key, item in value.items()) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self._write, value)) + "]"
        return repr(value)


def _is_cut(run: Run, position: int) -> bool:
    """Whether the text ends inside the name of a call at `position`."""
    if not run.final or len(run.text) - position > _MAX_HEAD:
        return False
    return position == len(run.text) or _HEAD_CUT.match(run.text, position) is not None
