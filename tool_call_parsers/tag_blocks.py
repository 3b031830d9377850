"""Calls as tags: `<function=f><parameter=k>v</parameter></function>`, `<invoke name="f"><parameter name="k">..`, and
`<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, with or without a wrapper around them.

Nothing in these formats is escaped, so where a value ends is a matter of what stands around the tags:

* The end tag of a value ends it if markup follows that may follow a value: the next parameter, the end of the call or
  of the wrapper, the end tag once more, the end of the text. Before anything else it is data. Behind the end of a
  call inside a wrapper, too, markup has to follow; else a better end may come, and only without one it counts.
* A value without its end tag ends at the opening tag of a parameter that the tool has and the call has not yet, unless
  an end tag without markup behind it shows that both are data; or else at the end of the call. With an end tag and text
  before either, the text was written behind a parameter, and is dropped.
* A whole call inside a value is data when the value ends properly behind it. Where it does not, and the text ends with
  the end of a call, one of two things has happened. The call in the value stands on a line of its own and fits a tool
  that was offered: then the call around it was never closed, and is none. Or the value only quotes an opening tag, and
  ends at its first plausible end. How often either is found out is bounded, which keeps the time linear. Text that ends
  otherwise is cut in the value, and no call.

`TagBlocks.block` reads one block, from its opening tag on, for any grammar that keeps such blocks in its own channels.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Literal, NamedTuple

from tool_call_parsers.arguments import read_arguments
from tool_call_parsers.engine import BlockGrammar, Marker, Needles, RenderCall, Run, Step, Turn, cut_off
from tool_call_parsers.json_blocks import JsonBlocks
from tool_call_parsers.json_scan import read_value
from tool_call_parsers.literals import LiteralError, read_json
from tool_call_parsers.schema import coerce
from tool_call_parsers.types import CallStatus

HEAD_LIMIT = 1024
"""Characters that the head of a tag spans at most, blanks included. Bounds what is looked at twice."""
_ANY_JSON = {"type": ["null", "integer", "number", "boolean", "object", "array"]}
_WORD = re.compile(r"[\w.\-:/$]+")
_NAME = re.compile(r"(?=(?>(?:[\W_])*)\w)[^\s<>\"'{}]++")
"""What can be the name of a tool that was not offered."""
EQUALS = re.compile(r"\s*+([^<>\n]*+)(?:([<>])|\n\s*+(\S))")
"""The head of `<function=f>`: the name and what ends it, which is not `>` where that is missing."""
_QUOTED = r"\"[^\"]*+\"|'[^']*+'|[^\s<>\"'/]*+"
ATTRIBUTES = re.compile(
    rf"(?>(?:\s++string[ \t]*+=[ \t]*+(?:{_QUOTED}))?)"
    rf"(\s*+)(?>(name)?)\s*+=\s*+({_QUOTED})((?>(?:[ \t]++[\w:-]++[ \t]*+=[ \t]*+(?:{_QUOTED}))*))"
    r"(?:\s*+(/>|[<>])|[ \t]*+\n\s*+(\S))"
)
"""The head of `<invoke name="f">`: the name, other attributes, and the same."""
_STRING_FLAG = re.compile(r"string[ \t]*+=[ \t]*+[\"']?+(true|false)")
_TYPES = {"true": "string", "false": "json"}
"""What the attribute `string` says."""
_CDATA, _CDATA_END, _CDATA_SPLIT = "<![CDATA[", "]]>", "]]]]><![CDATA[>"
_FENCE = Needles("```")
_SECTION, _SECTION_END = Needles(_CDATA), Needles(_CDATA_END)
_SIBLINGS = 8
"""How many calls in a completion may turn out unclosed only at the end of the text. Bounds how often it is searched."""


class Role(Enum):
    """What a tag does, and what else may stand where a tag is due."""

    WRAP = 1
    UNWRAP = 2
    CALL = 3
    END_CALL = 4
    PARAMETER = 5
    END_VALUE = 6
    DONE = 7
    """The text is over, or its last tag is a cut end tag."""
    CUT = 8
    """The text ends in an opening tag."""
    TEXT = 9
    """No tag."""


_OPENS_CALL = (Role.CALL, Role.WRAP)
_AFTER_CALL = (Role.UNWRAP, Role.CALL, Role.WRAP, Role.DONE, Role.CUT)


class Mark(NamedTuple):
    """What stands at a position, blanks before it left out."""

    start: int
    role: Role
    end: int


class Head(NamedTuple):
    """An opening tag read to its end, the name of the call or the parameter in it."""

    name: str
    end: int
    typed: str | None = None
    """How the markup types the value: "string", "json", a JSON schema's type, or not at all."""
    note: str | None = None
    """What is wrong with the tag."""
    closed: bool = False
    """It is its own end tag."""
    dangling: bool = False
    """A key without a value."""
    open_end: bool = False
    """Its `>` is missing."""


CUT_HEAD = Head("", -1)
"""The text ends in the tag."""


class _Done(NamedTuple):
    """An attempt that is over."""

    end: int
    over: bool
    """And the block with it."""
    usable: bool = False


class _Value(NamedTuple):
    """Where a value ends, and where the markup behind it begins."""

    end: int
    resume: int
    unclosed: bool = False
    """It has no end tag."""
    broken: bool = False
    """It has no end at all: the call is over there."""
    note: str | None = None
    """What had to be assumed."""


