"""Calls as JSON objects between markers: alone, several, or in a list."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tool_call_parsers.engine import BlockGrammar, Needles, RenderCall, RenderTurn, Run, Step, cut_off
from tool_call_parsers.json_blocks.attempts import (
    FENCES,
    MANY_OPENERS,
    named_attempt,
    openers_behind,
    skip_repeated,
    too_much,
)
from tool_call_parsers.json_blocks.objects import CallObjects
from tool_call_parsers.row_checks import Syntax, check_template
from tool_call_parsers.types import CallStatus

_ENDS_OF_TEXT = (re.compile(r"(?P<end>)\s*+\Z"), re.compile(r"\s*+\](?P<end>)\s*+\Z"))
"""The end of the text after an object alone, and after the last of a list. The group `end` ends the call."""


class _Gap(NamedTuple):
    """The text after a call object."""

    end: int
    """The end of the call's tags."""
    next: int | None
    """The start of the next object in the block; None at the end of the block."""
    in_list: bool
    notes: tuple[str, ...] = ()
    """What is wrong with it."""
    before_next: tuple[str, ...] = ()
    """What is wrong with the text before the next object."""
    loose: bool = False
    """Only its place makes the next object part of the block. It may be data."""


class Block(NamedTuple):
    """The text before the first object of a block."""

    start: int
    opener: str | None
    """The opening marker; None if there is none, "" if it is before the content."""
    in_list: bool
    fence: str | None
    notes: tuple[str, ...]
    """What is wrong with it."""


