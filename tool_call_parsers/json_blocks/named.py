"""Calls with the name in a header before a JSON object of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from tool_call_parsers.arguments import ArgumentsWatch, FoundArguments, no_arguments, plain_name, read_literal
from tool_call_parsers.engine import SPACE, BlockGrammar, Marker, Needles, RenderCall, RenderTurn, Run, Step, cut_off
from tool_call_parsers.json_blocks.attempts import FENCES, MANY_OPENERS, named_attempt, openers_behind, skip_repeated
from tool_call_parsers.json_scan import read_value
from tool_call_parsers.literals.literal import Literal, LiteralError
from tool_call_parsers.literals.strict import read_json
from tool_call_parsers.row_checks import Syntax, check_template
from tool_call_parsers.schema import ToolIndex
from tool_call_parsers.types import CallStatus

_WORD = re.compile(r"[^\s<>{}\[\]|\"'`]{1,256}")
_FENCE = "```(?:json)?"
_AHEAD = 1024
"""How many characters are read first of a value that may be none."""


class CallHeader(NamedTuple):
    """The text between a call's opening marker and its arguments."""

    name: str
    native_id: str | None = None
    error: str | None = None
    """What was repaired in it."""


Words: TypeAlias = tuple[str, ...]
_End: TypeAlias = Callable[[list[str]], object]
Given: TypeAlias = Mapping[str, Any] | None
"""The arguments; None while they are not read."""


def read_name(words: Words, tools: ToolIndex, arguments: Given) -> CallHeader | None:
    """The first word is the name."""
    return CallHeader(words[0]) if words and _WORD.fullmatch(words[0]) else None


