"""JSON between markers: calls as objects (`{"name": ..., "arguments": {...}}`), alone or in a list, and calls with the
name in a header and the arguments as an object behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from tool_call_parsers.engine import SPACE, BlockGrammar, Needles, RenderCall, Run, Step, Turn, cut_off
from tool_call_parsers.json_scan import MANY, JsonScan, JsonValue, read_value
from tool_call_parsers.literals import MAX_DEPTH, LiteralError, read_json, read_tolerant, repair_json
from tool_call_parsers.schema import ToolIndex
from tool_call_parsers.types import CallStatus

_FENCES = Needles("```json", "```tool_call", "```tool_code", "```")
_CLOSING_BRACE = re.compile(r"[ \t\r\n]*\}")
_STRAY, _STRAY_RATIO = 4096, 4
"""How much may have been read in vain, in all and per character, before an object without a marker is not read."""
_BESIDES = frozenset({"id", "type", "tool_call_id", "index"})
"""Members of a call object that are neither its name nor its arguments."""
_LAX_NAMES = ("name", "tool_name", "function", "tool", "function_name")
_LAX_ARGUMENTS = ("arguments", "parameters", "args", "input", "params")


class Arguments(NamedTuple):
    """Arguments as they were found, and what they are worth."""

    status: CallStatus
    value: dict[str, Any]
    raw: str
    error: str | None = None


def read_arguments(value: object, raw: str) -> Arguments:
    """What a decoded value is worth as arguments: an object, none at all, or an object's JSON text in a string."""
    if isinstance(value, dict):
        return Arguments(CallStatus.OK, value, raw)
    if value is None:
        return Arguments(CallStatus.OK, {}, "")
    if isinstance(value, str):
        inner = value.strip()
        if not inner or inner == "null":
            return Arguments(CallStatus.OK, {}, "")
        try:
            literal = read_json(inner)
            if literal.end == len(inner) and isinstance(literal.value, dict):
                return Arguments(CallStatus.OK, literal.value, inner)
        except LiteralError:
            pass
        repaired = repair_json(inner)
        if repaired is not None and isinstance(repaired.value, dict):
            return Arguments(CallStatus.REPAIRED, repaired.value, inner, ", ".join(repaired.notes))
    elif value == []:
        return Arguments(CallStatus.REPAIRED, {}, raw, "an empty list instead of an object")
    return Arguments(CallStatus.NOT_AN_OBJECT, {}, raw, f"the arguments are no object but a {type(value).__name__}")


class _Call(NamedTuple):
    """A call object as read."""

    status: CallStatus
    start: int
    end: int
    name: str = ""
    arguments: dict[str, Any] | None = None
    raw: str = ""
    error: str | None = None
    native_id: str | None = None


class _Gap(NamedTuple):
    """What stands behind a call object."""

    end: int
    """Where the call's own markup ends."""
    next: int | None
    """Where the next object of the block begins; None when the block is over."""
    in_list: bool
    surplus: str | None
    """What there was one too many of."""
    loose: bool = False
    """Nothing but its place tells that the next object is one of the block: it may be data."""