@dataclass(frozen=True)
class JsonBlocks(CallObjects):
    """Calls as JSON objects after an opening marker: one, several, or a list of them."""

    opens: tuple[str, ...]
    """Spellings of the opening marker, the canonical one first."""
    closes: tuple[str, ...] = ()
    """Spellings of the closing marker. Without any, the end of the JSON ends the block."""
    separators: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    """The text before and after the JSON of a block, markers included."""
    between: str = "\n"
    """The text between two blocks, or two objects of a list."""
    in_list: bool = False
    """All calls of a turn are in one list in one block. `frame` includes its brackets. With `named`, both are right."""
    together: bool = False
    """All calls of a turn are in one block, one after another, without a list."""
    written: str = '{"name": %(name)s, "arguments": %(arguments)s}'
    """The text of a call: `%(name)s`, `%(arguments)s`, `%(id)s`, `%(index)d`."""
    name_key: str = "name"
    """The key of the name."""
    argument_keys: tuple[str, ...] = ("arguments",)
    """Keys of the arguments, the canonical one first."""
    id_key: str | None = None
    """The key of the call's id."""
    single_key: bool = False
    """A call is an object with one member: the name is the key, the arguments are the value."""
    bare: bool = False
    """The marker may be missing if only whitespace, reasoning or other calls precede."""
    bare_offered: bool = False
    """Without the marker, only offered tools are called, at the beginning of any line, since data looks like calls."""
    drops: tuple[str, ...] = ()
    around_content: tuple[str, str] = ("", "")
    """The text around content."""
    compact: bool = False
    """JSON is written without blanks."""
    named: BlockGrammar | None = None
    """Calls with the name in a header (`NamedJson`), after the same marker or after other markers."""
    writes_named: bool = False
    """Calls are written as `named` writes them."""
    instead: str = ""
    """The defect of every call, if the format does not write JSON."""
    stops: bool = False
    """The closing marker ends the turn, so servers strip it at the end of the text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self, "written", Syntax.PERCENT, ("name", "arguments"), ("id", "index"))

    @cached_property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        named = self.named.openers if self.named is not None else ()
        return (*self.opens, *named, *(("{", "[", "```") if self.bare else ()))

    closers = cached_property(lambda self: (*self.closes, *(self.named.closers if self.named is not None else ())))

    @cached_property
    def _usual_ends(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The only spelling of the closing marker, once, after an object alone and after the last of a list."""
        closer = re.escape(self.closes[0]) if len(self.closes) == 1 else "(?!)"
        end = rf"(?P<end>\s*+{closer})(?!\s*+{closer})"
        return re.compile(end), re.compile(rf"\s*+\]{end}")

    _bracketed = cached_property(lambda self: any(opener.startswith("[") for opener in self.opens))
    _open = cached_property(lambda self: Needles(*self.opens))
    _close = cached_property(lambda self: Needles(*self.closes))
    _behind = cached_property(lambda self: openers_behind(self.closes, self.opens))
    _repeated = cached_property(lambda self: Needles(*self.closes, *self._behind))
    _marks = cached_property(lambda self: self.named.marks if self.named is not None else ())
    _named_marks = cached_property(lambda self: Needles(*(self.named.marks if self.named is not None else ())))

    # -- reading ------------------------------------------------------------------------------------------------------

    def may_open(self, run: Run, start: int, opener: str) -> bool:
        if opener in self.opens or (self.named is not None and opener in self.named.openers):
            return True
        return self._may_be_bare(run, start)

    def _may_be_bare(self, run: Run, start: int) -> bool:
        """Whether a call without a marker may begin at `start`."""
        return self.bare and (run.begins_answer(start) or (self.bare_offered and run.text[start - 1] == "\n"))

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        bare = opener not in self.opens
        if bare and self.named is not None and opener in self.named.openers:
            return (yield from self.named.block(run, start, body, opener))
        if not self.may_open(run, start, opener):
            return None
        if bare and too_much(run, start):
            return None
        notes: tuple[str, ...] = (self.instead,) if self.instead else ()
        position = yield from run.skip_space(start if bare else body)
        fence: str | None = None
        if not run.text.startswith(("{", "["), position) or (
            self._bracketed and (not run.final or run.text.startswith(self.opens, position))
        ):
            if not bare:
                position, again = yield from skip_repeated(run, position, self._open, MANY_OPENERS)
                position = yield from run.skip_space(position)
                notes = (*notes, "the opening marker twice") if again else notes
            fence = yield from run.starts(position, FENCES)
            if fence is not None:
                position = yield from run.skip_space(position + len(fence))
                notes = (*notes, "a code fence")
        if position == len(run.text):
            return None if bare else cut_off(run, start, self.separators)
        in_list = run.text[position] == "["
        if in_list:
            position = yield from run.skip_space(position + 1)
        if in_list is not self.in_list:
            notes = (*notes, "no list" if self.in_list else "a list")
        block = Block(start, None if bare else opener, in_list, fence, notes)
        if not run.text.startswith("{", position):
            if in_list and not bare:
                if self.named is not None and (yield from run.starts(position - 1, self._named_marks)) is not None:
                    return (yield from self.named.block(run, start, body, opener))
                if position == len(run.text):
                    return cut_off(run, start, self.separators)
                if run.text[position] == "]":
                    run.begin_block(start, self.separators)
                    gap = yield from self._gap(run, position, in_list, block)
                    run.skip(gap.end)
                    return gap.end
            elif not in_list and not bare and self.named is not None and opener in self.named.openers:
                return (yield from self.named.block(run, start, body, opener))
            return None if bare else (yield from named_attempt(run, start, position, self._ends, self.closes))
        return (yield from self._calls(run, position, block))

    def _calls(self, run: Run, position: int | None, block: Block) -> Step[int | None]:
        begin = end = block.start
        begun, in_list, bare, before = False, block.in_list, block.opener is None, block.notes
        while position is not None:
            # Another call, or an attempt at one, follows a call of the same list.
            call = yield from self._object(run, position, bare and not (begun and in_list), None if begun else begin)
            if call is None:
                return end if begun else None
            if not begun:
                run.begin_block(block.start, self.separators)
                begun = True
            gap = yield from self._gap(run, call.end, in_list, block)
            status, error = call.status, call.error
            if status in (CallStatus.OK, CallStatus.REPAIRED) and (notes := (*before, *gap.notes)):
                status, error = CallStatus.REPAIRED, "; ".join(filter(None, (error, *dict.fromkeys(notes))))
            run.end_call(
                begin, gap.end, status, call.name, call.arguments, call.raw, error=error, native_id=call.native_id
            )
            begin = end = gap.end
            position, in_list, bare = gap.next, gap.in_list, bare or gap.loose
            before = (*block.notes, *gap.before_next)
        return end

    def _gap(self, run: Run, position: int, in_list: bool, block: Block) -> Step[_Gap]:
        """Read the text after a call: brackets, separators, the closing marker, or the next call."""
        if run.final and block.fence is None:
            usual = self._usual_ends if block.opener and self.closes else _ENDS_OF_TEXT
            match = usual[in_list].match(run.text, position)
            if match is not None:
                return _Gap(match.end("end"), None, False)
        end, separator, listed, closing_fence = position, "", in_list, block.fence is None
        notes: list[str] = []
        one_call = bool(block.opener and (self.closes or self.frame[0]))
        while True:
            position = yield from run.skip_space(position)
            character = run.text[position : position + 1]
            if character == "{" or (character == "[" and not in_list):
                loose = not separator and not in_list and not self.closes
                if loose and (character == "[" or listed):
                    break
                before = self._between_objects(separator, in_list, one_call)
                if character == "[":
                    in_list, before = True, (*before, "another list")
                    position = yield from run.skip_space(position + 1)
                    if not run.text.startswith("{", position):
                        break
                if not in_list and one_call:
                    notes += before  # the block is wrong, not only the next call
                return _Gap(end, position, in_list, tuple(notes), before, loose)
            if character and character in ",;" and not separator:
                separator = character
                position += 1
                continue
            if character == "]" and in_list:
                in_list = False
                if separator:
                    notes.append("trailing comma")
            elif character and character in "}]" and not separator:
                notes.append(f"one {character!r} too many")
            elif character == "`" and block.fence is not None and (yield from run.starts(position, FENCES)) == "```":
                position += 2
                closing_fence = True
            else:
                closer = yield from run.starts(position, self._close)
                if in_list:
                    notes.append("no closing bracket")
                if closer is not None:
                    end = position + len(closer)
                    if not run.final or end < len(run.text):
                        end, again = yield from skip_repeated(run, end, self._repeated, others=self._behind)
                        if again:
                            notes.append("the closing marker twice")
                notes += self._closing_notes(run, block.opener, closer, position)
                break
            position += 1
            end, separator = position, ""
        if not closing_fence:
            notes.append("the code fence is open")
        return _Gap(end, None, in_list, tuple(notes))

    def _between_objects(self, separator: str, in_list: bool, one_call: bool) -> tuple[str, ...]:
        """What is wrong with the separator before another object."""
        if in_list:
            return () if separator == "," else (f"{separator!r} between calls",) if separator else ("no comma",)
        if one_call and not self.together:
            return ("several calls in one block",)
        return () if separator == self.between.strip() else (f"{separator!r} between calls",)

    def _closing_notes(self, run: Run, opener: str | None, closer: str | None, position: int) -> tuple[str, ...]:
        """What is wrong with the closing marker at `position`, or with its absence."""
        if not self.closes:
            return ()
        if not opener:
            return ("no opening marker",) if closer is not None else ()
        wanted = (
            dict(zip(self.opens, self.closes, strict=False)).get(opener) if len(self.closes) > 1 else self.closes[0]
        )
        if closer == wanted or wanted is None:
            return ()
        if closer is not None:
            return (f"{opener} is closed by {closer}",)
        return () if self.stops and position == len(run.text) else ("no closing marker",)

    # -- writing ------------------------------------------------------------------------------------------------------

    def render_calls(self, turn: RenderTurn) -> str:
        if self.writes_named and self.named is not None:
            return self.named.render_calls(turn)
        objects = [self._render_object(call) for call in turn.calls]
        before, after = self.frame
        if self.in_list or self.together:
            return before + self.between.join(objects) + after
        return self.between.join(before + text + after for text in objects)

    def _render_object(self, call: RenderCall) -> str:
        name, arguments = json.dumps(call.name, ensure_ascii=False), call.json_text
        if self.compact:
            arguments = json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))
        return self.written % {"name": name, "arguments": arguments, "id": json.dumps(call.id), "index": call.index}

    def render(self, turn: RenderTurn) -> str:
        if turn.content and any(self.around_content):
            before, after = self.around_content
            turn = replace(turn, content=before + turn.content + after)
        return super().render(turn)