@dataclass(frozen=True)
class NamedJson(BlockGrammar):
    """Calls with the name in a header before a JSON object of arguments."""

    opens: tuple[str, ...]
    """Spellings of a call's opening marker, the canonical one first."""
    closes: tuple[str, ...] = ()
    """Spellings of a call's closing marker."""
    sections: tuple[str, ...] = ()
    """Spellings of the marker that opens a section of calls."""
    section_closes: tuple[str, ...] = ()
    """Spellings of the marker that closes a section."""
    open_section: bool = False
    """The chat templates of some of the models leave a section open at the end of a turn."""
    marks: tuple[str, ...] = ()
    """Markers inside the header."""
    argument_marks: tuple[str, ...] = ()
    """Those of `marks` that precede the arguments; by default any after the name does. A code fence always does."""
    fillers: tuple[str, ...] = ()
    """Words of the header that are not the name."""
    reading: Callable[[Words, ToolIndex, Given], CallHeader | None] = read_name
    """Reads name and id from the words of a header; None if they hold no name. The arguments are None at first."""
    next_mark: str | None = None
    """A further call may lack its opening marker if a word and this marker follow a call."""
    separators: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    """The text before and after all calls of a turn."""
    call: str = ""
    """The text of a call: `%(name)s`, `%(arguments)s`, `%(id)s`."""
    between: str = ""
    """The text between two calls."""
    writing: Callable[[RenderCall], str] | None = None
    """Makes the id to write."""
    also: tuple[str, ...] = ()
    """Other texts of a call that the row's models write, as `call`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self, "call", Syntax.PERCENT, ("arguments",), ("name", "id"))

    openers = cached_property(lambda self: (*self.sections, *self.opens))
    closers = cached_property(lambda self: (*self.section_closes, *self.closes))
    _open = cached_property(lambda self: Needles(*self.opens))
    _close = cached_property(lambda self: Needles(*self.closes))
    _behind = cached_property(lambda self: openers_behind(self.closes, self.opens))
    _repeated = cached_property(lambda self: Needles(*self.closes, *self._behind))
    _inner = cached_property(lambda self: Needles(*self.marks))
    _sections = cached_property(lambda self: Needles(*self.sections))
    _closers = cached_property(lambda self: Needles(*self.closers))
    _section_close = cached_property(lambda self: Needles(*self.section_closes))
    _written = cached_property(lambda self: tuple(map(self._pattern, (self.call, *self.also))))

    def _pattern(self, call: str) -> tuple[re.Pattern[str], bool]:
        """A call's header as the model writes it, and whether a code fence closes its arguments."""
        head, _, tail = call.removeprefix(self.opens[0]).partition("%(arguments)s")
        pieces = re.split(r"(%\((?:name|id)\)s)|\s+", head)
        parts = [
            r"([^\s<>{}\[\]]{1,256}?)" if piece.startswith("%(") else re.escape(piece) for piece in pieces if piece
        ]
        return re.compile(r"\s*".join(("", *parts, ""))), "```" in tail

    _header_end = cached_property(lambda self: Needles("{", *self.openers, *self.closers))
    _ends = cached_property(lambda self: Needles(*self.openers, *self.closers))

    _marks = cached_property(lambda self: re.compile("|".join([*map(re.escape, self.marks), _FENCE])))
    _argument_marks = cached_property(lambda self: re.compile("|".join([*map(re.escape, self.argument_marks), _FENCE])))

    # -- reading ------------------------------------------------------------------------------------------------------

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        position, note = body, "no section" if self.sections else None
        if opener in self.sections:
            note = None if opener == self.sections[0] else f"{opener!r} opens the section"
            position = yield from run.skip_space(body)
            if not run.text.startswith(self.opens, position):
                position, again = yield from skip_repeated(run, position, self._sections, MANY_OPENERS)
                position = yield from run.skip_space(position)
                note = "the section is opened twice" if again else note
            following = yield from run.starts(position, self._open)
            if following is None:
                if position == len(run.text) or self._open.begins(run.text, position):
                    return cut_off(run, start, self.separators)
                return (yield from named_attempt(run, start, position, self._ends, self.closers))
            position += len(following)
        notes = [note] if note else []
        if not run.final or run.text[position : position + 1].isspace() or run.text.startswith(self.opens, position):
            position, twice = yield from skip_repeated(run, position, self._open, MANY_OPENERS)
            notes += ["the opening marker twice"] if twice else []
        begin: int = start
        section = opener in self.sections
        found = yield from self._call(run, begin, position, begun=False)
        if found is None:
            return (yield from named_attempt(run, start, position, self._ends, self.closers))
        while found is not None:
            end, ended = found
            between: list[str] = []
            position = yield from run.skip_space(end)
            while position < len(run.text) and run.text[position] in ",;":
                between = [f"{run.text[position]!r} between calls"]
                position = yield from run.skip_space(position + 1)
            following = yield from run.starts(position, self._open)
            closer = None if following is not None else (yield from run.starts(position, self._section_close))
            unmarked = following is None and closer is None and (yield from self._unmarked(run, position))
            if section and following is None and not unmarked:
                if closer is None:
                    # A marker that the template does not write ends the turn, and servers strip it.
                    may_be_open = self.open_section or self.section_closes[0] not in self.frame[1]
                    marker = yield from run.starts(position, run.markers.all)
                    over = position == len(run.text) or (marker and run.markers.kinds[marker] is Marker.END)
                    notes += [] if may_be_open and over else ["the section is not closed"]
                elif closer != self.section_closes[0]:
                    notes.append(f"{closer!r} closes the section")
            if closer is not None:
                after, twice = yield from skip_repeated(run, position + len(closer), self._section_close)
                notes += ["the section is closed twice"] if twice else []
            ended(notes)
            if closer is not None:
                if run.follows_markup(position):
                    end = after
                    run.skip(end)
                return end
            if following is None and not unmarked:
                return end
            begin, notes = end, between if section or not self.sections else ["no section", *between]
            notes += ["no opening marker"] if unmarked else []
            position += len(following) if following is not None else 0
            found = yield from self._call(run, begin, position, begun=True)
        return begin

    def _unmarked(self, run: Run, position: int) -> Step[bool]:
        """Whether a word and `next_mark` are at `position`."""
        if self.next_mark is None:
            return False
        while True:
            word = _WORD.match(run.text, position)
            end = word.end() if word is not None else position
            if end < len(run.text) or run.final:
                break
            yield
        return end > position and (yield from run.starts(end, Needles(self.next_mark))) is not None

    def _call(self, run: Run, start: int, position: int, begun: bool) -> Step[tuple[int, _End] | None]:
        """Read one call, which begins at `start` and whose header begins at `position`. Return its end, and the
        function that records it with what the text after it shows to be wrong; None if there is no call."""
        if not run.streams and (usual := self._usual(run, position)) is not None:
            begin, fenced, known = usual
            run.begin_block(start, self.separators)
            read = yield from read_value(run, begin, self._ends)
            value = read.value if isinstance(read.value, dict) else {}
            arguments = FoundArguments(read.status, value, run.text[read.start : read.end], read.error)
            end, notes = yield from self._end_of_call(run, read.end, fenced)
            return end, _ended(run, start, end, known, arguments, notes)
        stop = yield from run.find(self._header_end, position)
        header_end = stop.start() if stop is not None else len(run.text)
        other = self._other_arguments(run.text, position, header_end)
        words = self._words(run.text[position : header_end if other is None else other])
        header = self._header(words, run.tools, None)
        if header is None and words and not all(map(_WORD.fullmatch, words)):
            return None
        if stop is None and (other is None or header is None or not _is_json(run.text, other)):
            if not begun and header is None and words:
                return None
            run.begin_block(start, self.separators)
            cut = "the text ends before the arguments"
            name = header.name if header else ""
            end = len(run.text)
            return end, lambda _: run.end_call(start, end, CallStatus.INCOMPLETE, name, error=cut)
        run.begin_block(start, self.separators)
        begin = header_end if other is None else other
        if other is not None:
            end, arguments = yield from self._read_other(run, other)
        elif stop is not None and stop.group() == "{":
            if header is not None and header.error is None:
                run.start_call(header.name, header.native_id)
            read = yield from read_value(run, stop.start(), self._ends, ArgumentsWatch(run, stop.start()))
            arguments = FoundArguments(read.status, {}, run.text[read.start : read.end], read.error)
            if isinstance(read.value, dict):
                arguments = arguments._replace(value=read.value)
            end = read.end
        else:
            if stop is not None and stop.group() not in self.closes:
                header = None
            end, arguments = header_end, no_arguments("nothing")
            after = header_end if stop is None else (yield from run.skip_space(stop.end()))
            if stop is not None and (
                stop.group() in self.openers
                or run.text.startswith("{", after)
                or (yield from run.starts(after, self._inner)) is not None
            ):
                # It is not clear whose arguments follow.
                arguments = FoundArguments(CallStatus.MALFORMED, {}, "", f"{stop.group()} in place of the arguments")
        status, error = arguments.status, arguments.error
        if header is None and status in (CallStatus.OK, CallStatus.REPAIRED):
            header = self._header(words, run.tools, arguments.value)
        if header is None:
            header = CallHeader("")
            if status in (CallStatus.OK, CallStatus.REPAIRED):
                status, error = CallStatus.MISSING_NAME, "the call names no tool"
        elif header.error is not None:
            error = "; ".join(filter(None, (header.error, error)))
            status = CallStatus.REPAIRED if status is CallStatus.OK else status
            arguments = arguments._replace(value=_without_name(arguments.value, header.name, run.tools))
        written = next((form for form in self._written if form[0].fullmatch(run.text, position, begin)), None)
        fenced = written[1] if written is not None else "```" in run.text[position:begin]
        end, notes = yield from self._end_of_call(run, end, fenced)
        if written is None:
            notes.insert(0, "a header that the model does not write")
        arguments = arguments._replace(status=status, error=error)
        return end, _ended(run, start, end, header, arguments, notes)

    def _usual(self, run: Run, position: int) -> tuple[int, bool, CallHeader] | None:
        """The end of a header at `position` as the model writes it, before an object, with the name in it."""
        for form, fenced in self._written:
            match = form.match(run.text, position)
            if match is not None and run.text.startswith("{", match.end()):
                header = self._header(match.groups(), run.tools, None)
                return (match.end(), fenced, header) if header is not None and header.error is None else None
        return None

    def _other_arguments(self, text: str, position: int, header_end: int) -> int | None:
        """Where arguments that are not an object begin; None if there are none before `header_end`."""
        named, end = False, position
        for mark in self._marks.finditer(text, position, header_end):
            word = text[end : mark.start()].strip()
            named, end = named or bool(word and word not in self.fillers), mark.end()
            certain = self._argument_marks.fullmatch(mark.group()) is not None
            if not named or (self.argument_marks and not certain):
                continue
            begin = SPACE.match(text, end).end()  # type: ignore[union-attr]  # matches anywhere
            if begin >= header_end:
                return None
            if self._marks.match(text, begin) is None:
                word = text[begin:header_end].strip()
                labels = _WORD.fullmatch(word) or not (certain or text[begin] in '["')
                return None if text.startswith("{", header_end) and labels else begin
        return None

    def _read_other(self, run: Run, start: int) -> Step[tuple[int, FoundArguments]]:
        """Read arguments that are not an object. Return their end, and the arguments with a status."""
        tried = 0
        while True:
            if run.final or len(run.text) >= tried:
                tried = start + 2 * (len(run.text) - start)
                try:
                    literal, end = _read_ahead(run.text, start)
                    if run.final or end < len(run.text):
                        return end, read_literal(literal, run.text[start:end])
                except LiteralError as error:
                    if run.final or not error.incomplete:
                        break
            yield
        stop = yield from run.find(self._ends, start)
        end = stop.start() if stop is not None else len(run.text)
        return end, FoundArguments(CallStatus.INVALID_JSON, {}, run.text[start:end], "the arguments are not JSON")

    def _words(self, header: str) -> tuple[str, ...]:
        return tuple(filter(None, map(str.strip, self._marks.split(header))))

    def _header(self, words: Words, tools: ToolIndex, arguments: Given) -> CallHeader | None:
        if len(words) > 1 and words[0] in self.fillers:
            words = words[1:]
        header = self.reading(words, tools, arguments)
        if header is not None and (plain := plain_name(header.name, tools)) is not None:
            error = "; ".join(filter(None, (header.error, f"the name is written {header.name!r}")))
            return CallHeader(plain, header.native_id, error)
        return header

    def _end_of_call(self, run: Run, end: int, fenced: bool) -> Step[tuple[int, list[str]]]:
        """The end of a call whose JSON ends at `end`, and what is wrong with the text up to there."""
        notes: list[str] = []
        fences = 0
        while True:
            position = yield from run.skip_space(end)
            if run.text.startswith("}", position):
                notes, end = [*notes, "one '}' too many"], position + 1
            elif run.text.startswith("`", position) and (yield from run.starts(position, FENCES)) == "```":
                fences, end = fences + 1, position + 3
            else:
                break
        if fences != fenced:
            notes.append("the code fence is not closed" if fenced else "a code fence too many")
        closer = yield from run.starts(position, self._close)
        if closer is None:
            return end, [*notes, "no closing marker"] if self.closes else notes
        if closer != self.closes[0]:
            notes.append(f"{closer!r} closes the call")
        end, again = yield from skip_repeated(run, position + len(closer), self._repeated, others=self._behind)
        return end, [*notes, "the closing marker twice"] if again else notes

    # -- writing ------------------------------------------------------------------------------------------------------

    def render_calls(self, turn: RenderTurn) -> str:
        before, after = self.frame
        calls = []
        for call in turn.calls:
            native = self.writing(call) if self.writing is not None else call.id
            calls.append(self.call % {"name": call.name, "arguments": call.json_text, "id": native})
        return before + self.between.join(calls) + after