@dataclass(frozen=True)
class JsonBlocks(BlockGrammar):
    """Calls as JSON objects behind an opening marker: one, several, or a list of them."""

    opens: tuple[str, ...]
    """Spellings of the opening marker, the canonical one first."""
    closes: tuple[str, ...] = ()
    """Spellings of the closing marker. Without any, the JSON's own end closes."""
    separators: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    """What the model writes before and behind the JSON of a block, markers included."""
    between: str = "\n"
    """What it writes between two blocks, or two objects of a list."""
    in_list: bool = False
    """All calls of a turn stand in one list in one block; `frame` includes its brackets."""
    written: str = '{"name": %(name)s, "arguments": %(arguments)s}'
    """A call as it is written: `%(name)s`, `%(arguments)s`, `%(id)s`, `%(index)d`."""
    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments",)
    id_key: str | None = None
    """Key of the call's own id."""
    single_key: bool = False
    """A call is an object with one member: the name, and under it the arguments."""
    bare: bool = False
    """The marker may be missing where nothing but whitespace, reasoning or other calls came before."""
    bare_offered: bool = False
    """Without the marker only offered tools are called, at the beginning of any line: data looks like other calls."""
    drops: tuple[str, ...] = ()
    around_content: tuple[str, str] = ("", "")
    """What the model writes around content."""
    compact: bool = False
    """JSON is written without blanks."""
    named: NamedJson | None = None
    """Calls with the name in a header, behind the same marker or behind markers of their own."""
    writes_named: bool = False
    """Calls are written as `named` writes them."""

    @cached_property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        named = self.named.openers if self.named is not None else ()
        return (*self.opens, *named, *(("{", "[", "```") if self.bare else ()))

    @cached_property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.closes, *(self.named.closers if self.named is not None else ()))

    @cached_property
    def _close(self) -> Needles:
        return Needles(*self.closes)

    @cached_property
    def _named_marks(self) -> Needles:
        return Needles(*(self.named.marks if self.named is not None else ()))

    @cached_property
    def _ends(self) -> Needles:
        return Needles(*self.opens, *self.closes)

    @cached_property
    def _first_keys(self) -> Needles:
        """What an object without a marker begins with if it is a call."""
        return Needles(*(f'"{key}"' for key in (self.name_key, *self.argument_keys, "id", "type", "function")))

    @cached_property
    def _usual(self) -> re.Pattern[str]:
        """The usual beginning of a call, up to its arguments."""
        blank, word = r"[ \t\r\n]*", r'[^"\\\s\x00-\x1f]+'
        if self.single_key:
            return re.compile(rf'\{{{blank}"(?P<name>{word})"(?P<id>){blank}:{blank}(?=\{{)')
        keys = "|".join(map(re.escape, self.argument_keys))
        native = "(?P<id>)"
        if self.id_key:
            native = rf'(?:"{re.escape(self.id_key)}"{blank}:{blank}"(?P<id>{word})"{blank},{blank})?'
        name = rf'"{re.escape(self.name_key)}"{blank}:{blank}"(?P<name>{word})"'
        return re.compile(rf'\{{{blank}{native}{name}{blank},{blank}"(?:{keys})"{blank}:{blank}(?=\{{)')

    # -- reading ------------------------------------------------------------------------------------------------------

    def may_open(self, run: Run, start: int, opener: str) -> bool:
        if opener in self.opens or (self.named is not None and opener in self.named.openers):
            return True
        return run.begins_answer(start) or (self.bare_offered and run.text[start - 1] == "\n")

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        bare = opener not in self.opens
        if bare and self.named is not None and opener in self.named.openers:
            return (yield from self.named.block(run, start, body, opener))
        if not self.may_open(run, start, opener):
            return None
        if bare and run.strayed > _STRAY + _STRAY_RATIO * start:
            return None
        position = yield from run.skip_space(start if bare else body)
        fence: str | None = yield from run.starts(position, _FENCES)
        if fence is not None:
            position = yield from run.skip_space(position + len(fence))
        if position == len(run.text):
            return None if bare else cut_off(run, start, self.separators)
        in_list = run.text[position] == "["
        if in_list:
            position = yield from run.skip_space(position + 1)
        if not run.text.startswith("{", position):
            if in_list and not bare:
                if self.named is not None and (yield from run.starts(position - 1, self._named_marks)) is not None:
                    return (yield from self.named.block(run, start, body, opener))
                if position == len(run.text):
                    return cut_off(run, start, self.separators)
                if run.text[position] == "]":
                    run.begin_block(start, self.separators)
                    gap = yield from self._gap(run, position, in_list, fence)
                    run.skip(gap.end)
                    return gap.end
            elif not in_list and not bare and self.named is not None and opener in self.named.openers:
                return (yield from self.named.block(run, start, body, opener))
            return None
        return (yield from self._calls(run, start, position, in_list, bare, fence))

    def _calls(
        self, run: Run, start: int, position: int | None, in_list: bool, bare: bool, fence: str | None
    ) -> Step[int | None]:
        begin, begun, end = start, False, start
        while position is not None:
            # Behind a call of the same list stands another one, or what was meant for one.
            call = yield from self._object(run, position, bare and not (begun and in_list), None if begun else begin)
            if call is None:
                return end if begun else None
            if not begun:
                run.begin_block(start, self.separators)
                begun = True
            gap = yield from self._gap(run, call.end, in_list, fence)
            usable = run.end_call(
                begin,
                gap.end,
                CallStatus.REPAIRED if gap.surplus and call.status is CallStatus.OK else call.status,
                call.name,
                call.arguments,
                call.raw,
                error="; ".join(filter(None, (call.error, gap.surplus))) or None,
                native_id=call.native_id,
            )
            (run.skip if usable else run.fail)(gap.end)
            begin = end = gap.end
            position, in_list, bare = gap.next, gap.in_list, bare or gap.loose
        return end

    def _object(self, run: Run, position: int, bare: bool, begin: int | None) -> Step[_Call | None]:
        """The call object at `position`; None when a bare one is no call. `begin`: of a block that has not begun."""
        if not run.streams and run.refused < MANY and (match := self._usual.match(run.text, position)) is not None:
            try:
                literal = read_json(run.text, match.end())
                closing = _CLOSING_BRACE.match(run.text, literal.end)
                unoffered = bare and self.bare_offered and match["name"] not in run.tools.names()
                # The object around them adds a level, and may be one too many.
                brackets = run.text.count("{", match.end(), literal.end) + run.text.count("[", match.end(), literal.end)
                if closing is not None and not unoffered and brackets < MAX_DEPTH:
                    raw = run.text[match.end() : literal.end]
                    name, native = match["name"], match["id"] or None
                    return _Call(CallStatus.OK, position, closing.end(), name, literal.value, raw, native_id=native)
            except LiteralError:
                run.refused += 1
        if bare:
            key = yield from run.skip_space(position + 1)
            if (yield from run.starts(key, self._first_keys)) is None:
                return None
        watch = _Watch(run, self, begin, bare) if run.streams else None
        read = yield from read_value(run, position, None if bare else self._ends, watch)
        if read.scan is None:
            scan = JsonScan(position)
            scan.advance(run.text)
            read = replace(read, scan=scan)
        if bare and not self._is_call(run, read):
            if read.status is not CallStatus.OK:
                run.strayed += read.end - read.start
            return None
        return self._judge(run, read)

    def _is_call(self, run: Run, read: JsonValue) -> bool:
        """Whether an object without a marker is plainly a call: it has a name and arguments."""
        keys, name = read.scan.members.keys() if read.scan is not None else (), self._scanned_name(run, read.scan)
        if isinstance(read.value, dict):
            keys, name = read.value.keys(), name or read.value.get(self.name_key)
        if not isinstance(name, str):
            return False
        if any(key in keys for key in self.argument_keys):
            return name in run.tools.names() if self.bare_offered else True
        return name in run.tools.names() and any(key in keys for key in _LAX_ARGUMENTS)

    def _judge(self, run: Run, read: JsonValue) -> _Call:
        """What the object is worth as a call."""
        if read.status is CallStatus.INCOMPLETE:
            return self._cut_call(run, read)
        if read.status is CallStatus.INVALID_JSON:
            if read.scan is not None and (mended := self._mended(run, read, read.scan)) is not None:
                return mended
            name = self._scanned_name(run, read.scan) or ""
            native = _scanned_text(run, read.scan, self.id_key) if self.id_key else None
            return _Call(read.status, read.start, read.end, name, error=read.error, native_id=native)
        scan = read.scan
        assert scan is not None
        notes = [read.error] if read.error else []
        value: dict[str, Any] = read.value
        if scan.doubles:
            value, doubled = self._first_members(run, value, scan)
            notes += [f"{key!r} comes twice" for key in doubled]
        if isinstance(inner := value.get("function"), dict) and self.name_key not in value:
            value, scan = {**value, **inner}, JsonScan(read.start)
            notes.append("an object under 'function'")
        name_key, key = self._keys(value, notes)
        named: object = name_key if name_key == key else value.get(name_key)
        if not isinstance(named, str) or not named.strip():
            told = _scanned_text(run, read.scan, self.id_key) if self.id_key else None
            error = "the call names no tool"
            return _Call(CallStatus.MISSING_NAME, read.start, read.end, error=error, native_id=told)
        if key is None:
            flat = {k: v for k, v in value.items() if k not in _BESIDES and k not in (name_key, self.name_key)}
            if flat:
                notes.append("arguments beside the name")
            arguments = Arguments(CallStatus.OK, flat, json.dumps(flat, ensure_ascii=False) if flat else "")
        else:
            member = scan.members.get(key)
            raw = run.text[member.start : member.end] if member is not None and member.end is not None else ""
            if not raw and isinstance(value[key], dict):
                raw = json.dumps(value[key], ensure_ascii=False)
            arguments = read_arguments(value[key], raw)
            if arguments.error:
                notes.append(arguments.error)
        native = value.get(self.id_key) if self.id_key else None
        status = CallStatus.REPAIRED if arguments.status is CallStatus.OK and notes else arguments.status
        return _Call(
            status,
            read.start,
            read.end,
            named.strip(),
            arguments.value,
            arguments.raw,
            "; ".join(notes) or None,
            str(native) if type(native) in (str, int) else None,
        )

    def _mended(self, run: Run, read: JsonValue, scan: JsonScan) -> _Call | None:
        """A call whose arguments are whole and come once more behind themselves, or whose last brace is missing in a
        list; None for all that is broken otherwise."""
        name = self._scanned_name(run, scan)
        keys = scan.members if self.single_key else self.argument_keys
        member = next((scan.members[key] for key in scan.members if key in keys), None)
        if not name or member is None or member.end is None or run.text[member.start] != "{":
            return None
        raw = run.text[member.start : member.end]
        position = member.end
        while position + len(raw) <= read.end and run.text.startswith(raw, position):
            position += len(raw)
        after = SPACE.match(run.text, position).end()  # type: ignore[union-attr]  # matches anywhere
        if after > read.end:
            return None
        if position > member.end and after < read.end and run.text[after] == "}":
            end, error = after + 1, "the arguments are repeated"
        elif position == member.end and run.text.startswith("]", after):
            end, error = position, "a closing brace is missing"
        else:
            return None
        try:
            arguments = read_json(raw).value
        except LiteralError:
            return None
        native = _scanned_text(run, scan, self.id_key) if self.id_key else None
        return _Call(CallStatus.REPAIRED, read.start, end, name, arguments, raw, error, native)

    def _keys(self, value: Mapping[str, Any], notes: list[str]) -> tuple[str, str | None]:
        """The key of the name, and that of the arguments; both the same where it is the name itself."""
        if self.single_key and len(value) == 1:
            (only,) = value
            return only, only
        name_key: str = self.name_key
        if name_key not in value:
            name_key = next((lax for lax in _LAX_NAMES if isinstance(value.get(lax), str)), name_key)
        if name_key != self.name_key and name_key in value:
            notes.append(f"{name_key!r} instead of {self.name_key!r}")
        elif self.single_key:
            notes.append("name and arguments as members")
        key = next((own for own in value if own in self.argument_keys), None)
        if key is None:
            key = next((lax for lax in _LAX_ARGUMENTS if lax in value and lax != name_key), None)
            if key is not None:
                notes.append(f"{key!r} instead of {self.argument_keys[0]!r}")
        return name_key, key

    def _first_members(self, run: Run, value: Mapping[str, Any], scan: JsonScan) -> tuple[dict[str, Any], list[str]]:
        """Of a name or arguments that come twice the first counts: a stream has told it already."""
        first, doubled = dict(value), []
        keys = (self.name_key, *self.argument_keys, *((self.id_key,) if self.id_key else ()))
        for key in scan.members:
            member = scan.members[key]
            if key in scan.doubles and member.end is not None and (key in keys or self.single_key):
                try:
                    first[key] = read_tolerant(run.text, member.start, member.end).value
                except LiteralError:
                    continue
                doubled.append(key)
        return first, doubled

    def _scanned_name(self, run: Run, scan: JsonScan | None) -> str | None:
        """The name as far as a scan has seen it, if it is whole."""
        if scan is not None and self.single_key:
            return next(iter(scan.members), "").strip() or None
        name = _scanned_text(run, scan, self.name_key)
        return name.strip() if name else None

    def _cut_call(self, run: Run, read: JsonValue) -> _Call:
        """An object that the end of the text cuts off: a call all the same if only its closing brace is missing."""
        scan, name = read.scan, self._scanned_name(run, read.scan)
        native = _scanned_text(run, scan, self.id_key) if self.id_key else None
        if scan is not None and name and scan.depth == 1:
            keys = (next(iter(scan.members)),) if self.single_key else self.argument_keys
            member = next((scan.members[key] for key in keys if key in scan.members), None)
            if member is not None and member.end is not None and run.text[member.start] == "{":
                raw = run.text[member.start : member.end]
                try:
                    value = read_json(raw).value
                    error = "the closing brace is missing"
                    return _Call(CallStatus.REPAIRED, read.start, read.end, name, value, raw, error, native)
                except LiteralError:
                    pass
        return _Call(CallStatus.INCOMPLETE, read.start, read.end, name or "", error=read.error, native_id=native)

    def _gap(self, run: Run, position: int, in_list: bool, fence: str | None) -> Step[_Gap]:
        """Read on behind a call: brackets, separators, the closing marker, or the next call."""
        end, separator, listed = position, False, in_list
        surplus: str | None = None
        while True:
            position = yield from run.skip_space(position)
            character = run.text[position : position + 1]
            if character == "{" or (character == "[" and not in_list):
                loose = not separator and not in_list and not self.closes
                if loose and (character == "[" or listed):
                    break
                if character == "[":
                    in_list = True
                    position = yield from run.skip_space(position + 1)
                    if not run.text.startswith("{", position):
                        break
                return _Gap(end, position, in_list, surplus, loose)
            if character and character in ",;" and not separator:
                separator = True
                position += 1
                continue
            if character == "]" and in_list:
                in_list = False
            elif character and character in "}]" and not separator:
                surplus = f"one {character!r} too many"
            elif character == "`" and fence is not None and (yield from run.starts(position, _FENCES)) == "```":
                position += 2
            else:
                closer = yield from run.starts(position, self._close)
                if closer is not None:
                    end = position + len(closer)
                break
            position += 1
            end, separator = position, False
        return _Gap(end, None, in_list, surplus)

    # -- writing ------------------------------------------------------------------------------------------------------

    def render_calls(self, turn: Turn) -> str:
        if self.writes_named and self.named is not None:
            return self.named.render_calls(turn)
        objects = [self._render_object(call) for call in turn.calls]
        before, behind = self.frame
        if self.in_list:
            return before + self.between.join(objects) + behind
        return self.between.join(before + text + behind for text in objects)

    def _render_object(self, call: RenderCall) -> str:
        name, arguments = json.dumps(call.name, ensure_ascii=False), call.json_text
        if self.compact:
            arguments = json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))
        return self.written % {"name": name, "arguments": arguments, "id": json.dumps(call.id), "index": call.index}

    def render(self, turn: Turn) -> str:
        if turn.content and any(self.around_content):
            before, behind = self.around_content
            turn = replace(turn, content=before + turn.content + behind)
        return super().render(turn)


