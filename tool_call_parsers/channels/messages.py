"""The loop over the messages of a turn: their headers, ends and kinds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import cast

from tool_call_parsers.engine import SPACE, Marker, Markers, Needles, RenderTurn, Run, Step
from tool_call_parsers.reasoning import ReasoningFormat
from tool_call_parsers.row_checks import check_types
from tool_call_parsers.types import CallStatus

_LOOK_BACK = 48
_DAMAGED_MARKER = re.compile(r"(?:<\|?\w+\|?|\|\w+\|>|<\w+>)\s*\Z")
JOINT = "\n"
"""Between the texts of two messages of one kind."""
HEADER_WIDTH = 512
"""The maximum length of a header. Longer text is not a header."""


class Channel(Enum):
    """The kind of a message."""

    REASONING = 1
    PREAMBLE = 2
    """Content that calls may follow."""
    ANSWER = 3
    """Content that ends the turn. Servers strip its end marker, so a header inside it must be a quotation."""
    CALL = 4
    NONE = 5
    """A header without text."""


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """The header of a message: `text[start:end]`."""

    start: int
    end: int
    channel: Channel
    name: str = ""
    """The tool, if the header names it."""
    error: str | None = None
    """What was repaired in it."""
    cut: bool = False
    """The text ends inside it."""


@dataclass(frozen=True, slots=True)
class ChannelMarkers(Markers):
    """The markers by the channel in which they may occur. None is the text between messages, or before any header."""

    inside: dict[Channel | None, Needles]
    closers: frozenset[str]
    """The end markers of messages, without those of the turn."""
    ending: Needles
    """All end markers."""
    free: Needles
    """The markers between messages."""


class ChannelGrammar:
    """The loop over messages. A subclass reads headers and calls, and defines the markers."""

    openers: tuple[str, ...]
    """Markers that begin a header."""
    closers: tuple[str, ...]
    """Markers that end a message of any channel."""
    one_end = False
    """Calls and texts end with the same marker."""
    block_closers: tuple[str, ...] = ()
    """Markers that close a block inside a call."""

    def __post_init__(self) -> None:
        check_types(self)

    def closers_of(self, channel: Channel) -> tuple[str, ...]:
        """Markers that end a message of that channel."""
        return self.closers

    def own_closers(self, channel: Channel) -> tuple[str, ...]:
        """Those of them that do not end a call."""
        return self.closers_of(channel)

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[MessageHeader | None]:
        """Read the header that begins with the marker at `start:body`; None if it is only text."""
        raise NotImplementedError

    def bare_header(self, run: Run, position: int) -> Step[MessageHeader | None]:
        """Read a header without its opening marker, where only a header may be."""
        return None
        yield  # type: ignore[unreachable]  # makes it a generator

    def call(self, run: Run, header: MessageHeader) -> Step[int | None]:
        """Read the message of a call. Return its end, or None, without any change, if it is not a call."""
        raise NotImplementedError

    def render(self, turn: RenderTurn) -> str:
        """The turn as the model writes it, without the end-of-turn token."""
        raise NotImplementedError

    def markers(self, reasoning: ReasoningFormat, ends: tuple[str, ...]) -> Markers:
        """The markers of each channel."""
        kinds = dict.fromkeys((*ends, *self.closers), Marker.END)
        kinds |= dict.fromkeys(self.openers, Marker.OPEN)
        free = Needles(*kinds)
        kinds |= dict.fromkeys(self.block_closers, Marker.CLOSE)
        reasoning_closers = self.closers_of(Channel.REASONING)
        inside: dict[Channel | None, Needles] = {
            None: free,
            Channel.REASONING: Needles(*self.openers, *reasoning_closers, *ends),
            Channel.PREAMBLE: Needles(*self.openers, *self.closers_of(Channel.PREAMBLE), *ends),
            Channel.ANSWER: Needles(*self.closers_of(Channel.ANSWER), *ends),
        }
        closers = Needles(*reasoning_closers)
        return ChannelMarkers(
            kinds,
            Needles(*kinds),
            Needles(),
            closers,
            closers,
            inside,
            frozenset(self.closers),
            Needles(*ends, *self.closers),
            free,
        )

    @cached_property
    def _closing(self) -> dict[Channel, Needles]:
        return {channel: Needles(*self.own_closers(channel)) for channel in Channel}

    def read(self, run: Run) -> Step[None]:
        """The loop over messages."""
        markers = cast(ChannelMarkers, run.markers)
        channel: Channel | None = None
        if run.opened:
            channel, run.in_reasoning, run.reasoning_complete = Channel.REASONING, True, False
        never_closed: set[Channel] = set()  # channels without a further end marker
        dangling = False
        headerless = True  # a header at the very beginning is the first, whatever the prompt opened
        position = 0
        header = yield from self._next(run, position)
        while True:
            if header is None:
                match = yield from run.find(markers.inside[channel], position, run.flow)
                if match is None:
                    break
                start, position = match.span()
                marker = match.group()
                if marker not in markers.closers and markers.kinds[marker] is Marker.END:
                    end = yield from self._end_of_turn(run, position)
                    if end is not None:
                        run.begin_block(start)
                        run.skip(end)
                        position = end
                    continue
                if marker in markers.closers:
                    if dangling and channel is None:
                        run.close(start, position)
                        dangling = False
                        continue
                    if channel is not Channel.REASONING and not (yield from self._closes(run, position)):
                        continue
                    run.begin_block(start)
                    run.skip(position)
                    run.to_content()
                    channel, dangling = None, False
                    header = yield from self._next(run, position)
                    continue
                header = yield from self.header(run, start, position, marker)
                if header is None:
                    continue
            if header.cut:
                position, header = self._cut(run, header, channel), None
                continue
            first, headerless = headerless and run.follows_markup(header.start), False
            if channel is not None and channel not in never_closed and not first:
                # A header in a message that is closed later is a quotation. Without an end marker the message ends at
                # the next header, because models forget the marker.
                closing = yield from run.find(self._closing[channel], header.end)
                if closing is not None:
                    if channel is Channel.REASONING and header.channel is Channel.CALL:
                        run.drafts(self.read, header.start, closing.start())
                    elif header.channel is Channel.CALL and (yield from self._lacks_end(run, header, closing.end())):
                        run.begin_block(header.start)
                        error = "the message before the call has no end"
                        run.end_call(header.start, closing.start(), CallStatus.MALFORMED, header.name, error=error)
                    position, header = closing.start(), None
                    continue
                never_closed.add(channel)
            if header.channel is Channel.CALL:
                begin = header.start
                after = yield from self.call(run, header)
                position, header = header.end, None
                if after is None:
                    run.dangle(begin)
                    dangling = True
                else:
                    position, channel, dangling = after, None, False
                    header = yield from self._next(run, position)
                continue
            run.begin_block(header.start)
            run.skip(header.end)
            run.to_content()
            position, channel = header.end, header.channel
            header = None
            if channel is Channel.NONE:
                channel = None
                header = yield from self._next(run, position)
                continue
            if channel is Channel.REASONING:
                run.in_reasoning, run.reasoning_complete = True, False
            yield from self._join(run, position, channel)
        self._cut_opener(run, channel)
        run.finish()

    def _lacks_end(self, run: Run, header: MessageHeader, end: int) -> Step[bool]:
        """Whether a call in a message that is closed at `end` is no quotation: the end marker before it is damaged, or
        the one at `end` is the call's own."""
        if _DAMAGED_MARKER.search(run.text, max(0, header.start - _LOOK_BACK), header.start):
            return True
        return self.one_end and (yield from self._closes(run, end))

    def _next(self, run: Run, position: int) -> Step[MessageHeader | None]:
        """The header after the end of a message, if it lacks its opening marker."""
        position = yield from run.skip_space(position)
        return (yield from self.bare_header(run, position))

    def _join(self, run: Run, position: int, channel: Channel) -> Step[None]:
        """Put the line break between two messages of a kind, if the second has text."""
        if not run.has_text or not (yield from run.more(position + 1)):
            return
        if (yield from run.starts(position, self._closing[channel])) is None:
            run.put(JOINT)

    def _closes(self, run: Run, position: int) -> Step[bool]:
        """Whether a marker that ends at `position` ends a message: a header follows, or nothing. In prose about the
        format, text follows."""
        position = yield from run.skip_space(position)
        markers = cast(ChannelMarkers, run.markers).free
        if position == len(run.text) or (yield from run.starts(position, markers)) is not None:
            return True
        return (yield from self.bare_header(run, position)) is not None

    def _end_of_turn(self, run: Run, position: int) -> Step[int | None]:
        """The end of the text, if only end markers follow `position`."""
        ending = cast(ChannelMarkers, run.markers).ending
        start, known = position, run.memo.get("ends in the middle", (0, 0))
        if known[0] <= position <= known[1]:
            return None
        while True:
            position = yield from run.skip_space(position)
            if position == len(run.text):
                return position
            following = yield from run.starts(position, ending)
            if following is None:
                run.memo["ends in the middle"] = start, position
                return None
            position += len(following)

    def _cut(self, run: Run, header: MessageHeader, channel: Channel | None) -> int:
        """The text ends inside a header. It is an attempt if the header is a call's, else framing or text."""
        end = len(run.text)
        begins = run.follows_markup(header.start)
        if header.channel is Channel.CALL and (begins or channel is not Channel.REASONING):
            run.begin_block(header.start)
            run.to_content()
            run.end_call(header.start, end, CallStatus.INCOMPLETE, error="the text ends inside the header")
        elif begins:
            run.begin_block(header.start)
            run.skip(end)
            run.open_at_end = True
        return end

    def _cut_opener(self, run: Run, channel: Channel | None) -> None:
        """Drop the beginning of a header's opening marker at the end of the text."""
        position = SPACE.match(run.text, run.taken).end()  # type: ignore[union-attr]  # matches anywhere
        rest = run.text[position:]
        if not rest or channel is not None or not run.taken or not run.follows_markup(position):
            return
        if any(opener.startswith(rest) and opener != rest for opener in self.openers):
            run.skip(len(run.text))
            run.open_at_end = True