class _Beginning(NamedTuple):
    """A call's name, and what stands behind its opening tag."""

    name: str
    mark: Mark


class Call:
    """A call while it is read."""

    __slots__ = ("arguments", "body", "name", "notes", "parts", "start", "wrapped")

    def __init__(self, name: str, start: int, body: int, wrapped: bool) -> None:
        self.name = name
        self.start = start
        self.body = body
        self.wrapped = wrapped
        self.arguments: dict[str, Any] = {}
        self.notes: list[str] = []
        self.parts: list[str] | None = None
        """The arguments' JSON text as far as it was told; None where nobody listens."""

    def set(self, key: str, value: Any) -> None:
        """The last of several parameters of one name counts, where it stands."""
        self.arguments.pop(key, None)
        self.arguments[key] = value

    def tell(self, run: Run, text: str) -> None:
        if self.parts is not None:
            self.parts.append(text)
            run.send_arguments(text)


class Teller:
    """Tells a string value piece by piece."""

    __slots__ = ("call", "position", "run")

    def __init__(self, run: Run, call: Call, start: int) -> None:
        self.run = run
        self.call = call
        self.position = start

    def upto(self, end: int) -> None:
        """The text before `end` belongs to the value, but for a newline at its end, which may be framing."""
        text = self.run.text
        if end > self.position and text[end - 1] == "\n":
            end -= 1
        self.rest(end)

    def rest(self, end: int) -> None:
        if end > self.position:
            piece = json.dumps(self.run.text[self.position : end], ensure_ascii=False)
            self.call.tell(self.run, piece[1:-1])
            self.position = end


class _ForeignJson(JsonBlocks):
    """Calls as JSON where the format writes tags."""

    def _object(self, run: Run, position: int, bare: bool, begin: int | None) -> Step[Any]:
        call = yield from super()._object(run, position, bare, begin)
        if call is not None and call.status is CallStatus.OK:
            call = call._replace(status=CallStatus.REPAIRED, error="a JSON object instead of tags")
        return call


def _without_end(at: int, loose: int | None) -> _Value:
    """A value without an end tag before the tag at `at`; or with one, at `loose`, and text behind it."""
    if loose is None:
        return _Value(at, at, unclosed=True)
    return _Value(loose, at, note="text behind a value")


def _equals_head(match: re.Match[str]) -> Head | None:
    name, end, note = match[1].strip(), match.end(), None
    if len(name) > 1 and name[0] in "'\"" and name[-1] == name[0]:
        name, note = name[1:-1], "a name in quotes"
    if match[2] == "<" or (match[3] or ">") != ">":
        return _unended(Head(name, match.end(1) + (match[3] is not None), note=note))
    return Head(name, end, note=note)


def _attributes_head(match: re.Match[str]) -> Head | None:
    name, mark = match[3], match[5]
    name = (name[1:-1] if name[:1] in ("'", '"') else name).strip()
    note = None if match[1] and match[2] else "a tag run together with its attribute"
    flag = _STRING_FLAG.search(match[4]) or _STRING_FLAG.search(match.string, match.start(), match.start(3))
    head = Head(name, match.end(), _TYPES[flag[1]] if flag else None, note, closed=mark == "/>")
    if mark == "<" or mark is None:
        return _unended(head._replace(end=match.start(5) if mark else match.string.index("\n", match.end(4)) + 1))
    return head


def _unended(head: Head) -> Head | None:
    """A head without its `>`, if it looks like one all the same."""
    if head.name and not _WORD.fullmatch(head.name):
        return None
    notes = filter(None, (head.note, "a tag without its '>'"))
    return head._replace(note="; ".join(notes), open_end=True)