def _scanned_text(run: Run, scan: JsonScan | None, key: str) -> str | None:
    """The value of a member that is a string and whole as far as a scan has seen it."""
    member = scan.members.get(key) if scan is not None else None
    if member is None or member.end is None or run.text[member.start] != '"':
        return None
    try:
        return str(json.loads(run.text[member.start : member.end]))
    except ValueError:
        return None


class _Watch:
    """Tells the events of a call object while it is being written."""

    def __init__(self, run: Run, grammar: JsonBlocks, begin: int | None, bare: bool) -> None:
        self.run, self.grammar, self.begin, self.bare = run, grammar, begin, bare
        self.sent: int | None = None

    def __call__(self, scan: JsonScan) -> None:
        run, grammar = self.run, self.grammar
        if self.sent is None:
            name = grammar._scanned_name(run, scan)
            keys = scan.members if grammar.single_key else grammar.argument_keys
            member = next((scan.members[key] for key in scan.members if key in keys), None)
            native = _scanned_text(run, scan, grammar.id_key) if grammar.id_key else None
            if not name or member is None or run.text[member.start] != "{":
                return
            if grammar.id_key and not native and not self._has_no_id(scan):
                return  # an id that is yet to come would come too late
            if self.bare and grammar.bare_offered and name not in run.tools.names():
                return
            if self.begin is not None:
                run.begin_block(self.begin, grammar.separators)
            run.start_call(name, native)
            self.sent = member.start
        member = next(m for key, m in scan.members.items() if grammar.single_key or key in grammar.argument_keys)
        end = member.end if member.end is not None else scan.position
        if end > self.sent:
            run.send_arguments(run.text[self.sent : end])
            self.sent = end

    def _has_no_id(self, scan: JsonScan) -> bool:
        """Whether the object is whole and nowhere speaks of an id."""
        return scan.closed and self.run.text.find(f'"{self.grammar.id_key}"', scan.start, scan.position) < 0


