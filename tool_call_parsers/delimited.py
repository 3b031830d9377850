"""Calls as `call:f{k:<|"|>v<|"|>,n:3,o:{x:[1,true]}}`: strings verbatim between delimiters, the rest as JSON.

Nothing is escaped. A delimiter ends its string only before text that may follow a string; other delimiters are data.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from tool_call_parsers.arguments import ArgumentsText, plain_name
from tool_call_parsers.engine import BlockGrammar, Marker, Markers, Needles, RenderTurn, Run, Step, cut_off
from tool_call_parsers.json_blocks import StrayNeedles, may_stray, skip_repeated, stray, with_stray
from tool_call_parsers.literals import MAX_DEPTH, REPEATED_KEY, LiteralError, read_tolerant
from tool_call_parsers.python_scan import follow_string
from tool_call_parsers.reasoning import ReasoningFormat
from tool_call_parsers.schema import coerce
from tool_call_parsers.types import CallStatus

_NAME = r"[^\W\d][\w-]*+(?>(?:[.:/][\w-]++)*)"
_HEAD = re.compile(rf"(call[ \t]{{0,4}}:[ \t]{{0,4}}|:?[ \t]{{0,4}})({_NAME})([{{(])")
_HEAD_CUT = re.compile(rf"(?:(?:call[ \t]{{0,4}}:|:)?[ \t]{{0,4}}(?:{_NAME}[.:/]?)?|call[ \t]{{1,4}})\Z")
_NO_BRACKETS = re.compile(rf"call[ \t]{{0,4}}:[ \t]{{0,4}}({_NAME})?")
_MAX_HEAD = 256
_BEGINS = re.compile(r"""[\w$@<"'})-]""")
_KEY = re.compile(r"""([^:=,{}\[\]()<>"'\r\n]{1,128}?)\s{0,8}([:=])""")
_KEY_CUT = re.compile(r"""[^:=,{}\[\]()<>"'\r\n]{0,128}\s{0,8}\Z""")
_PLAIN_KEY = re.compile(r"""[\w$@-](?:[^:=,{}\[\]()<>"'\r\n]{0,126}[^:=,{}\[\]()<>"'\s])?""")
_SCALAR_END = re.compile(r"[,}\])<]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_MEMBER = re.compile(r"([\w$@-]{1,64})\s{0,8}:\s{0,8}[^\s]")
_SCALAR_MEMBER = re.compile(r"(-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?|true|false|null)\s+([\w$@-]{1,64})\s{0,8}:")
_CALL = "call:"
_SEPARATORS = ":./"
"""Characters between the namespaces before a name."""
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NO_CLOSING = "no closing bracket"
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_AFTER_VALUE, _AFTER_KEY = ",}])", ":="


class _Failure(Exception):
    """The arguments cannot be read further."""

    def __init__(self, position: int, reason: str | None = None) -> None:
        self.position = position
        self.reason = reason
        """None if the text ends there."""


class _Frame(NamedTuple):
    """A container around the current one."""

    container: Any
    closing: str
    key: str


@dataclass(frozen=True)
class Delimited(BlockGrammar):
    """Calls of keys and values, with strings between delimiters."""

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    delimiter: str
    """The mark before and after a string."""
    separators: tuple[str, ...] = ()
    calls_first: bool = False
    """The model's template writes the calls before the content."""

    _opens = cached_property(lambda self: Needles(*self.openers))
    _tags = cached_property(lambda self: Needles(*self.openers, *self.closers))
    _closers = cached_property(lambda self: Needles(*self.closers))
    _marks = cached_property(lambda self: Needles(self.delimiter, *self.closers))
    _delimiter = cached_property(lambda self: Needles(self.delimiter))

    @cached_property
    def _damaged(self) -> re.Pattern[str]:
        """A delimiter without one of its characters, or another marker in its place, where a string may end."""
        mark = self.delimiter
        spelled = {mark[:index] + mark[index + 1 :] for index in range(len(mark))}
        spelled |= {mark.replace("<", "</"), mark.replace("|", ""), *self.openers, *self.closers} - {mark}
        either = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
        following = rf",\s{{0,8}}(?:[\w$@\-]{{1,64}}\s{{0,8}}:|{re.escape(mark)})|[}}\])]"
        return re.compile(rf"(?:<\s)?(?:{either})\s{{0,8}}(?={following})")

    @cached_property
    def _swallowed(self) -> re.Pattern[str]:
        """Text that no string holds: the next argument with a string, or in a list the next string."""
        mark = re.escape(self.delimiter)
        return re.compile(rf"[,{{]\s*[\w$@\-]{{1,64}}\s*:\s*{mark}|(,\s*{mark})")

    def markers(self, reasoning: ReasoningFormat, ends: tuple[str, ...]) -> Markers:
        markers = with_stray(super().markers(reasoning, ends))
        kinds = {_CALL: Marker.OPEN, **markers.kinds}
        return replace(markers, kinds=kinds, all=StrayNeedles(*kinds))

    def may_open(self, run: Run, start: int, opener: str) -> bool:
        return opener in self.openers or may_stray(run, start)

    def _stray(self, run: Run, start: int) -> Step[int]:
        """Record a call without its opening marker as a failed attempt. Return its end, or the end of the word."""
        yield from run.more(start + _MAX_HEAD)
        head = _HEAD.match(run.text, start, start + _MAX_HEAD)
        name = (plain_name(head[2], run.tools, _SEPARATORS) or head[2]) if head is not None else ""
        if name not in run.tools.names():
            return start + len(_CALL)
        run.begin_block(start)
        tag = yield from run.find(self._tags, start)
        end = len(run.text) if tag is None else tag.end() if tag.group() in self.closers else tag.start()
        run.end_call(start, end, CallStatus.MALFORMED, name, error=f"no {self.openers[0]} before the call")
        return end

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        if opener not in self.openers:
            return (yield from self._stray(run, start) if opener == _CALL else stray(run, start, self._closers))
        position = yield from run.skip_space(body)
        twice = False
        if run.text.startswith("<", position):
            position, twice = yield from skip_repeated(run, position, self._opens)
            position = yield from run.skip_space(position)
        if position == len(run.text):
            return cut_off(run, start, self.separators)
        while (head := _HEAD.match(run.text, position)) is None:
            if len(run.text) - position > _MAX_HEAD or not _HEAD_CUT.match(run.text, position):
                return (yield from self._without_arguments(run, start, position))
            if run.final:
                return cut_off(run, start, self.separators)
            yield
        first = yield from run.skip_space(head.end())
        if head.end() - position > _MAX_HEAD or (first < len(run.text) and not _BEGINS.match(run.text, first)):
            return None
        run.begin_block(start, self.separators)
        name, bracket = head[2], head[3]
        plain = plain_name(name, run.tools, _SEPARATORS)
        if plain is None and (glued := name.removeprefix("call")) in run.tools.names():
            plain = glued if name not in run.tools.names() else None
        run.start_call(plain or name)
        reader = _Reader(self, run, name, ArgumentsText(run, run.streams))
        if head[1] != "call:" or bracket != "{":
            reader.notes["not written as call:name{...}"] = None
        if plain is not None:
            reader.notes[f"the name is written {name!r}"] = None
            name = reader.name = plain
        if twice:
            reader.notes["the opening marker twice"] = None
        try:
            position = yield from reader.read(head.end(), _CLOSING[bracket])
        except _Failure as failure:
            status, end, reason = CallStatus.INCOMPLETE, len(run.text), failure.reason
            if reason is not None:
                status = CallStatus.INVALID_JSON
                tag = yield from run.find(self._tags, failure.position)
                end = failure.position if tag is None else tag.end() if tag.group() in self.closers else tag.start()
            raw = run.text[head.end() : failure.position]
            run.end_call(
                start, end, status, name, arguments_raw=raw, error=reason or "the text ends inside the arguments"
            )
            return end
        raw = run.text[head.end() : position - (_NO_CLOSING not in reader.notes)]
        after = yield from run.skip_space(position)
        surplus = run.text[after : after + 1] in tuple("}])")
        while run.text[after : after + 1] in tuple("}])"):
            after = yield from run.skip_space(after + 1)
        closer = yield from run.starts(after, self._closers)
        if surplus and closer is not None:
            reader.notes["surplus brackets"] = None
        end = position
        if closer is not None:
            end, closed_twice = yield from skip_repeated(run, after + len(closer), self._closers)
            if closed_twice:
                reader.notes["the closing marker twice"] = None
        else:
            reader.notes["no closing marker"] = None
        status = CallStatus.REPAIRED if reader.notes else CallStatus.OK
        error = "; ".join(reader.notes) or None
        run.end_call(start, end, status, name, reader.arguments, raw, error=error, json_text=reader.streamed.whole())
        return end

    def _without_arguments(self, run: Run, start: int, position: int) -> Step[int | None]:
        """The end of a block that holds a name without brackets, or brackets without a name."""
        match = _NO_BRACKETS.match(run.text, position)
        if match is None or match.end() - position > _MAX_HEAD:
            return None
        after = yield from run.skip_space(match.end())
        if match[1] is None and run.text.startswith("{", after):
            after = yield from run.skip_space(after + 1)
            if not run.text.startswith("}", after):
                return None
            after = yield from run.skip_space(after + 1)
        closer = yield from run.starts(after, self._closers)
        if closer is None:
            return None
        status, error = CallStatus.REPAIRED, "no brackets follow the name"
        if match[1] is None:
            status, error = CallStatus.MISSING_NAME, "the call names no tool"
        run.begin_block(start, self.separators)
        end = after + len(closer)
        run.end_call(start, end, status, match[1] or "", {}, error=error)
        return end

    def render(self, turn: RenderTurn) -> str:
        if not self.calls_first:
            return super().render(turn)
        before = super().render(RenderTurn("", turn.reasoning, turn.calls, turn.tools, turn.shape))
        return before + turn.content

    def render_calls(self, turn: RenderTurn) -> str:
        return "".join(
            f"{self.openers[0]}call:{call.name}{self._write(call.arguments)}{self.closers[0]}" for call in turn.calls
        )

    def _write(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.delimiter}{value}{self.delimiter}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(self._write, value)) + "]"
        if isinstance(value, (int, float)) or value is None:
            return json.dumps(value)
        members = sorted(((str(key), item) for key, item in value.items()), key=lambda member: member[0].lower())
        return "{" + ",".join(f"{self._write_key(key)}:{self._write(item)}" for key, item in members) + "}"

    def _write_key(self, key: str) -> str:
        return key if _PLAIN_KEY.fullmatch(key) else self._write(key)


