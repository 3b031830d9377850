"""Calls as JSON objects between markers: alone, several, or in a list."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tool_call_parsers.engine import Needles, RenderCall, RenderTurn, Run, Step, cut_off
from tool_call_parsers.json_blocks.named import FENCES, NamedJson
from tool_call_parsers.json_blocks.objects import CallObjects
from tool_call_parsers.row_checks import Syntax, check_template
from tool_call_parsers.types import CallStatus

_STRAY, _STRAY_RATIO = 4096, 4
"""How many characters may be read in vain, in all and per character, before bare objects are ignored."""


class _Gap(NamedTuple):
    """The text after a call object."""

    end: int
    """The end of the call's tags."""
    next: int | None
    """The start of the next object in the block; None at the end of the block."""
    in_list: bool
    surplus: str | None
    """The surplus bracket, in words."""
    loose: bool = False
    """Only its place makes the next object part of the block. It may be data."""
    closed: bool = False


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
    """All calls of a turn are in one list in one block. `frame` includes its brackets."""
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
    named: NamedJson | None = None
    """Calls with the name in a header, after the same marker or after other markers."""
    writes_named: bool = False
    """Calls are written as `named` writes them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self, "written", Syntax.PERCENT, ("name", "arguments"), ("id", "index"))

    @cached_property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        named = self.named.openers if self.named is not None else ()
        return (*self.opens, *named, *(("{", "[", "```") if self.bare else ()))

    closers = cached_property(lambda self: (*self.closes, *(self.named.closers if self.named is not None else ())))
    _close = cached_property(lambda self: Needles(*self.closes))
    _named_marks = cached_property(lambda self: Needles(*(self.named.marks if self.named is not None else ())))

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
        fence: str | None = yield from run.starts(position, FENCES)
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
            # Another call, or an attempt at one, follows a call of the same list.
            call = yield from self._object(run, position, bare and not (begun and in_list), None if begun else begin)
            if call is None:
                return end if begun else None
            if not begun:
                run.begin_block(start, self.separators)
                begun = True
            gap = yield from self._gap(run, call.end, in_list, fence)
            if gap.next is None and not (gap.closed or gap.surplus or bare) and "</tool_call>" in self.closes:
                gap = gap._replace(surplus="no </tool_call> follows")
            run.end_call(
                begin,
                gap.end,
                CallStatus.REPAIRED if gap.surplus and call.status is CallStatus.OK else call.status,
                call.name,
                call.arguments,
                call.raw,
                error="; ".join(filter(None, (call.error, gap.surplus))) or None,
                native_id=call.native_id,
            )
            begin = end = gap.end
            position, in_list, bare = gap.next, gap.in_list, bare or gap.loose
        return end

    def _gap(self, run: Run, position: int, in_list: bool, fence: str | None) -> Step[_Gap]:
        """Read the text after a call: brackets, separators, the closing marker, or the next call."""
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
            elif character == "`" and fence is not None and (yield from run.starts(position, FENCES)) == "```":
                position += 2
            else:
                closer = yield from run.starts(position, self._close)
                if closer is not None:
                    return _Gap(position + len(closer), None, in_list, surplus, closed=True)
                break
            position += 1
            end, separator = position, False
        return _Gap(end, None, in_list, surplus)

    # -- writing ------------------------------------------------------------------------------------------------------

    def render_calls(self, turn: RenderTurn) -> str:
        if self.writes_named and self.named is not None:
            return self.named.render_calls(turn)
        objects = [self._render_object(call) for call in turn.calls]
        before, after = self.frame
        if self.in_list:
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