class Header(NamedTuple):
    """What stands between a call's opening marker and its arguments."""

    name: str
    native_id: str | None = None
    error: str | None = None
    """What was put right in it."""


_WORD = re.compile(r"[^\s<>{}\[\]|\"'`]{1,256}")
_FENCE = "```(?:json)?"
_AHEAD = 1024
"""Characters that are looked at first where a value is read that may be none."""


@dataclass(frozen=True)
class NamedJson(BlockGrammar):
    """The name in a header, the arguments as a JSON object behind it."""

    opens: tuple[str, ...]
    """Spellings of a call's opening marker, the canonical one first."""
    closes: tuple[str, ...] = ()
    """Spellings of a call's closing marker."""
    sections: tuple[str, ...] = ()
    """Spellings of the marker that opens a section of calls."""
    section_closes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    """Markers inside the header."""
    argument_marks: tuple[str, ...] = ()
    """The one of `marks` behind which the arguments stand. A fence is one in every format."""
    fillers: tuple[str, ...] = ()
    """Words of the header that are not the name."""
    reading: Callable[[tuple[str, ...], ToolIndex, Mapping[str, Any] | None], Header | None] | None = None
    """Makes name and id of the words of a header; the arguments are None while they are to come. None: no name."""
    next_mark: str | None = None
    """A further call may lack its opening marker where a word and this marker stand behind a call."""
    separators: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    """What the model writes before and behind all calls of a turn."""
    call: str = ""
    """A call as it is written: `%(name)s`, `%(arguments)s`, `%(id)s`."""
    between: str = ""
    writing: Callable[[RenderCall], str] | None = None
    """Makes the id that is written."""

    @cached_property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        return (*self.sections, *self.opens)

    @cached_property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.section_closes, *self.closes)

    @cached_property
    def _open(self) -> Needles:
        return Needles(*self.opens)

    @cached_property
    def _close(self) -> Needles:
        return Needles(*self.closes)

    @cached_property
    def _section_close(self) -> Needles:
        return Needles(*self.section_closes)

    @cached_property
    def _header_end(self) -> Needles:
        return Needles("{", *self.openers, *self.closers)

    @cached_property
    def _ends(self) -> Needles:
        return Needles(*self.openers, *self.closers)

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return re.compile("|".join([*map(re.escape, self.marks), _FENCE]))

    @cached_property
    def _argument_marks(self) -> re.Pattern[str]:
        return re.compile("|".join([*map(re.escape, self.argument_marks), _FENCE]))

    # -- reading ------------------------------------------------------------------------------------------------------

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        position = body
        if opener in self.sections:
            position = yield from run.skip_space(body)
            following = yield from run.starts(position, self._open)
            if following is None:
                if position == len(run.text) or self._open.begins(run.text, position):
                    return cut_off(run, start, self.separators)
                return None
            position += len(following)
        begin: int = start
        begun = False
        while True:
            end = yield from self._call(run, begin, position, begun)
            if end is None:
                return begin if begun else None
            begun = True
            begin = end
            position = yield from run.skip_space(end)
            while position < len(run.text) and run.text[position] in ",;":
                position = yield from run.skip_space(position + 1)
            following = yield from run.starts(position, self._open)
            if following is not None:
                position += len(following)
                continue
            closer = yield from run.starts(position, self._section_close)
            if closer is not None:
                if run.follows_markup(position):
                    run.skip(position + len(closer))
                    return position + len(closer)
                return end
            if self.next_mark is None or not (yield from self._unmarked(run, position)):
                return end

    def _unmarked(self, run: Run, position: int) -> Step[bool]:
        """Whether a word and `next_mark` stand at `position`."""
        assert self.next_mark is not None
        while True:
            word = _WORD.match(run.text, position)
            end = word.end() if word is not None else position
            if end < len(run.text) or run.final:
                break
            yield
        return end > position and (yield from run.starts(end, Needles(self.next_mark))) is not None

    def _call(self, run: Run, start: int, position: int, begun: bool) -> Step[int | None]:
        """One call: its markup begins at `start`, its header at `position`."""
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
            run.end_call(start, len(run.text), CallStatus.INCOMPLETE, header.name if header else "", error=cut)
            run.fail(len(run.text))
            return len(run.text)
        run.begin_block(start, self.separators)
        if other is not None:
            end, arguments = yield from self._read_other(run, other)
        elif stop is not None and stop.group() == "{":
            if header is not None and header.error is None:
                run.start_call(header.name, header.native_id)
            read = yield from read_value(run, stop.start(), self._ends, ArgumentsWatch(run, stop.start()))
            arguments = Arguments(read.status, {}, run.text[read.start : read.end], read.error)
            if isinstance(read.value, dict):
                arguments = arguments._replace(value=read.value)
            end = read.end
        else:
            if stop is not None and stop.group() not in self.closes:
                header = None
            end, arguments = header_end, Arguments(CallStatus.OK, {}, "")
        status, error = arguments.status, arguments.error
        if header is None and status in (CallStatus.OK, CallStatus.REPAIRED):
            header = self._header(words, run.tools, arguments.value)
        if header is None:
            header = Header("")
            if status in (CallStatus.OK, CallStatus.REPAIRED):
                status, error = CallStatus.MISSING_NAME, "the call names no tool"
        elif header.error is not None:
            error = "; ".join(filter(None, (header.error, error)))
            status = CallStatus.REPAIRED if status is CallStatus.OK else status
            arguments = arguments._replace(value=_without_name(arguments.value, header.name, run.tools))
        end, surplus = yield from self._tail(run, end)
        if surplus is not None and status is CallStatus.OK:
            status, error = CallStatus.REPAIRED, surplus
        usable = run.end_call(
            start, end, status, header.name, arguments.value, arguments.raw, error=error, native_id=header.native_id
        )
        (run.skip if usable else run.fail)(end)
        return end

    def _other_arguments(self, text: str, position: int, header_end: int) -> int | None:
        """Where arguments begin that are no object; None when there are none before `header_end`."""
        named, end = False, position
        for mark in self._marks.finditer(text, position, header_end):
            word = text[end : mark.start()].strip()
            named, end = named or bool(word and word not in self.fillers), mark.end()
            if not named or self._argument_marks.fullmatch(mark.group()) is None:
                continue
            begin = SPACE.match(text, end).end()  # type: ignore[union-attr]  # matches anywhere
            if begin >= header_end:
                return None
            if self._marks.match(text, begin) is None:
                word = text[begin:header_end].strip()
                return None if text.startswith("{", header_end) and _WORD.fullmatch(word) else begin
        return None

    def _read_other(self, run: Run, start: int) -> Step[tuple[int, Arguments]]:
        """Arguments that are no object: where they end, and what they are worth."""
        tried = 0
        while True:
            if run.final or len(run.text) >= tried:
                tried = start + 2 * (len(run.text) - start)
                try:
                    value, end = _read_ahead(run.text, start)
                    if run.final or end < len(run.text):
                        return end, read_arguments(value, run.text[start:end])
                except LiteralError as error:
                    if run.final or not error.incomplete:
                        break
            yield
        stop = yield from run.find(self._ends, start)
        end = stop.start() if stop is not None else len(run.text)
        return end, Arguments(CallStatus.INVALID_JSON, {}, run.text[start:end], "the arguments are no JSON")

    def _words(self, header: str) -> tuple[str, ...]:
        return tuple(filter(None, map(str.strip, self._marks.split(header))))

    def _header(self, words: tuple[str, ...], tools: ToolIndex, arguments: Mapping[str, Any] | None) -> Header | None:
        if len(words) > 1 and words[0] in self.fillers:
            words = words[1:]
        if self.reading is not None:
            return self.reading(words, tools, arguments)
        return Header(words[0]) if words and _WORD.fullmatch(words[0]) else None

    def _tail(self, run: Run, end: int) -> Step[tuple[int, str | None]]:
        """The end of a call whose JSON ends at `end`, and what there was one too many of."""
        surplus: str | None = None
        while True:
            position = yield from run.skip_space(end)
            if run.text.startswith("}", position):
                surplus, end = "one '}' too many", position + 1
            elif run.text.startswith("`", position) and (yield from run.starts(position, _FENCES)) == "```":
                end = position + 3
            else:
                closer = yield from run.starts(position, self._close)
                return (position + len(closer) if closer is not None else end), surplus

    # -- writing ------------------------------------------------------------------------------------------------------

    def render_calls(self, turn: Turn) -> str:
        before, behind = self.frame
        calls = []
        for call in turn.calls:
            native = self.writing(call) if self.writing is not None else call.id
            calls.append(self.call % {"name": call.name, "arguments": call.json_text, "id": native})
        return before + self.between.join(calls) + behind


