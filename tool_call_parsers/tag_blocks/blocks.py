"""Blocks of calls, and the parameters of a call, between tags."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from tool_call_parsers.arguments import ArgumentsText, plain_name, read_arguments
from tool_call_parsers.engine import Marker, Needles, RenderCall, RenderTurn, Run, Step, cut_off
from tool_call_parsers.json_blocks.attempts import MANY_OPENERS, skip_repeated
from tool_call_parsers.json_blocks.blocks import JsonBlocks
from tool_call_parsers.json_scan import read_value
from tool_call_parsers.literals.strict import read_whole_json
from tool_call_parsers.schema.values import coerce
from tool_call_parsers.tag_blocks.syntax import CDATA, CDATA_END
from tool_call_parsers.tag_blocks.tags import AFTER_CALL, CUT_HEAD, HEAD_LIMIT, TYPES, Head, Mark, TagRole
from tool_call_parsers.tag_blocks.values import OpenCall, StringStream, TagValues
from tool_call_parsers.types import CallStatus

_ANY_JSON = {"type": ["null", "integer", "number", "boolean", "object", "array"]}
_NAME = re.compile(r"(?=(?>(?:[\W_])*)\w)[^\s<>\"'{}]++")
"""A possible name of a tool that was not offered."""
_CDATA_SPLIT = "]]]]><![CDATA[>"
_FENCE = Needles("```")
_OPENS_CALL = (TagRole.CALL, TagRole.WRAP)


class _Done(NamedTuple):
    """A finished attempt."""

    end: int
    over: bool
    """The block is finished, too."""
    usable: bool = False


class _ForeignJson(JsonBlocks):
    """Calls as JSON in a format of tags."""

    def _object(self, run: Run, position: int, bare: bool, begin: int | None) -> Step[Any]:
        call = yield from super()._object(run, position, bare, begin)
        if call is not None and call.status is CallStatus.OK:
            call = call._replace(status=CallStatus.REPAIRED, error="a JSON object instead of tags")
        return call


class TagBlocks(TagValues):
    """Calls with their parameters as tags."""

    missing_end: ClassVar[str | None] = "the end tag of the call is missing"
    """What is wrong with a call that the end of the text ends."""

    @cached_property
    def _foreign(self) -> JsonBlocks:
        if self.json is not None:
            return self.json
        return _ForeignJson((*self.wraps, *self.calls), (*self.unwraps, *self.ends), self.separators)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        wrapped = self._roles[opener] is TagRole.WRAP
        first, last = run.memo.get("wrappers", (0, 0))
        if first < start < last:
            return None  # the first of these wrappers has shown that they hold no call
        position = body if wrapped else start
        wrappers = [opener] if wrapped else []
        while True:
            if wrapped and self.fillers:
                position = yield from self._after_fillers(run, position)
            mark = self._tag_at(run, position) or (yield from self._next(run, position))
            if mark.role is not TagRole.WRAP:
                break
            position, wrapped = mark.end, True
            wrappers.append(run.text[mark.start : mark.end])
        if mark.role is TagRole.TEXT:
            mark = yield from self._bare_call(run, mark)
        end = None
        if mark.role is TagRole.CALL:
            end = yield from self._calls(run, start, mark, wrappers)
        elif mark.role in (TagRole.DONE, TagRole.CUT):
            end = cut_off(run, start, self.separators)
        elif mark.role is TagRole.TEXT and run.text[mark.start] in "{[":
            end = yield from self._foreign.block(run, start, position, opener)
        if end is None:
            run.memo["wrappers"] = start, position
        return end

    def _calls(self, run: Run, start: int, mark: Mark, wrappers: list[str]) -> Step[int | None]:
        """Read the calls of a block, of which the first opens at `mark`. Return their end; None if they are text."""
        wrapped = bool(wrappers)
        note = None
        if not wrapped:
            note = "the wrapper of the call is missing" if self.wraps else None
        elif len(wrappers) > 1 and len(wrappers) > len(set(wrappers)):
            note = "a repeated wrapper"
        elif self.fillers and not self._is_written(run, run.text[start : mark.start]):
            note = "the text before the call is not as the model writes it"
        elif self._variants and not self._variants.isdisjoint(wrappers):
            note = "a wrapper of another format"
        done = yield from self._call(run, start, mark, wrapped, first=True, note=note)
        while done is not None and not done.over:
            mark = self._tag_at(run, done.end) or (yield from self._next(run, done.end))
            if mark.role is not TagRole.CALL:
                return (yield from self._after_calls(run, done, mark))
            following = yield from self._call(run, mark.start, mark, wrapped, first=False)
            if following is None:
                break
            done = following
        return None if done is None else done.end

    def _is_written(self, run: Run, before: str) -> bool:
        """Whether the text before a call is that of the template: for all calls, or for one after others."""
        around, before = self.around[0], "".join(before.split())
        alone = "".join(self.call.partition(self.calls[0])[0].split())
        return before == "".join(around.split()) + alone or (bool(run.attempts) and before == alone)

    def _bare_call(self, run: Run, mark: Mark) -> Step[Mark]:
        """The mark of text after a wrapper, or the call of which the tag lacks what is before every tag."""
        yield from ()
        return mark

    def _after_fillers(self, run: Run, position: int) -> Step[int]:
        while True:
            start = yield from run.skip_space(position)
            filler = yield from run.starts(start, self._fillers)
            if filler is None:
                return position
            position = start + len(filler)

    def _after_calls(self, run: Run, done: _Done, mark: Mark) -> Step[int]:
        """Read the rest of a wrapper: text in it is content, its end tag is dropped."""
        if mark.role is TagRole.TEXT and done.usable:
            marker = yield from run.find(run.markers.all, done.end, run.flow)
            if marker is not None and self._roles.get(marker.group()) is TagRole.UNWRAP:
                run.take(marker.start())
                run.skip(marker.end())
                return marker.end()
            return len(run.text) if marker is None else marker.start()
        return done.end

    def _call(
        self, run: Run, begin: int, mark: Mark, wrapped: bool, first: bool, note: str | None = None
    ) -> Step[_Done | None]:
        """Read the call whose opening tag is at `mark`, as an attempt from `begin` on; None if it is only text."""
        tag = run.text[mark.start : mark.end]
        if self.heads == "pairs" and not run.text[mark.end : mark.end + 1].isalnum():
            position = yield from run.skip_space(mark.end)
            if run.text.startswith(("{", "["), position) or (yield from run.starts(position, _FENCE)) is not None:
                end = yield from self._foreign.block(run, begin, mark.end, tag)
                return None if end is None else _Done(end, True)
            if not run.final or run.text.startswith(tag, position):
                opened, again = yield from skip_repeated(run, mark.end, self._call_tags, MANY_OPENERS)
                if again:
                    mark, note = Mark(mark.start, TagRole.CALL, opened), note or "a repeated opening tag"
        head = yield from self._head(run, mark.end, self._call_head)
        if head is None:
            return None
        if head.name not in run.tools.names() and (plain := plain_name(head.name, run.tools)) is not None:
            head = head._replace(name=plain, note=f"the name is written {head.name!r}")
        separators = self.separators if first else ()
        if head is CUT_HEAD:
            run.begin_block(begin, separators)
            return self._cut(run, OpenCall("", begin, len(run.text), wrapped))
        call = OpenCall(head.name, begin, head.end, wrapped)
        if note or head.note:
            call.note(note, head.note)
        if head.attributes or head.typed:
            call.note("an attribute of a call")
        if head.closed or tag not in self._written_calls:
            call.note("another spelling of a tag")
        mark = self._tag_at(run, head.end) or (yield from self._next(run, head.end))
        while mark.role is TagRole.END_VALUE:
            call.note("an end tag of a value without a value")
            mark = yield from self._next(run, mark.end)
            if self.name_end and run.text.startswith(self.name_end, mark.start):
                mark = yield from self._next(run, mark.start + len(self.name_end))
        if not head.closed and mark.role not in (TagRole.PARAMETER, TagRole.END_CALL):
            if mark.role in (TagRole.DONE, TagRole.CUT):
                run.begin_block(begin, separators)
                return self._cut(run, call)
            if mark.role is TagRole.TEXT and not head.name:
                return (yield from self._nameless(run, call, mark.start))
            unended = self._needs_nothing(run, head.name, mark)
            if (
                not unended
                and not (mark.role is TagRole.UNWRAP and wrapped)
                and not run.text.startswith("{", mark.start)
            ):
                return None
        run.begin_block(begin, separators)
        if run.streams and _can_name(run, head.name):
            run.start_call(head.name)
            call.streamed = ArgumentsText(run)
        if head.closed:
            return (yield from self._closed(run, call, head.end, head.end))
        if mark.role is TagRole.TEXT:
            return (yield from self._json_arguments(run, call, mark.start))
        return (yield from self._parameters(run, call, mark))

    def _parameters(self, run: Run, call: OpenCall, mark: Mark) -> Step[_Done]:
        """Read the parameters, the first of which opens at `mark`, and the end of the call."""
        if run.final and call.streamed is None and self._usual is not None:
            after = self._usual_parameters(run, call, mark.start)
            mark = self._tag_at(run, after) or (yield from self._next(run, after))
        while (role := mark.role) in (TagRole.PARAMETER, TagRole.END_VALUE):
            if role is TagRole.PARAMETER:
                resume = yield from self._parameter(run, call, mark)
                if isinstance(resume, _Done):
                    return resume
            else:
                resume = mark.end
                call.note("an end tag of a value without a value")
            mark = self._tag_at(run, resume) or (yield from self._next(run, resume))
        if mark.role is TagRole.END_CALL:
            if run.text[mark.start : mark.end] in self._variants:
                call.note("another spelling of a tag")
            return (yield from self._closed(run, call, mark.start, mark.end))
        complete = run.tools.required(call.name) <= call.arguments.keys()
        if mark.role in (TagRole.DONE, TagRole.CUT):
            if mark.role is TagRole.DONE and self.open_end and call.arguments and complete:
                call.note(self.missing_end)
                return (yield from self._closed(run, call, mark.start, mark.end))
            return self._cut(run, call)
        complete = complete or mark.role is TagRole.UNWRAP
        if mark.role is not TagRole.TEXT and complete and (call.arguments or self._needs_nothing(run, call.name, mark)):
            call.note("the end tag of the call is missing")
            return (yield from self._closed(run, call, mark.start, mark.start))
        return (yield from self._broken(run, call, mark.start))

    def _needs_nothing(self, run: Run, name: str, mark: Mark) -> bool:
        """Whether a name and the tag after it, which opens or closes something else, are a call without its end tag:
        the tool was offered and needs no arguments."""
        offered = name in run.tools.names() and not run.tools.required(name)
        return offered and self.heads == "pairs" and mark.role in (*_OPENS_CALL, TagRole.UNWRAP)

    def _usual_parameters(self, run: Run, call: OpenCall, position: int) -> int:
        """Read parameters of the usual shape, with the results of `_parameter`. Return the position after them."""
        assert self._usual is not None
        usual, framed = self._usual.match, self.framed
        arguments = call.arguments
        while match := usual(run.text, position):
            key, typed, text = match.groups()
            if (">" in text or "<" in text) and self._near_end(run, key, *match.span(3)) is not None:
                break
            if framed:
                text = text[:-1]
            value = self._read(run, call, key, TYPES[typed] if typed else None, text)
            if key in arguments:
                call.set(key, value)
            else:
                arguments[key] = value
            position = match.end()
        return position

    def _parameter(self, run: Run, call: OpenCall, mark: Mark) -> Step[int | _Done]:
        """Read a parameter. Return where to continue, or the end of the attempt."""
        head = yield from self._head(run, mark.end, self._parameter_head)
        if head is CUT_HEAD:
            return self._cut(run, call)
        if head is None or not head.name or (head.open_end and run.tools.declares(call.name, head.name) is False):
            return (yield from self._broken(run, call, mark.start))
        call.note(head.note, self._head_note(head, run.text[mark.start : mark.end]))
        if head.dangling:
            call.dangling = True
            tail = run.text[head.end : head.end + HEAD_LIMIT]
            if run.final and any(tag.startswith(tail) for tag in self.pair + self.key_type):
                return self._cut(run, call)
            return head.end
        start = yield from self._after_repeated(run, call, self.pair[1] or run.text[mark.start : head.end], head.end)
        if head.closed:
            self._store(run, call, head, start, start, None)
            return start
        framed = self.framed and not head.open_end and (yield from run.more(start + 1)) and run.text[start] == "\n"
        start += framed
        stream = yield from self._string_stream(run, call, head, start)
        value = yield from self._value(run, call, head.name, start, stream)
        if value is None:
            return self._cut(run, call)
        end = value.end
        if value.broken:
            return (yield from self._broken(run, call, value.end))
        if (self.framed or head.open_end) and end > start and run.text[end - 1] == "\n":
            end -= 1
        elif self.framed:
            framed = False
        call.note(value.note)
        if self.framed and not framed and value.note is None:
            call.note("a value without newlines around it")
        self._store(run, call, head, start, end, stream)
        return value.resume

    def _after_repeated(self, run: Run, call: OpenCall, tag: str, start: int) -> Step[int]:
        """The position after tags that repeat the one before `start`."""
        while True:
            position = yield from run.skip_space(start)
            while (
                not run.final
                and len(found := run.text[position : position + len(tag)]) < len(tag)
                and tag.startswith(found)
            ):
                yield
            if not run.text.startswith(tag, position):
                return start
            call.note(f"{tag} is repeated")
            start = position + len(tag)

    def _head_note(self, head: Head, tag: str) -> str | None:
        """How the opening tag of a parameter differs from those that the model's template writes."""
        if self._states_types and head.typed is None:
            return 'the attribute string="true" or "false" is missing'
        if head.attributes or (head.typed is not None and self.heads == "attributes" and not self._states_types):
            return "an attribute of a parameter"
        return "another spelling of a tag" if head.closed or head.dangling or tag in self._variants else None

    def _string_stream(self, run: Run, call: OpenCall, head: Head, start: int) -> Step[StringStream | None]:
        """Begin to stream a parameter that is certainly a string."""
        if call.streamed is None:
            return None
        if head.name == self.unwrapped and not call.arguments and run.tools.declares(call.name, head.name) is False:
            call.streamed = None
            return None
        string = run.tools.is_string(call.name, head.name) if head.typed is None else head.typed == "string"
        if not string or head.open_end:
            return None
        if self.cdata and (not (yield from run.more(start + 1)) or run.text[start].isspace() or run.text[start] == "<"):
            return None
        call.streamed.member(head.name, '"')
        return StringStream(run, call.streamed, start)

    def _store(self, run: Run, call: OpenCall, head: Head, start: int, end: int, stream: StringStream | None) -> None:
        value = self._read(run, call, head.name, head.typed, run.text[start:end])
        call.set(head.name, value)
        if stream is not None:
            stream.rest(end)
            stream.streamed.add('"')
        elif call.streamed is not None:
            call.streamed.member(head.name, json.dumps(value, ensure_ascii=False))

    def _read(self, run: Run, call: OpenCall, key: str, typed: str | None, text: str) -> Any:
        """The value of a parameter's text."""
        if self.cdata and (bare := text.strip()).startswith(CDATA) and bare.endswith(CDATA_END):
            text = bare[len(CDATA) : -len(CDATA_END)].replace(_CDATA_SPLIT, CDATA_END)
            if typed is not None or CDATA in text:
                return text
        if typed is None:
            return run.tools.coerce(call.name, key, text)
        if typed == "string":
            return text
        literal = read_whole_json(text.strip())
        if literal is not None and typed == "json":
            return literal.value
        if literal is None:
            call.note("a value that is not JSON, as its tag says")
        return coerce(text, _ANY_JSON if typed == "json" else {"type": typed})

    # -- the end of a call --------------------------------------------------------------------------------------------

    def _closed(self, run: Run, call: OpenCall, raw_end: int, end: int) -> Step[_Done]:
        """Record a complete call, whose tags end at `end`, or with the end tag of the wrapper that follows."""
        over = not call.wrapped
        if call.wrapped:
            mark = self._tag_at(run, end) or (yield from self._next(run, end))
            if mark.role is TagRole.UNWRAP:
                if run.text[mark.start : mark.end] in self._variants:
                    call.note("a wrapper of another format")
                end, over = mark.end, True
            elif mark.role is TagRole.TEXT:
                call.note("text in the wrapper")
            elif mark.role is not TagRole.CALL or not self._shares_wrapper:
                call.note("the end tag of the wrapper is missing")
        if over and (not run.final or run.text.find("<", end) >= 0):
            end = yield from self._after_repeated(run, call, run.text[run.text.rfind("<", 0, end) : end], end)
        raw = run.text[call.body : raw_end].strip()
        if self.unwrapped and list(call.arguments) == [self.unwrapped]:
            self._unwrap(run, call)
        json_text = call.streamed.whole() if call.streamed is not None else None
        status, error = CallStatus.OK, None
        if not call.name:
            status, error = CallStatus.MISSING_NAME, "the call names no tool"
        elif not _can_name(run, call.name):
            status, error = CallStatus.MALFORMED, "the call's name is invalid"
        elif (defect := call.defect or self._lost(run, call)) is not None:
            status, error = CallStatus.MALFORMED, defect
        elif call.notes:
            status, error = CallStatus.REPAIRED, "; ".join(dict.fromkeys(call.notes))
        usable = run.end_call(call.start, end, status, call.name, call.arguments, raw, error=error, json_text=json_text)
        return _Done(end, over, usable)

    def _lost(self, run: Run, call: OpenCall) -> str | None:
        """Why arguments may be lost: of a key without a value, or in a value that holds its own end tag."""
        if call.dangling and not call.arguments:
            return "a key without a value"
        if run.tools.required(call.name) <= call.arguments.keys():
            return None
        texts = [text for text in call.arguments.values() if isinstance(text, str)]
        if any(tag in text for text in texts for key in call.arguments for tag in self._end_tags(key)):
            return "the opening tag of a parameter is missing"
        return None

    def _unwrap(self, run: Run, call: OpenCall) -> None:
        value = call.arguments[self.unwrapped]
        if run.tools.declares(call.name, self.unwrapped) is False and isinstance(value, (dict, str)) and value:
            inner = read_arguments(value, "")
            if inner.status in (CallStatus.OK, CallStatus.REPAIRED) and inner.value:
                call.arguments = inner.value
                call.note("all arguments as one parameter")

    def _cut(self, run: Run, call: OpenCall) -> _Done:
        """Record a call that the end of the text cuts off."""
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
        return _Done(end, True)

    def _nameless(self, run: Run, call: OpenCall, position: int) -> Step[_Done | None]:
        """A call without a name or parameters: an attempt only if it has its end tag."""
        match = yield from run.find(self._closing, position)
        if match is None or self._roles[match.group()] is not TagRole.END_CALL:
            return None
        run.begin_block(call.start, self.separators)
        return (yield from self._broken(run, call, position))

    def _broken(self, run: Run, call: OpenCall, position: int) -> Step[_Done]:
        """Record an attempt with other text in place of a parameter. It ends at the call's end tag or before others."""
        match = yield from run.find(self._closing, position)
        role = self._roles[match.group()] if match is not None else TagRole.DONE
        end = len(run.text) if match is None else match.end() if role is TagRole.END_CALL else match.start()
        status = CallStatus.MALFORMED if call.name else CallStatus.MISSING_NAME
        raw = run.text[call.body : end].strip()
        run.end_call(call.start, end, status, call.name, call.arguments, raw, error="the markup of the call is broken")
        return _Done(end, not call.wrapped)

    def _json_arguments(self, run: Run, call: OpenCall, start: int) -> Step[_Done]:
        """Read the arguments as one JSON object between the tags of a call."""
        call.streamed = None
        read = yield from read_value(run, start, self._closing)
        if read.status is CallStatus.INCOMPLETE:
            return self._cut(run, call)
        mark = yield from self._next(run, read.end)
        found = read_arguments(read.value, run.text[start : read.end])
        usable = read.status in (CallStatus.OK, CallStatus.REPAIRED) and found.status is not CallStatus.NOT_AN_OBJECT
        if usable and (mark.role is TagRole.END_CALL or (call.wrapped and mark.role in AFTER_CALL)):
            call.arguments = found.value
            call.note(read.error or "a JSON object instead of tags")
            return (
                yield from self._closed(run, call, read.end, mark.end if mark.role is TagRole.END_CALL else mark.start)
            )
        return (yield from self._broken(run, call, read.end))

    # -- writing ------------------------------------------------------------------------------------------------------

    def render_calls(self, turn: RenderTurn) -> str:
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
            return CDATA + text.replace(CDATA_END, _CDATA_SPLIT) + CDATA_END
        return text


def _can_name(run: Run, name: str) -> bool:
    """Whether a tool can have the name."""
    return name in run.tools.names() or _NAME.fullmatch(name) is not None