@dataclass(frozen=True)
class TagBlocks(BlockGrammar):
    """Calls with their parameters as tags. Of several spellings of a tag the first is written."""

    heads: Literal["equals", "attributes", "pairs"]
    """Where names stand: `<function=f>`, `<invoke name="f">`, or behind the tag, with keys in tags of their own."""
    calls: tuple[str, ...]
    """Opening tags of a call, up to the name."""
    ends: tuple[str, ...]
    parameters: tuple[str, ...]
    """Opening tags of a parameter, up to the name."""
    value_ends: tuple[str, ...]
    wraps: tuple[str, ...] = ()
    unwraps: tuple[str, ...] = ()
    fillers: tuple[str, ...] = ()
    """What may stand between a wrapper and a call and says nothing."""
    pair: tuple[str, str] = ("", "")
    """Pairs: the end tag of a key, the opening tag of a value."""
    key_type: tuple[str, str] = ("", "")
    """Pairs: tags around a type between a key and its value."""
    name_end: str = ""
    """Pairs: what stands behind the name."""
    framed: bool = False
    """A newline on each side of a value is markup."""
    cdata: bool = False
    """A value may be a CDATA section."""
    open_end: bool = False
    """At the end of the text the end tag of a call may be missing, if all required parameters are there."""
    unwrapped: str = ""
    """A parameter that, undeclared and alone, holds all arguments as an object."""
    json: JsonBlocks | None = None
    """Calls as JSON behind the same tags, where the format has them."""
    writes_json: bool = False
    """Calls are written as `json` writes them."""
    separators: tuple[str, ...] = ("\n\n", "\n")
    separates: bool = False
    trail: str = ""
    around: tuple[str, str] = ("", "")
    """What is written before and behind all calls of a turn."""
    between: str = "\n"
    call: str = ""
    """A call as it is written: `{name}`, `{parameters}`."""
    parameter: str = ""
    """A parameter as it is written, with what follows it: `{key}`, `{value}`, `{string}` ("true" or "false")."""
    empty: str = ""
    """What is written for no parameters."""

    # -- derived ------------------------------------------------------------------------------------------------------

    @cached_property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        return (*self.wraps, *self.calls)

    @cached_property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.unwraps, *self.ends)

    @cached_property
    def _roles(self) -> dict[str, Role]:
        return {
            **dict.fromkeys(self.wraps, Role.WRAP),
            **dict.fromkeys(self.unwraps, Role.UNWRAP),
            **dict.fromkeys(self.calls, Role.CALL),
            **dict.fromkeys(self.ends, Role.END_CALL),
            **dict.fromkeys(self.parameters, Role.PARAMETER),
            **dict.fromkeys(self.value_ends, Role.END_VALUE),
            # Nowhere due but behind a name, and told from the other tags all the same.
            **dict.fromkeys(filter(None, (self.name_end,)), Role.TEXT),
        }

    @cached_property
    def _tags(self) -> Needles:
        return Needles(*self._roles)

    @cached_property
    def _tag(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+({self._tags.pattern.pattern})")

    @cached_property
    def _fillers(self) -> Needles:
        return Needles(*self.fillers)

    @cached_property
    def _wrapping(self) -> re.Pattern[str]:
        return re.compile("|".join((r"\s", *map(re.escape, (*self.wraps, *self.fillers)))).join(("(?>(?:", ")*)")))

    @cached_property
    def _closing(self) -> Needles:
        return Needles(*self.ends, *self.unwraps, *self.calls, *self.wraps)

    @cached_property
    def _call_head(self) -> re.Pattern[str]:
        if self.heads == "pairs":
            name_end = f"(?>(?:{re.escape(self.name_end)})?)" if self.name_end else ""
            return re.compile(rf"\s*+([^\s<>{{]*+)\s*+{name_end}\s*+(?=(\S))")
        return self._parameter_head

    @cached_property
    def _parameter_head(self) -> re.Pattern[str]:
        if self.heads != "pairs":
            return EQUALS if self.heads == "equals" else ATTRIBUTES
        (key_end, value), (type_start, type_end) = map(re.escape, self.pair), map(re.escape, self.key_type)
        kind = rf"(?>(?:{type_start}([^<]*+)(?>(?:{type_end})?)\s*+)?)" if type_start else "()"
        return re.compile(rf"\s*+([^<]*+)(?>({key_end})?)\s*+{kind}(?:({value})|(?=(\S)))")

    @cached_property
    def _usual(self) -> re.Pattern[str] | None:
        """A whole parameter of the usual shape: its value ends at the first tag, and behind that stands what may follow
        it. Its groups are name, type and value. None where a pattern cannot tell."""
        if self._tags.extendable or len({tag[0] for tag in self._roles}) > 1:
            return None

        def one(tags: tuple[str, ...]) -> str:
            return f"(?:{'|'.join(map(re.escape, tags))})"

        def parameter(group: str) -> str:
            head = {
                "equals": rf"{group}[\w.\-]++){group})>",
                "attributes": rf" name=\"{group}[\w.\-]++)\"(?>(?: string=\"{group}true|false)\")?)>",
                "pairs": rf"{group}[\w.\-]++){re.escape(self.pair[0])}\s?+{group}){re.escape(self.pair[1])}",
            }
            return one(self.parameters) + head[self.heads]

        begin = re.escape(next(iter(self._roles))[0])
        value = rf"([^{begin}]*+(?>(?:(?!{one(tuple(self._roles))}){begin}[^{begin}]*+)*))"
        value = (r"\n?+" if self.framed else rf"(?!\s*+{re.escape(_CDATA)})" if self.cdata else "") + value
        behind = rf"\s*+(?:{one((*self.unwraps, *self.calls, *self.wraps))}|\Z)" if self.wraps else ""
        follows = rf"(?=\s*+(?:{parameter('(?:')}|{one(self.ends)}{behind}))"
        return re.compile(rf"\s*+{parameter('(')}{value}{one(self.value_ends)}{follows}")

    @cached_property
    def _foreign(self) -> JsonBlocks:
        if self.json is not None:
            return self.json
        return _ForeignJson((*self.wraps, *self.calls), (*self.unwraps, *self.ends), self.separators)

    # -- what stands where --------------------------------------------------------------------------------------------

    def _next(self, run: Run, position: int) -> Step[Mark]:
        """What stands at `position`."""
        match = self._tag.match(run.text, position)
        if match is None or match[1] in self._tags.extendable:
            position = yield from run.skip_space(position)
            if (yield from run.starts(position, self._tags)) is None:
                return (yield from self._no_tag(run, position))
            match = self._tag.match(run.text, position)
            assert match is not None
        return Mark(match.start(1), self._roles[match[1]], match.end())

    def _no_tag(self, run: Run, start: int) -> Step[Mark]:
        """What no tag at `start` means."""
        position = start
        while position < len(run.text):
            marker = yield from run.starts(position, run.markers.all)
            if marker is None or run.markers.kinds[marker] is not Marker.END:
                break
            position = yield from run.skip_space(position + len(marker))
        else:
            return Mark(start, Role.DONE, start)
        if not self._tags.begins(run.text, start):
            return Mark(start, Role.TEXT, start)
        meant = {role for tag, role in self._roles.items() if tag.startswith(run.text[start:])}
        role = Role.DONE if meant <= {Role.END_CALL, Role.UNWRAP, Role.END_VALUE} else Role.CUT
        return Mark(start, role, len(run.text))

    def _match(self, run: Run, pattern: re.Pattern[str], start: int, ahead: int = 0) -> Step[re.Match[str] | None]:
        """The head at `start`, trusted when `ahead` characters behind it are there."""
        while True:
            match = pattern.match(run.text, start, start + HEAD_LIMIT)
            if run.final or len(run.text) >= start + HEAD_LIMIT or (match and match.end() + ahead <= len(run.text)):
                return match
            yield

    def _head(self, run: Run, start: int, pattern: re.Pattern[str]) -> Step[Head | None]:
        """The rest of an opening tag from behind its first word on; None where it is none."""
        names_call = pattern is self._call_head
        ahead = self._tags.longest + len(self.name_end + self.pair[0]) if self.heads == "pairs" else 0
        match = yield from self._match(run, pattern, start, ahead)
        if match is None:
            return self._unread(run, start, names_call)
        if self.heads == "equals":
            return _equals_head(match)
        if self.heads == "attributes":
            return _attributes_head(match)
        if names_call:
            return Head(match[1], match.end()) if match[2] in "<{" else None
        note = None if match[2] else "the end tag of a key is missing"
        kind = match[3].strip().lower() or None if match[3] else None
        return Head(match[1].strip(), match.end(), kind, note, dangling=match[4] is None)

    def _unread(self, run: Run, start: int, named: bool = False) -> Head | None:
        """What a head is that no pattern matches: cut if the text ends in what could have become one."""
        tail = run.text[start : start + HEAD_LIMIT].strip()
        if not run.final or len(run.text) - start >= HEAD_LIMIT:
            return None
        if self.heads == "attributes":
            begins = "name".startswith(tail[:4]) or "string".startswith(tail[:6]) or tail.startswith("=")
            named = "<" in tail or ">" in tail or not begins
        else:
            named = named and " " in tail
        return None if named else CUT_HEAD

    def _begins_call(self, run: Run, start: int) -> Step[_Beginning | None]:
        """The beginning of the call whose opening tag ends at `start`; None if it is none, to judge by that."""
        head = yield from self._head(run, start, self._call_head)
        if head is None or head is CUT_HEAD:
            return None
        mark = yield from self._next(run, head.end)
        if head.closed or mark.role in (Role.PARAMETER, Role.END_CALL) or run.text.startswith("{", mark.start):
            return _Beginning(head.name, mark)
        return None

    # -- blocks -------------------------------------------------------------------------------------------------------

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        wrapped = self._roles[opener] is Role.WRAP
        first, last = run.memo.get("wrappers", (0, 0))
        if first < start < last:
            return None  # the first of these wrappers has shown that they hold no call
        position = body if wrapped else start
        while True:
            if wrapped and self.fillers:
                position = yield from self._behind_fillers(run, position)
            mark = yield from self._next(run, position)
            if mark.role is not Role.WRAP:
                break
            position, wrapped = mark.end, True
        end = None
        if mark.role is Role.CALL:
            end = yield from self._calls(run, start, mark, wrapped)
        elif mark.role in (Role.DONE, Role.CUT):
            end = cut_off(run, start, self.separators)
        elif mark.role is Role.TEXT and run.text[mark.start] in "{[":
            end = yield from self._foreign.block(run, start, position, opener)
        if end is None:
            run.memo["wrappers"] = start, position
        return end

    def _calls(self, run: Run, start: int, mark: Mark, wrapped: bool) -> Step[int | None]:
        """The calls of a block, the first of which opens at `mark`: their end, or None when they are only text."""
        done = yield from self._call(run, start, mark, wrapped, first=True)
        while done is not None and not done.over:
            mark = yield from self._next(run, done.end)
            if mark.role is not Role.CALL:
                return (yield from self._after_calls(run, done, mark))
            following = yield from self._call(run, mark.start, mark, wrapped, first=False)
            if following is None:
                break
            done = following
        return None if done is None else done.end

    def _behind_fillers(self, run: Run, position: int) -> Step[int]:
        while True:
            start = yield from run.skip_space(position)
            filler = yield from run.starts(start, self._fillers)
            if filler is None:
                return position
            position = start + len(filler)

    def _after_calls(self, run: Run, done: _Done, mark: Mark) -> Step[int]:
        """The rest of a wrapper: text in it is content, its end tag is none."""
        if mark.role is Role.TEXT and done.usable:
            marker = yield from run.next_marker(run.markers.all, done.end)
            if marker is not None and self._roles.get(marker.group()) is Role.UNWRAP:
                run.take(marker.start())
                run.skip(marker.end())
                return marker.end()
            return len(run.text) if marker is None else marker.start()
        return done.end

    def _call(self, run: Run, begin: int, mark: Mark, wrapped: bool, first: bool) -> Step[_Done | None]:
        """The call whose opening tag is at `mark`, as an attempt from `begin` on; None when it is only text."""
        tag = run.text[mark.start : mark.end]
        if self.heads == "pairs":
            position = yield from run.skip_space(mark.end)
            if run.text.startswith(("{", "["), position) or (yield from run.starts(position, _FENCE)) is not None:
                end = yield from self._foreign.block(run, begin, mark.end, tag)
                return None if end is None else _Done(end, True)
        head = yield from self._head(run, mark.end, self._call_head)
        if head is None:
            return None
        separators = self.separators if first else ()
        if head is CUT_HEAD:
            run.begin_block(begin, separators)
            return self._cut(run, Call("", begin, len(run.text), wrapped))
        call = Call(head.name, begin, head.end, wrapped)
        if head.note:
            call.notes.append(head.note)
        mark = yield from self._next(run, head.end)
        if not head.closed and mark.role not in (Role.PARAMETER, Role.END_CALL):
            if mark.role in (Role.DONE, Role.CUT):
                run.begin_block(begin, separators)
                return self._cut(run, call)
            if mark.role is Role.TEXT and not head.name:
                return (yield from self._nameless(run, call, mark.start))
            unended = self._needs_nothing(run, head.name, mark)
            if not unended and not (mark.role is Role.UNWRAP and wrapped) and not run.text.startswith("{", mark.start):
                return None
        run.begin_block(begin, separators)
        if run.streams and _can_name(run, head.name):
            run.start_call(head.name)
            call.parts = []
        if head.closed:
            return (yield from self._closed(run, call, head.end, head.end))
        if mark.role is Role.TEXT:
            return (yield from self._json_arguments(run, call, mark.start))
        return (yield from self._parameters(run, call, mark))

    def _parameters(self, run: Run, call: Call, mark: Mark) -> Step[_Done]:
        """Read the parameters, the first of which opens at `mark`, and the end of the call."""
        if run.final and call.parts is None and self._usual is not None:
            mark = yield from self._next(run, self._usual_parameters(run, call, mark.start))
        while (role := mark.role) in (Role.PARAMETER, Role.END_VALUE):
            if role is Role.PARAMETER:
                resume = yield from self._parameter(run, call, mark)
                if isinstance(resume, _Done):
                    return resume
            else:
                resume = mark.end
            mark = yield from self._next(run, resume)
        if mark.role is Role.END_CALL:
            return (yield from self._closed(run, call, mark.start, mark.end))
        complete = run.tools.required(call.name) <= call.arguments.keys()
        if mark.role in (Role.DONE, Role.CUT):
            if mark.role is Role.DONE and self.open_end and call.arguments and complete:
                return (yield from self._closed(run, call, mark.start, mark.end))
            return self._cut(run, call)
        if mark.role is not Role.TEXT and complete and (call.arguments or self._needs_nothing(run, call.name, mark)):
            call.notes.append("the end tag of the call is missing")
            return (yield from self._closed(run, call, mark.start, mark.start))
        return (yield from self._broken(run, call, mark.start))

    def _needs_nothing(self, run: Run, name: str, mark: Mark) -> bool:
        """Whether a name and the tag behind it, which opens or closes something else, are a call without its end tag:
        of a tool that was offered and needs no arguments."""
        offered = name in run.tools.names() and not run.tools.required(name)
        return offered and self.heads == "pairs" and mark.role in (*_OPENS_CALL, Role.UNWRAP)

    def _usual_parameters(self, run: Run, call: Call, position: int) -> int:
        """Read parameters of the usual shape, to the same effect as `_parameter`: the position behind them."""
        assert self._usual is not None
        while match := self._usual.match(run.text, position):
            key, typed, text = match.groups()
            if self.framed:
                text = text.removesuffix("\n")
            call.set(key, self._read(run, call, key, _TYPES.get(typed), text))
            position = match.end()
        return position

    def _parameter(self, run: Run, call: Call, mark: Mark) -> Step[int | _Done]:
        """Read a parameter: where to go on, or the end of the attempt."""
        head = yield from self._head(run, mark.end, self._parameter_head)
        if head is CUT_HEAD:
            return self._cut(run, call)
        if head is None or not head.name or (head.open_end and run.tools.declares(call.name, head.name) is False):
            return (yield from self._broken(run, call, mark.start))
        if head.note:
            call.notes.append(head.note)
        if head.dangling:
            tail = run.text[head.end : head.end + HEAD_LIMIT]
            if run.final and any(tag.startswith(tail) for tag in self.pair + self.key_type):
                return self._cut(run, call)
            return head.end
        start = head.end
        if head.closed:
            self._store(run, call, head, start, start, None)
            return start
        if self.framed and not head.open_end and (yield from run.more(start + 1)) and run.text[start] == "\n":
            start += 1
        teller = yield from self._teller(run, call, head, start)
        value = yield from self._value(run, call, head.name, start, teller)
        if value is None:
            return self._cut(run, call)
        end = value.end
        if value.broken:
            return (yield from self._broken(run, call, value.end))
        # A closed value ends with a newline only where framing adds one; one without its end tag, before the next tag.
        if (self.framed or value.unclosed or head.open_end) and end > start and run.text[end - 1] == "\n":
            end -= 1
        if value.note:
            call.notes.append(value.note)
        elif value.unclosed and self.heads == "pairs":  # elsewhere the models' own parsers take it for granted
            call.notes.append("the end tag of a value is missing")
        self._store(run, call, head, start, end, teller)
        return value.resume

    def _teller(self, run: Run, call: Call, head: Head, start: int) -> Step[Teller | None]:
        """Begin to tell a parameter that is certain to be a string."""
        if call.parts is None:
            return None
        if head.name == self.unwrapped and not call.arguments and run.tools.declares(call.name, head.name) is False:
            call.parts = None
            return None
        string = run.tools.is_string(call.name, head.name) if head.typed is None else head.typed == "string"
        if not string or head.open_end:
            return None
        if self.cdata and (not (yield from run.more(start + 1)) or run.text[start].isspace() or run.text[start] == "<"):
            return None
        call.tell(run, f'{", " if call.parts else "{"}{json.dumps(head.name, ensure_ascii=False)}: "')
        return Teller(run, call, start)

    def _store(self, run: Run, call: Call, head: Head, start: int, end: int, teller: Teller | None) -> None:
        value = self._read(run, call, head.name, head.typed, run.text[start:end])
        call.set(head.name, value)
        if teller is not None:
            teller.rest(end)
            call.tell(run, '"')
        elif call.parts is not None:
            written = json.dumps({head.name: value}, ensure_ascii=False)[1:-1]
            call.tell(run, f"{', ' if call.parts else '{'}{written}")

    def _read(self, run: Run, call: Call, key: str, typed: str | None, text: str) -> Any:
        """The value that a text stands for."""
        if self.cdata and (bare := text.strip()).startswith(_CDATA) and bare.endswith(_CDATA_END):
            text = bare[len(_CDATA) : -len(_CDATA_END)].replace(_CDATA_SPLIT, _CDATA_END)
            if typed is not None or _CDATA in text:
                return text
        return run.tools.coerce(call.name, key, text) if typed is None else _typed(text, typed)

    # -- the end of a value -------------------------------------------------------------------------------------------

    def _seek(self, run: Run, start: int, teller: Teller | None) -> Step[re.Match[str] | None]:
        """The next tag from `start` on; what stands before it is told while waiting."""
        tags = self._tags
        while True:
            match = tags.pattern.search(run.text, start)
            if run.final or (match is not None and not self._may_grow(run, match)):
                return match
            start = tags.unsettled(run.text, start) if match is None else match.start()
            if teller is not None:
                teller.upto(start)
            yield

    def _may_grow(self, run: Run, match: re.Match[str]) -> bool:
        """Whether what comes next can turn a tag into a longer one."""
        tags = self._tags
        return match.group() in tags.extendable and len(run.text) - match.start() < tags.longest

    def _value(self, run: Run, call: Call, key: str, start: int, teller: Teller | None) -> Step[_Value | None]:
        """Where the value from `start` on ends; None when the text ends in it."""
        position = start
        if self.cdata:
            position = yield from self._section(run, start)
        depth = 0  # calls open in the value
        inner = 0  # elements of the parameter's own name open in the value
        closed = start  # behind the last end tag of a call or a wrapper
        unwrapped = False  # that it was a wrapper's
        quoted: _Value | None = None  # the first end, if calls in the value are no calls
        sibling: int | None = None  # the first call in the value, if it is a call of its own
        fallback: _Value | None = None  # an end that counts if no better comes
        opener: int | None = None  # of a parameter that ends the value, unless its own end tag is none
        opened = ""  # that parameter's name
        loose: int | None = None  # the last end tag with text behind it
        while True:
            certain = opener is None and fallback is None and quoted is None and loose is None and not depth
            match = yield from self._seek(run, position, teller if certain else None)
            if match is None:
                break
            at, position = match.span()
            role = self._roles[match.group()]
            if role is Role.END_VALUE:
                behind = yield from self._closes(run, opened or key, position)
                if inner and behind is not None:
                    inner -= 1
                    continue
                mark = Mark(position, Role.TEXT, position)
                if behind is not None:
                    mark = yield from self._after_value(run, opened or key, behind)
                position = mark.start
                if mark.role is Role.TEXT:
                    opener, opened = None, ""
                    if behind is not None and not depth:
                        loose = at
                    continue
                if opener is not None:
                    return _without_end(opener, loose)
                found = _Value(self._last_end(run, start, at, mark.start), mark.start)
                if depth:
                    quoted = quoted or found
                elif mark.role in (Role.PARAMETER, Role.DONE, Role.CUT) or (
                    mark.role is Role.END_CALL
                    and (not call.wrapped or (yield from self._next(run, mark.end)).role in _AFTER_CALL)
                ):
                    return found
                else:
                    fallback = fallback or found
            elif opener is not None and role is not Role.TEXT:
                return _without_end(opener, loose)
            elif role is Role.END_CALL:
                closed, unwrapped = position, False
                if depth:
                    depth -= 1
                elif fallback is None and (yield from self._next(run, position)).role in _AFTER_CALL:
                    fallback = _without_end(at, loose)
            elif role is Role.UNWRAP:
                behind_call = closed > start and not run.text[closed:at].strip()
                closed, unwrapped = position, True
                if not depth and not behind_call and fallback is None:
                    mark = yield from self._next(run, position)
                    if mark.role in _AFTER_CALL:
                        fallback = _Value(at, position, broken=True)
            elif role is Role.PARAMETER:
                if (yield from self._nests(run, call, key, position)):
                    inner += 1
                elif not depth and fallback is None and (loose is None or run.text[at - 1] == "\n"):
                    opened = yield from self._begins_parameter(run, call, key, position)
                    opener = at if opened else None
            elif role is Role.CALL and (following := (yield from self._begins_call(run, position))):
                if fallback is not None:
                    return fallback
                if "quotes" not in run.hints:
                    if closed == start and not depth and (yield from self._is_sibling(run, start, at, following)):
                        sibling = at
                    depth += 1
        if opener is not None or (quoted is None and (fallback is not None or sibling is None)):
            return fallback if opener is None else None
        mark = yield from self._next(run, closed)
        if closed == start or mark.role is not Role.DONE:
            return None
        if sibling is not None and (mark.end > mark.start or (call.wrapped and not unwrapped)):
            return None  # more likely a text that shows calls, cut in one of them
        return self._undecided(run, sibling, quoted)

    def _undecided(self, run: Run, sibling: int | None, quoted: _Value | None) -> _Value | None:
        """The end of a value that opens calls and ends with the end tags of one: before the call that is no part of it,
        or where it ends if these calls are none."""
        siblings = run.memo.get("siblings", (0, 0))[0]
        if sibling is not None and siblings < _SIBLINGS:
            run.memo["siblings"] = (siblings + 1, 0)
            return _Value(sibling, sibling, broken=True)
        run.hints.add("quotes")
        return quoted and quoted._replace(note="a value opens calls and does not close them")

    def _is_sibling(self, run: Run, start: int, at: int, following: _Beginning) -> Step[bool]:
        """Whether the opening tag at `at` in a value may well be that of the next call: on a line of its own, of a tool
        that was offered, with a parameter that the tool has."""
        line = run.text[max(start, run.text.rfind("\n", start, at) + 1) : at]
        if (self.between and not self._wrapping.fullmatch(line)) or following.name not in run.tools.names():
            return False
        if following.mark.role is not Role.PARAMETER:
            return following.mark.role is not Role.TEXT
        head = yield from self._head(run, following.mark.end, self._parameter_head)
        return head is not None and run.tools.declares(following.name, head.name) is True

    def _nests(self, run: Run, call: Call, key: str, position: int) -> Step[bool]:
        """Whether the tag before `position` opens an element of the value that has the parameter's own name."""
        yield from ()
        return False

    def _last_end(self, run: Run, start: int, first: int, end: int) -> int:
        """Which of the end tags between `first` and `end` ends the value that begins at `start`."""
        if self.framed and run.text[start - 1] == "\n" != run.text[first - 1]:
            # Framed at its beginning, it is framed at its end: what is not is data.
            for tag in self.value_ends:
                if (last := run.text.rfind("\n" + tag, first, end)) >= 0:
                    return last + 1
        return first

    def _closes(self, run: Run, key: str, position: int) -> Step[int | None]:
        """The position behind the end tag of a value that ends at `position`; None if it is not that of `key`."""
        yield from ()
        return position

    def _after_value(self, run: Run, key: str, position: int) -> Step[Mark]:
        """What stands behind the end tag of a value, and behind further ones."""
        mark = yield from self._next(run, position)
        while mark.role is Role.END_VALUE:
            behind = yield from self._closes(run, key, mark.end)
            if behind is None:
                return Mark(mark.start, Role.TEXT, mark.start)
            mark = yield from self._next(run, behind)
        if mark.role is Role.PARAMETER and self.heads != "pairs":
            head = yield from self._head(run, mark.end, self._parameter_head)
            if head is None:
                return Mark(mark.end, Role.TEXT, mark.end)
        return mark

    def _begins_parameter(self, run: Run, call: Call, key: str, position: int) -> Step[str]:
        """The name in the opening tag at `position` if it is that of a parameter that the call still lacks, else ""."""
        head = yield from self._head(run, position, self._parameter_head)
        if head is None or head.dangling or head.name in call.arguments or head.name == key:
            return ""
        declared = run.tools.declares(call.name, head.name)
        return head.name if declared or (declared is None and _WORD.fullmatch(head.name)) else ""

    def _section(self, run: Run, start: int) -> Step[int]:
        """The position behind a CDATA section at `start`, or `start`."""
        position = yield from run.skip_space(start)
        if "open section" in run.hints or (yield from run.starts(position, _SECTION)) is None:
            return start
        while (end := (yield from run.find(_SECTION_END, position))) is not None:
            position = end.end()
            mark = yield from self._next(run, position)
            if mark.role is Role.END_VALUE:
                break
        if end is None:
            run.hints.add("open section")  # and so is every later one
            return start
        return position

    # -- the end of a call --------------------------------------------------------------------------------------------

    def _closed(self, run: Run, call: Call, raw_end: int, end: int) -> Step[_Done]:
        """The call is whole; its markup ends at `end`, or with the wrapper's end tag behind that."""
        over = not call.wrapped
        if call.wrapped:
            mark = yield from self._next(run, end)
            if mark.role is Role.UNWRAP:
                end, over = mark.end, True
        raw = run.text[call.body : raw_end].strip()
        if self.unwrapped and list(call.arguments) == [self.unwrapped]:
            self._unwrap(run, call)
        json_text = None
        if call.parts is not None:
            json_text = "".join(call.parts) + "}" if call.parts else "{}"
        status, error = CallStatus.OK, None
        if not call.name:
            status, error = CallStatus.MISSING_NAME, "the call names no tool"
        elif not _can_name(run, call.name):
            status, error = CallStatus.MALFORMED, "the call's name is none"
        elif call.notes:
            status, error = CallStatus.REPAIRED, "; ".join(dict.fromkeys(call.notes))
        usable = run.end_call(call.start, end, status, call.name, call.arguments, raw, error=error, json_text=json_text)
        (run.skip if usable else run.fail)(end)
        return _Done(end, over, usable)

    def _unwrap(self, run: Run, call: Call) -> None:
        value = call.arguments[self.unwrapped]
        if run.tools.declares(call.name, self.unwrapped) is False and isinstance(value, (dict, str)) and value:
            inner = read_arguments(value, "")
            if inner.status in (CallStatus.OK, CallStatus.REPAIRED) and inner.value:
                call.arguments = inner.value
                call.notes.append("all arguments as one parameter")

    def _cut(self, run: Run, call: Call) -> _Done:
        """The text ends in the call."""
        text, end = run.text, len(run.text)
        ends = [marker for marker, kind in run.markers.kinds.items() if kind is Marker.END]
        while True:
            last = end
            while last > call.body and text[last - 1].isspace():
                last -= 1
            lengths = [len(marker) for marker in ends if text.endswith(marker, call.body, last)]
            if not lengths:
                break
            end = last - max(lengths)
        raw = run.text[call.body : end].strip()
        error = "the text ends inside the call"
        run.end_call(call.start, end, CallStatus.INCOMPLETE, call.name, call.arguments, raw, error=error)
        run.fail(end)
        return _Done(end, True)

    def _nameless(self, run: Run, call: Call, position: int) -> Step[_Done | None]:
        """A call without a name that holds no parameter either: an attempt only if it has its end tag."""
        match = yield from run.find(self._closing, position)
        if match is None or self._roles[match.group()] is not Role.END_CALL:
            return None
        run.begin_block(call.start, self.separators)
        return (yield from self._broken(run, call, position))

    def _broken(self, run: Run, call: Call, position: int) -> Step[_Done]:
        """What stands at `position` is no parameter: the attempt ends with the call's end tag, or before other tags."""
        match = yield from run.find(self._closing, position)
        role = self._roles[match.group()] if match is not None else Role.DONE
        end = len(run.text) if match is None else match.end() if role is Role.END_CALL else match.start()
        status = CallStatus.MALFORMED if call.name else CallStatus.MISSING_NAME
        raw = run.text[call.body : end].strip()
        run.end_call(call.start, end, status, call.name, call.arguments, raw, error="the markup of the call is broken")
        run.fail(end)
        return _Done(end, not call.wrapped)

    def _json_arguments(self, run: Run, call: Call, start: int) -> Step[_Done]:
        """The arguments as one JSON object between the tags of a call."""
        call.parts = None
        read = yield from read_value(run, start, self._closing)
        if read.status is CallStatus.INCOMPLETE:
            return self._cut(run, call)
        mark = yield from self._next(run, read.end)
        found = read_arguments(read.value, run.text[start : read.end])
        usable = read.status in (CallStatus.OK, CallStatus.REPAIRED) and found.status is not CallStatus.NOT_AN_OBJECT
        if usable and (mark.role is Role.END_CALL or (call.wrapped and mark.role in _AFTER_CALL)):
            call.arguments = found.value
            call.notes.append(read.error or "a JSON object instead of tags")
            return (
                yield from self._closed(run, call, read.end, mark.end if mark.role is Role.END_CALL else mark.start)
            )
        return (yield from self._broken(run, call, read.end))

    # -- writing ------------------------------------------------------------------------------------------------------

    def render_calls(self, turn: Turn) -> str:
        if self.writes_json and self.json is not None:
            return self.json.render_calls(turn)
        return self.around[0] + self.between.join(map(self._render_call, turn.calls)) + self.around[1]

    def _render_call(self, call: RenderCall) -> str:
        parameters = "".join(
            self.parameter.format(key=key, value=self._written(value), string=str(isinstance(value, str)).lower())
            for key, value in call.arguments.items()
        )
        return self.call.format(name=call.name, parameters=parameters or self.empty)

    def _written(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self.cdata and (text != text.strip() or any(character in text for character in "<>&\n")):
            return _CDATA + text.replace(_CDATA_END, _CDATA_SPLIT) + _CDATA_END
        return text


def _can_name(run: Run, name: str) -> bool:
    """Whether a tool can have that name."""
    return _NAME.fullmatch(name) is not None or name in run.tools.names()


def _typed(text: str, kind: str) -> Any:
    """A value whose type the markup tells."""
    if kind == "string":
        return text
    if text.lstrip()[:1] == '"' and kind == "json":
        try:
            literal = read_json(text.strip())
            if literal.end == len(text.strip()):
                return literal.value
        except LiteralError:
            pass
    return coerce(text, _ANY_JSON if kind == "json" else {"type": kind})