def _ended(
    run: Run, start: int, end: int, header: CallHeader, arguments: FoundArguments, notes: list[str]
) -> Callable[[list[str]], object]:
    """The function that records a call."""

    def ended(more: list[str]) -> object:
        status, error = arguments.status, arguments.error
        if (notes or more) and status in (CallStatus.OK, CallStatus.REPAIRED):
            status, error = CallStatus.REPAIRED, "; ".join(filter(None, (error, *notes, *more)))
        value, raw, native = arguments.value, arguments.raw, header.native_id
        return run.end_call(start, end, status, header.name, value, raw, error=error, native_id=native)

    return ended


def _read_ahead(text: str, start: int) -> tuple[Literal, int]:
    """The JSON value at `start`, and its end. Reads no further than needed: an error costs the text before it.

    Raises `LiteralError`.
    """
    width = _AHEAD
    while True:
        piece = text[start : start + width]
        try:
            literal = read_json(piece)
            if literal.end < len(piece) or start + width >= len(text):
                return literal, start + literal.end
        except LiteralError as error:
            if not error.incomplete or start + width >= len(text):
                raise
        width *= 4


def _is_json(text: str, start: int) -> bool:
    """Whether the text from `start` on is a single JSON value."""
    try:
        return not text[_read_ahead(text, start)[1] :].strip()
    except LiteralError:
        return False


def _without_name(arguments: dict[str, Any], name: str, tools: ToolIndex) -> dict[str, Any]:
    """The arguments without the name, if it was found among them."""
    if arguments.get("name") == name and not tools.declares(name, "name"):
        return {key: value for key, value in arguments.items() if key != "name"}
    return arguments