@dataclass(slots=True)
class _Reader:
    """Reads the arguments of one call, and streams them."""

    grammar: Delimited
    run: Run
    name: str
    streamed: ArgumentsText
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def _failure(self, position: int, reason: str) -> Step[_Failure]:
        """The exception for unexpected text at `position`. Half a marker at the end of the text may be expected."""
        run, marks = self.run, self.grammar._marks
        cut = (yield from run.starts(position, marks)) is None and run.final
        cut = cut and (position == len(run.text) or marks.begins(run.text, position))
        return _Failure(position, None if cut else reason)

    def read(self, position: int, closing: str) -> Step[int]:
        """Read from after the opening bracket to after its closing bracket. Raises `_Failure`."""
        run, delimiter = self.run, self.grammar.delimiter
        stack: list[_Frame] = []
        container: Any = self.arguments
        key, comma = "", False
        while True:
            position = yield from run.skip_space(position)
            char = run.text[position : position + 1]
            if char == closing:
                if comma:
                    self.notes["trailing comma"] = None
                position += 1
                if not stack:
                    return position
                value = container
                container, closing, key = stack.pop()
                if not stack:
                    self.streamed.value(value)
            else:
                if closing != "]":
                    key, position = yield from self._key(position)
                    position = yield from run.skip_space(position)
                    char = run.text[position : position + 1]
                    if not stack:
                        self.streamed.member(key)
                if char == "{" or char == "[":
                    if len(stack) + 2 > MAX_DEPTH:
                        raise (yield from self._failure(position, "nested too deeply"))
                    stack.append(_Frame(container, closing, key))
                    container, closing = {} if char == "{" else [], _CLOSING[char]
                    position, comma = position + 1, False
                    continue
                if char == delimiter[0] and (yield from run.starts(position, self.grammar._delimiter)):
                    value, position = yield from self._string(position, _AFTER_VALUE, not stack, closing == "]")
                else:
                    value, position = yield from self._plain(position, None if stack else key)
                    if not stack:
                        self.streamed.value(value)
            if closing == "]":
                container.append(value)
            else:
                if key in container:
                    self.notes[REPEATED_KEY] = None
                container[key] = value
            position = yield from run.skip_space(position)
            comma = run.text.startswith(",", position)
            if comma:
                position += 1
            elif not run.text.startswith(closing, position):
                if not stack and (yield from run.starts(position, self.grammar._closers)) is not None:
                    self.notes[_NO_CLOSING] = None
                    return position
                if closing != "]" and (yield from self._lacks_comma(position, None if stack else self.name)):
                    self.notes["no comma"] = None
                    continue
                raise (yield from self._failure(position, f"neither ',' nor {closing!r}"))

    def _lacks_comma(self, position: int, tool: str | None) -> Step[bool]:
        """Whether the next member is at `position`. The first argument of another is told from data by the schema of
        the `tool`."""
        yield from self.run.more(position + _MAX_HEAD)
        match = _MEMBER.match(self.run.text, position, position + _MAX_HEAD)
        return match is not None and (tool is None or self.run.tools.declares(tool, match[1]) is True)

    def _key(self, position: int) -> Step[tuple[str, int]]:
        """The key at `position`, and the position after its separator."""
        run = self.run
        char = run.text[position : position + 1]
        if char == self.grammar.delimiter[0] and (yield from run.starts(position, self.grammar._delimiter)):
            key, position = yield from self._string(position, _AFTER_KEY, False)
            if _PLAIN_KEY.fullmatch(key):
                self.notes["a key between delimiters"] = None
        elif char and char in "\"'":
            key, position = yield from self._quoted(position, _AFTER_KEY)
        else:
            while (match := _KEY.match(run.text, position)) is None:
                if not _KEY_CUT.match(run.text, position):
                    raise (yield from self._failure(position, "no key"))
                if run.final:
                    raise _Failure(len(run.text))
                yield
            if match[2] == "=":
                self.notes["'=' instead of ':'"] = None
            return match[1], match.end()
        position = yield from run.skip_space(position)
        if run.text.startswith("=", position):
            self.notes["'=' instead of ':'"] = None
        elif not run.text.startswith(":", position):
            raise (yield from self._failure(position, "no ':' follows a key"))
        return key, position + 1

    def _string(self, position: int, followers: str, stream: bool, in_list: bool = False) -> Step[tuple[str, int]]:
        """The string whose opening delimiter is at `position`, and its end."""
        run, needles = self.run, self.grammar._delimiter
        streamed = self.streamed if stream and self.streamed.active else None
        start = sent = position = position + needles.longest
        if streamed is not None:
            streamed.add('"')
        while True:
            match = needles.pattern.search(run.text, position)
            if match is None:
                if run.final:
                    damaged = self.grammar._damaged.search(run.text, start)
                    if damaged is None or followers != _AFTER_VALUE:
                        raise _Failure(len(run.text))
                    self.notes["a damaged delimiter"] = None
                    return self._stripped(run.text[start : damaged.start()]), damaged.end()
                position = needles.unsettled(run.text, position)
                if streamed is not None and position > sent:
                    streamed.characters(run.text[sent:position])
                    sent = position
                yield
                continue
            position = match.end()
            after = yield from run.skip_space(position)
            if (
                after == len(run.text)
                or run.text[after] in followers
                or (followers == _AFTER_VALUE and (yield from self._ends_string(after, stream)))
            ):
                text = run.text[start : match.start()]
                if self.grammar.delimiter in text:
                    if (lost := self._lost_end(text, start, in_list)) is not None:
                        return self._stripped(run.text[start : lost[0]]), lost[1]
                    if (stripped := self._stripped(text)) != text:
                        return stripped, position
                if streamed is not None:
                    streamed.add(json.dumps(run.text[sent : match.start()], ensure_ascii=False)[1:])
                return run.text[start : match.start()], position

    def _ends_string(self, after: int, outermost: bool) -> Step[bool]:
        """Whether the text after a delimiter shows that a string ended, without a comma or a bracket."""
        if (yield from self.run.starts(after, self.grammar._closers)) is not None:
            return True
        return outermost and (yield from self._lacks_comma(after, self.name))

    def _lost_end(self, text: str, start: int, in_list: bool) -> tuple[int, int] | None:
        """Where a string really ends whose end was lost, so that it swallowed an argument or a call, and the position
        after its damaged delimiter. None if nothing was lost."""
        found = (match for match in self.grammar._swallowed.finditer(text) if in_list or match[1] is None)
        if (swallowed := next(found, None)) is None:
            return None
        damaged = self.grammar._damaged.search(text)
        if damaged is None:
            opener = self.grammar._opens.pattern.search(text)
            end = swallowed.start() if opener is None else min(swallowed.start(), opener.start())
            raise _Failure(start + end, "a string without its end")
        self.notes["a damaged delimiter"] = None
        return start + damaged.start(), start + damaged.end()

    def _stripped(self, text: str) -> str:
        """A string without delimiters at its beginning and end, which are doubled ones."""
        delimiter, stripped = self.grammar.delimiter, text
        while (bare := stripped.strip()).startswith(delimiter) or bare.endswith(delimiter):
            stripped = bare.removeprefix(delimiter).removesuffix(delimiter)
        if stripped is not text:
            self.notes["a delimiter twice"] = None
        return stripped

    def _quoted(self, position: int, followers: str) -> Step[tuple[str, int]]:
        """A string in quotes, as in JSON or Python."""
        end = yield from follow_string(self.run, position, followers, self.grammar._tags)
        if end is None:
            raise _Failure(len(self.run.text))
        try:
            literal = read_tolerant(self.run.text, position, end)
        except LiteralError as error:
            raise _Failure(end, error.reason) from None
        if literal.end != end or not isinstance(literal.value, str):
            raise _Failure(end, "a string followed by text that is not a literal")
        self.notes["quotes instead of delimiters"] = None
        return literal.value, end

    def _plain(self, position: int, key: str | None) -> Step[tuple[Any, int]]:
        """A value without delimiters, and its end. `key`: the argument's, None inside containers."""
        if self.run.text[position : position + 1] in ('"', "'"):
            return (yield from self._quoted(position, _AFTER_VALUE))
        match = yield from self.run.find_pattern(_SCALAR_END, position, 1)
        if match is None:
            raise _Failure(len(self.run.text))
        end = match.start()
        word = self.run.text[position:end].strip()
        if word in _WORDS:
            if word[0] in "TFN":
                self.notes[f"Python literal {word}"] = None
            return _WORDS[word], end
        if _NUMBER.fullmatch(word):
            return int(word), end
        member = _SCALAR_MEMBER.match(word)
        if member is not None and key is not None and self.run.tools.declares(self.name, member[2]):
            self.notes["no comma"] = None
            return json.loads(member[1]), position + len(self.run.text[position:end]) - len(
                self.run.text[position:end].lstrip()
            ) + member.start(2)
        if not word:
            raise (yield from self._failure(position, "no value"))
        try:
            literal = read_tolerant(word)
            if literal.end == len(word):
                self.notes |= dict.fromkeys(literal.notes)
                return literal.value, end
        except LiteralError:
            pass
        if key is not None and not self._may_be_text(key):
            raise _Failure(end, f"{word[:40]!r} is not a value")
        self.notes["a string without delimiters"] = None
        return word, end

    def _may_be_text(self, key: str) -> bool:
        """Whether the schema allows a string, so that 007 is not a number."""
        schema, root = self.run.tools.schema(self.name, key)
        return bool(coerce("007", {"anyOf": [schema, {"type": "integer"}]}, root) == "007")