class ArgumentsWatch:
    """Tells the events of arguments while they are being written."""

    def __init__(self, run: Run, start: int) -> None:
        self.run, self.sent = run, start

    def __call__(self, scan: JsonScan) -> None:
        if self.run.started and scan.position > self.sent:
            self.run.send_arguments(self.run.text[self.sent : scan.position])
            self.sent = scan.position


def _read_ahead(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends. Looks as far as it needs to: an error costs what stands before it.

    Raises `LiteralError`.
    """
    width = _AHEAD
    while True:
        piece = text[start : start + width]
        try:
            literal = read_json(piece)
            if literal.end < len(piece) or start + width >= len(text):
                return literal.value, start + literal.end
        except LiteralError as error:
            if not error.incomplete or start + width >= len(text):
                raise
        width *= 4


def _is_json(text: str, start: int) -> bool:
    """Whether a JSON value and nothing else stands from `start` to the end."""
    try:
        return not text[_read_ahead(text, start)[1] :].strip()
    except LiteralError:
        return False


def _without_name(arguments: dict[str, Any], name: str, tools: ToolIndex) -> dict[str, Any]:
    """The arguments without the name, where it was found among them."""
    if arguments.get("name") == name and not tools.declares(name, "name"):
        return {key: value for key, value in arguments.items() if key != "name"}
    return arguments
