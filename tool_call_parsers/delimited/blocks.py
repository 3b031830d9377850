"""The blocks of calls: their markers, names and brackets, and how they are written."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tool_call_parsers.arguments import ArgumentsText, plain_name
from tool_call_parsers.delimited.reader import CLOSING, MAX_HEAD, NO_CLOSING, PLAIN_KEY, DelimitedReader, Failure, Marks
from tool_call_parsers.engine import BlockGrammar, RenderTurn, Run, Step, cut_off
from tool_call_parsers.json_blocks.attempts import MANY_OPENERS, skip_repeated
from tool_call_parsers.types import CallStatus

_NAME = r"[^\W\d][\w-]*+(?>(?:[.:/][\w-]++)*)"
_HEAD = re.compile(rf"(call[ \t]{{0,4}}:[ \t]{{0,4}}|:?[ \t]{{0,4}})({_NAME})([{{(])")
_HEAD_CUT = re.compile(rf"(?:(?:call[ \t]{{0,4}}:|:)?[ \t]{{0,4}}(?:{_NAME}[.:/]?)?|call[ \t]{{1,4}})\Z")
_NO_BRACKETS = re.compile(rf"call[ \t]{{0,4}}:[ \t]{{0,4}}({_NAME})?")
_BEGINS = re.compile(r"""[\w$@<"'})-]""")
_SEPARATORS = ":./"
"""Characters between the namespaces before a name."""


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

    _marks = cached_property(lambda self: Marks(self.openers, self.closers, self.delimiter))
    _opens = cached_property(lambda self: self._marks.opens)
    _tags = cached_property(lambda self: self._marks.tags)
    _closers = cached_property(lambda self: self._marks.closes)

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        position = yield from run.skip_space(body)
        twice = False
        if run.text.startswith("<", position):
            position, twice = yield from skip_repeated(run, position, self._opens, MANY_OPENERS)
            position = yield from run.skip_space(position)
        if position == len(run.text):
            return cut_off(run, start, self.separators)
        while (head := _HEAD.match(run.text, position)) is None:
            if len(run.text) - position > MAX_HEAD or not _HEAD_CUT.match(run.text, position):
                return (yield from self._without_arguments(run, start, position))
            if run.final:
                return cut_off(run, start, self.separators)
            yield
        first = yield from run.skip_space(head.end())
        if head.end() - position > MAX_HEAD or (first < len(run.text) and not _BEGINS.match(run.text, first)):
            return None
        run.begin_block(start, self.separators)
        name, bracket = head[2], head[3]
        plain = plain_name(name, run.tools, _SEPARATORS)
        if plain is None and (glued := name.removeprefix("call")) in run.tools.names():
            plain = glued if name not in run.tools.names() else None
        run.start_call(plain or name)
        reader = DelimitedReader(self._marks, run, name, ArgumentsText(run, run.streams))
        if head[1] != "call:" or bracket != "{":
            reader.notes["not written as call:name{...}"] = None
        if plain is not None:
            reader.notes[f"the name is written {name!r}"] = None
            name = reader.name = plain
        if twice:
            reader.notes["the opening marker twice"] = None
        try:
            position = yield from reader.read(head.end(), CLOSING[bracket])
        except Failure as failure:
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
        raw = run.text[head.end() : position - (NO_CLOSING not in reader.notes)]
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
        if match is None or match.end() - position > MAX_HEAD:
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
        return key if PLAIN_KEY.fullmatch(key) else self._write(key)
