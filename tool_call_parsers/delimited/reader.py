"""Reads the arguments of one call."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from tool_call_parsers.arguments import ArgumentsText
from tool_call_parsers.engine import Needles, Run, Step
from tool_call_parsers.json_blocks.attempts import too_much
from tool_call_parsers.literals.literal import MAX_DEPTH, LiteralError
from tool_call_parsers.literals.strict import REPEATED_KEY
from tool_call_parsers.literals.tolerant import read_tolerant
from tool_call_parsers.python_scan import follow_string
from tool_call_parsers.schema.values import coerce

MAX_HEAD = 256
_KEY = re.compile(r"""([^:=,{}\[\]()<>"'\r\n]{1,128}?)\s{0,8}([:=])""")
_KEY_CUT = re.compile(r"""[^:=,{}\[\]()<>"'\r\n]{0,128}\s{0,8}\Z""")
PLAIN_KEY = re.compile(r"""[\w$@-](?:[^:=,{}\[\]()<>"'\r\n]{0,126}[^:=,{}\[\]()<>"'\s])?""")
_SCALAR_END = re.compile(r"[,}\])<]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_MEMBER = re.compile(r"([\w$@-]{1,64})\s{0,8}:\s{0,8}[^\s]")
_SCALAR_MEMBER = re.compile(r"(-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?|true|false|null)\s+([\w$@-]{1,64})\s{0,8}:")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
NO_CLOSING = "no closing bracket"
CLOSING = {"{": "}", "[": "]", "(": ")"}
_AFTER_VALUE, _AFTER_KEY = ",}])", ":="


class Failure(Exception):
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
class Marks:
    """The markers of a row, prepared for the search."""

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    delimiter: str

    opens = cached_property(lambda self: Needles(*self.openers))
    tags = cached_property(lambda self: Needles(*self.openers, *self.closers))
    closes = cached_property(lambda self: Needles(*self.closers))
    expected = cached_property(lambda self: Needles(self.delimiter, *self.closers))
    quote = cached_property(lambda self: Needles(self.delimiter))

    @cached_property
    def damaged(self) -> re.Pattern[str]:
        """A delimiter without one of its characters, or another marker in its place, where a string may end."""
        mark = self.delimiter
        spelled = {mark[:index] + mark[index + 1 :] for index in range(len(mark))}
        spelled |= {mark.replace("<", "</"), mark.replace("|", ""), *self.openers, *self.closers} - {mark}
        either = "|".join(map(re.escape, sorted(spelled, key=len, reverse=True)))
        following = rf",\s{{0,8}}(?:[\w$@\-]{{1,64}}\s{{0,8}}:|{re.escape(mark)})|[}}\])]"
        return re.compile(rf"(?:<\s)?(?:{either})\s{{0,8}}(?={following})")

    twice = cached_property(lambda self: re.compile(rf"{re.escape(self.delimiter)}\s*{re.escape(self.delimiter)}"))

    @cached_property
    def swallowed(self) -> re.Pattern[str]:
        """Text that no string holds: the next argument with a string, or in a list the next string."""
        mark = re.escape(self.delimiter)
        return re.compile(rf"[,{{]\s*[\w$@\-]{{1,64}}\s*:\s*{mark}|(,\s*{mark})")


@dataclass(slots=True)
class DelimitedReader:
    """Reads the arguments of one call, and streams them."""

    marks: Marks
    run: Run
    name: str
    streamed: ArgumentsText
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def _failure(self, position: int, reason: str) -> Step[Failure]:
        """The exception for unexpected text at `position`. Half a marker at the end of the text may be expected."""
        run, marks = self.run, self.marks.expected
        cut = (yield from run.starts(position, marks)) is None and run.final
        cut = cut and (position == len(run.text) or marks.begins(run.text, position))
        return Failure(position, None if cut else reason)

    def read(self, position: int, closing: str) -> Step[int]:
        """Read from after the opening bracket to after its closing bracket. Raises `Failure`."""
        run, delimiter = self.run, self.marks.delimiter
        stack: list[_Frame] = []
        container: Any = self.arguments
        key, comma = "", False
        while True:
            if not run.text[position : position + 1].strip():  # nothing yet, or a blank
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
                    if not run.text[position : position + 1].strip():  # nothing yet, or a blank
                        position = yield from run.skip_space(position)
                    char = run.text[position : position + 1]
                    if not stack:
                        self.streamed.member(key)
                if char == "{" or char == "[":
                    if len(stack) + 2 > MAX_DEPTH:
                        raise (yield from self._failure(position, "nested too deeply"))
                    stack.append(_Frame(container, closing, key))
                    container, closing = {} if char == "{" else [], CLOSING[char]
                    position, comma = position + 1, False
                    continue
                if char == delimiter[0] and (yield from run.starts(position, self.marks.quote)):
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
            if not run.text[position : position + 1].strip():  # nothing yet, or a blank
                position = yield from run.skip_space(position)
            comma = run.text.startswith(",", position)
            if comma:
                position += 1
            elif not run.text.startswith(closing, position):
                if not stack and (yield from run.starts(position, self.marks.closes)) is not None:
                    self.notes[NO_CLOSING] = None
                    return position
                if closing != "]" and (yield from self._lacks_comma(position, None if stack else self.name)):
                    self.notes["no comma"] = None
                    continue
                raise (yield from self._failure(position, f"neither ',' nor {closing!r}"))

    def _lacks_comma(self, position: int, tool: str | None) -> Step[bool]:
        """Whether the next member is at `position`. The first argument of another is told from data by the schema of
        the `tool`."""
        yield from self.run.more(position + MAX_HEAD)
        match = _MEMBER.match(self.run.text, position, position + MAX_HEAD)
        return match is not None and (tool is None or self.run.tools.declares(tool, match[1]) is True)

    def _key(self, position: int) -> Step[tuple[str, int]]:
        """The key at `position`, and the position after its separator."""
        run = self.run
        char = run.text[position : position + 1]
        if char == self.marks.delimiter[0] and (yield from run.starts(position, self.marks.quote)):
            key, position = yield from self._string(position, _AFTER_KEY, False)
            if PLAIN_KEY.fullmatch(key):
                self.notes["a key between delimiters"] = None
        elif char and char in "\"'":
            key, position = yield from self._quoted(position, _AFTER_KEY)
        else:
            while (match := _KEY.match(run.text, position)) is None:
                if not _KEY_CUT.match(run.text, position):
                    raise (yield from self._failure(position, "no key"))
                if run.final:
                    raise Failure(len(run.text))
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
        run, needles = self.run, self.marks.quote
        streamed = self.streamed if stream and self.streamed.active else None
        start = sent = position = position + needles.longest
        if streamed is not None:
            streamed.add('"')
        while True:
            match = needles.pattern.search(run.text, position)
            if match is None:
                if run.final:
                    damaged = self.marks.damaged.search(run.text, start)
                    if damaged is None or followers != _AFTER_VALUE:
                        raise Failure(len(run.text))
                    self.notes["a damaged delimiter"] = None
                    return self._stripped(run.text[start : damaged.start()]), damaged.end()
                position = needles.unsettled(run.text, position)
                if streamed is not None and position > sent:
                    streamed.characters(run.text[sent:position])
                    sent = position
                yield
                continue
            position = after = match.end()
            if not run.text[position : position + 1].strip():
                after = yield from run.skip_space(position)
            if (
                after == len(run.text)
                or run.text[after] in followers
                or (followers == _AFTER_VALUE and (yield from self._ends_string(after, stream)))
            ):
                text = run.text[start : match.start()]
                if followers == _AFTER_VALUE and self.marks.delimiter in text:
                    if in_list and (twice := self.marks.twice.search(text)) is not None:
                        raise Failure(start + twice.start(), "no comma between two strings")
                    if (lost := self._lost_end(text, start, in_list)) is not None:
                        return self._stripped(run.text[start : lost[0]]), lost[1]
                    if (stripped := self._stripped(text)) != text:
                        return stripped, position
                if streamed is not None:
                    streamed.add(json.dumps(run.text[sent : match.start()], ensure_ascii=False)[1:])
                return run.text[start : match.start()], position

    def _ends_string(self, after: int, outermost: bool) -> Step[bool]:
        """Whether the text after a delimiter shows that a string ended, without a comma or a bracket."""
        if (yield from self.run.starts(after, self.marks.closes)) is not None:
            return True
        return outermost and (yield from self._lacks_comma(after, self.name))

    def _lost_end(self, text: str, start: int, in_list: bool) -> tuple[int, int] | None:
        """Where a string really ends whose end was lost, so that it swallowed an argument or a call, and the position
        after its damaged delimiter. None if nothing was lost."""
        found = (match for match in self.marks.swallowed.finditer(text) if in_list or match[1] is None)
        if (swallowed := next(found, None)) is None:
            return None
        damaged = self.marks.damaged.search(text)
        if damaged is None:
            opener = self.marks.opens.pattern.search(text)
            end = swallowed.start() if opener is None else min(swallowed.start(), opener.start())
            if too_much(self.run, start):
                end = len(text)
            self.run.strayed += len(text)
            raise Failure(start + end, "a string without its end")
        self.notes["a damaged delimiter"] = None
        return start + damaged.start(), start + damaged.end()

    def _stripped(self, text: str) -> str:
        """A string without delimiters at its beginning and end, which are doubled ones."""
        delimiter, stripped = self.marks.delimiter, text
        while (bare := stripped.strip()).startswith(delimiter) or bare.endswith(delimiter):
            stripped = bare.removeprefix(delimiter).removesuffix(delimiter)
        if stripped is not text:
            self.notes["a delimiter twice"] = None
        return stripped

    def _quoted(self, position: int, followers: str) -> Step[tuple[str, int]]:
        """A string in quotes, as in JSON or Python."""
        end = yield from follow_string(self.run, position, followers, self.marks.tags)
        if end is None:
            raise Failure(len(self.run.text))
        try:
            literal = read_tolerant(self.run.text, position, end)
        except LiteralError as error:
            raise Failure(end, error.reason) from None
        if literal.end != end or not isinstance(literal.value, str):
            raise Failure(end, "a string followed by text that is not a literal")
        self.notes["quotes instead of delimiters"] = None
        return literal.value, end

    def _plain(self, position: int, key: str | None) -> Step[tuple[Any, int]]:
        """A value without delimiters, and its end. `key`: the argument's, None inside containers."""
        if self.run.text[position : position + 1] in ('"', "'"):
            return (yield from self._quoted(position, _AFTER_VALUE))
        match = yield from self.run.find_pattern(_SCALAR_END, position, 1)
        if match is None:
            raise Failure(len(self.run.text))
        end = match.start()
        word = self.run.text[position:end].strip()
        if word in _WORDS:
            if word[0] in "TF":  # the templates write None
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
            raise Failure(end, f"{word[:40]!r} is not a value")
        self.notes["a string without delimiters"] = None
        return word, end

    def _may_be_text(self, key: str) -> bool:
        """Whether the schema allows a string, so that 007 is not a number."""
        schema, root = self.run.tools.schema(self.name, key)
        return bool(coerce("007", {"anyOf": [schema, {"type": "integer"}]}, root) == "007")
