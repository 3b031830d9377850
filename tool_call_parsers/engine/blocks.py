"""Free text with blocks of tags in it, and reasoning before or between them. Most formats are of this kind."""

from __future__ import annotations

import itertools
import re

from tool_call_parsers.engine.grammar import RenderTurn
from tool_call_parsers.engine.run import Run
from tool_call_parsers.engine.text import Marker, Markers, Needles, Step
from tool_call_parsers.reasoning import ReasoningFormat
from tool_call_parsers.row_checks import check_types
from tool_call_parsers.types import CallStatus


class BlockGrammar:
    """The loop over free text. A subclass defines the block."""

    openers: tuple[str, ...]
    """Markers that may begin a block."""
    closers: tuple[str, ...]
    """Markers that end one."""
    separators: tuple[str, ...]
    """Whitespace that the model's template puts before a block, the longest first."""
    drops: tuple[str, ...] = ()
    """Markers around free text that are removed."""
    separates: bool = False
    """The first separator precedes the calls even without content. If the reasoning ends with the same framing, it is
    written once."""
    trail: str = ""
    """Whitespace after the calls."""
    marks: tuple[str, ...] = ()
    """Markers inside a block."""

    def __post_init__(self) -> None:
        check_types(self)

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        """Read the block whose opener spans `start:body`. Return its end, or None if the opener is only text.

        Calls `run.begin_block(start, ...)` before any other change, and ends with `run.end_call` or `run.skip`.
        """
        raise NotImplementedError

    def may_open(self, run: Run, start: int, opener: str) -> bool:
        """Whether the opener at `start` may begin a block there, judging by the text before it."""
        return True

    def render_calls(self, turn: RenderTurn) -> str:
        """All calls of the turn, without the separator from the content."""
        raise NotImplementedError

    def render(self, turn: RenderTurn) -> str:
        """Reasoning, content, calls, in this order."""
        separator = self.separators[0] if turn.calls and self.separators and (turn.content or self.separates) else ""
        parts: list[str] = []
        if turn.reasoning is not None and turn.shape is not None:
            shape = turn.shape
            parts.append(shape.before)
            if turn.reasoning or shape.empty is None:
                parts += (shape.opens[0], shape.inside[0], turn.reasoning, shape.inside[1], shape.closes[0])
                parts.append("" if separator == shape.after and not turn.content else shape.after)
            else:
                parts.append(shape.empty)
        parts.append(turn.content)
        if turn.calls:
            parts += (separator, self.render_calls(turn), self.trail)
        return "".join(parts)

    def markers(self, reasoning: ReasoningFormat, ends: tuple[str, ...]) -> Markers:
        """The markers of free text."""
        ends = tuple(end for end in ends if end not in reasoning.closes)
        kinds = {
            **dict.fromkeys(ends, Marker.END),
            **dict.fromkeys((*self.drops, *itertools.chain(*(reasoning.answer or ()))), Marker.DROP),
            **dict.fromkeys(self.closers, Marker.CLOSE),
            **dict.fromkeys(reasoning.opens, Marker.THINK),
            **dict.fromkeys(self.openers, Marker.OPEN),
        }
        return Markers(
            kinds,
            Needles(*kinds),
            Needles(*reasoning.opens),
            Needles(*reasoning.closes),
            Needles(*reasoning.closes, *self.openers, *ends),
        )

    def read(self, run: Run) -> Step[None]:
        """The loop over free text."""
        markers = run.markers
        position = 0
        if run.opened and run.reasoning_format is not None:
            position = yield from self._opened(run)
        elif run.reasoning_format is not None and run.reasoning_format.closes_alone:
            position = yield from self._closed_alone(run, run.reasoning_format)
        while (match := (yield from run.find(markers.all, position, run.flow))) is not None:
            start, position = match.span()
            kind = markers.kinds[match.group()]
            if kind is Marker.OPEN:
                if not self.may_open(run, start, match.group()):
                    continue
                end = yield from self.block(run, start, position, match.group())
                if end is None:
                    run.dangle(start)
                else:
                    position = end
            elif kind is Marker.CLOSE:
                run.close(start, position)
            elif kind is Marker.THINK:
                if run.reasoning_format is not None and run.follows_markup(start):
                    position = yield from self._reasoning(run, start, position)
            elif kind is Marker.DROP:
                if match.group() in self.drops:
                    run.take(start)
                    run.skip(position)
                elif run.reads_reasoning:
                    position = yield from self._answer(run, start, position, match.group())
            else:
                position = yield from self._end_of_turn(run, start, position)
        run.drop_cut(self.closers)
        run.finish()

    def _opened(self, run: Run) -> Step[int]:
        """Reasoning that the prompt opened. A model that opens it again means the same block."""
        start = yield from run.skip_space(0)
        opener = yield from run.starts(start, run.markers.think_open)
        return (yield from self._reasoning(run, 0, start + len(opener) if opener else 0))

    def _closed_alone(self, run: Run, shape: ReasoningFormat) -> Step[int]:
        """Drop a closing marker at the beginning of the text, with no reasoning before it."""
        start = yield from run.skip_space(0)
        if (yield from run.starts(start, run.markers.think_close)) != shape.closes[0]:
            return 0
        run.begin_block(start)
        end = yield from self._framing(run, start + len(shape.closes[0]), shape.after)
        run.skip(end)
        return end

    def _reasoning(self, run: Run, start: int, body: int) -> Step[int]:
        """Read reasoning from `body` on, with its opener at `start:body`. Return the position after it.

        The first closing marker ends it, and calls drafted before are not calls. Without one, the first block that is a
        call ends it, because models forget to close.
        """
        shape, markers = run.reasoning_format, run.markers
        assert shape is not None
        if run.reads_reasoning:
            run.begin_block(start)
            run.skip(body)
            body = yield from self._framing(run, body, shape.inside[0])
            run.skip(body)
            run.in_reasoning, run.reasoning_complete = True, False
        match = yield from self._think_marker(run, body)
        first = match
        if match is not None and match.group() not in shape.closes:
            match = None if run.never_closed else (yield from run.find(markers.think_close, match.end()))
        if match is None:
            run.never_closed = True
            if first is not None:
                return first.start()
            run.finish()
            return len(run.text)
        if first is not match and first is not None:
            run.drafts(self.read, first.start(), match.start())
        end = match.end()
        if run.reads_reasoning:
            text = run.text[run.taken : match.start()]
            run.put(text.removesuffix(shape.inside[1]) if shape.inside[1] else text)
            run.to_content()
            end = yield from self._framing(run, end, shape.after)
            run.skip(end)
        return end

    def _think_marker(self, run: Run, position: int) -> Step[re.Match[str] | None]:
        """The first marker that ends free reasoning; None if the text ends first."""
        while (match := (yield from run.find(run.markers.think, position, run.flow))) is not None:
            kind = run.markers.kinds.get(match.group())
            if kind is Marker.END:
                position = yield from self._end_of_turn(run, *match.span())
            elif kind is Marker.OPEN and not self.may_open(run, match.start(), match.group()):
                position = match.end()
            else:
                return match
        return None

    def _answer(self, run: Run, start: int, end: int, marker: str) -> Step[int]:
        """Read a marker of the wrapper around the answer at `start:end`. Return the position after it.

        The wrapper begins where the answer does, and ends before a block or the end of the text. Elsewhere its markers
        are text.
        """
        shape = run.reasoning_format
        assert shape is not None and shape.answer is not None
        if marker in shape.answer[0]:
            if "answer" not in run.hints and run.follows_markup(start):
                run.hints.add("answer")
                end = yield from self._framing(run, end, shape.answer_inside[0])
                run.skip(end)
        elif "answer" in run.hints:
            position = yield from run.skip_space(end)
            following = yield from run.starts(position, run.markers.all)
            if position == len(run.text) or (following is not None and following not in shape.answer[1]):
                run.hints.remove("answer")
                before = shape.answer_inside[1]
                run.take(start - len(before) if run.text.endswith(before, run.taken, start) else start)
                run.skip(end)
        return end

    def _framing(self, run: Run, position: int, framing: str) -> Step[int]:
        """The position after as much of `framing` as is at `position`."""
        for character in framing:
            if not (yield from run.more(position + 1)) or run.text[position] != character:
                break
            position += 1
        return position

    def _end_of_turn(self, run: Run, start: int, end: int) -> Step[int]:
        """An end-of-turn marker ends the text. If more text follows, the model wrote about the marker."""
        position = end
        while (position := (yield from run.skip_space(position))) < len(run.text):
            following = yield from run.starts(position, run.markers.all)
            if following is None or run.markers.kinds[following] is not Marker.END:
                return position  # so the markers before it are in the middle of the text, too
            position += len(following)
        if not run.follows_markup(start):
            run.take(start)
        run.skip(position)
        return position


def cut_off(run: Run, start: int, separators: tuple[str, ...]) -> int:
    """The text ends after an opening marker at `start`: an attempt without a name."""
    run.begin_block(start, separators)
    end = len(run.text)
    run.end_call(start, end, CallStatus.INCOMPLETE, error="the text ends after the opening marker")
    return end
