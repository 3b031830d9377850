"""Turns that are sequences of messages, each with a header that says what it is: reasoning, content, or a call.

The header decides, not the words of the message: the markup of a call that stands in another channel is quoted there.
Where the prompt has written the first header, the text begins in the middle of a message.

Pieces of reasoning, and of content, that stand in separate messages are joined by one line break. What the format wants
between messages is no text; text that stands there all the same is content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, cast

from tool_call_parsers.arguments import Arguments, ArgumentsWatch, read_arguments
from tool_call_parsers.engine import SPACE, BlockGrammar, Marker, Markers, Needles, Run, Step, Turn, cut_off
from tool_call_parsers.json_scan import read_value
from tool_call_parsers.literals import LiteralError, read_json
from tool_call_parsers.reasoning import ReasoningFormat
from tool_call_parsers.schema import coerce
from tool_call_parsers.tag_blocks import Head as TagHead
from tool_call_parsers.tag_blocks import TagBlocks
from tool_call_parsers.types import CALLABLE, CallStatus

JOINT = "\n"
"""Between the texts of two messages of one kind."""
HEADER_WIDTH = 512
"""The longest header, in characters. What is longer is text."""
SECTION_LIMIT = 6
"""The most markers in a header."""
JUNK_LIMIT = 2
"""Words in a header that may mean nothing."""

_NAME = re.compile(r"[\w.\-]{0,128}")


class Channel(Enum):
    """What a message is."""

    REASONING = 1
    PREAMBLE = 2
    """Content; calls may follow."""
    ANSWER = 3
    """Content that ends the turn. Servers strip its end marker, so that a header in it must be a quotation."""
    CALL = 4
    NONE = 5
    """Nothing but a header."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message: `text[start:end]`."""

    start: int
    end: int
    channel: Channel
    name: str = ""
    """The tool, where the header names it."""
    error: str | None = None
    """What had to be put right in it."""
    cut: bool = False
    """The text ends inside it."""


@dataclass(frozen=True, slots=True)
class ChannelMarkers(Markers):
    """The markers by the channel that they may stand in; None is between messages, and a beginning without header."""

    inside: dict[Channel | None, Needles]
    closers: frozenset[str]
    """Of the ends those of messages, not of the turn."""
    ending: Needles
    """All ends."""


class ChannelGrammar:
    """The loop over messages. A subclass reads headers and calls, and says which markers there are."""

    openers: tuple[str, ...]
    """Markers that begin a header."""
    closers: tuple[str, ...]
    """Markers that end a message, of whatever channel."""
    block_closers: tuple[str, ...] = ()
    """Markers that close the markup within a call."""

    def closers_of(self, channel: Channel) -> tuple[str, ...]:
        """Markers that end a message of that channel."""
        return self.closers

    def own_closers(self, channel: Channel) -> tuple[str, ...]:
        """Those of them that do not end a call."""
        return self.closers_of(channel)

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[Header | None]:
        """The header that begins with the marker at `start:body`; None where that is only text."""
        raise NotImplementedError

    def bare_header(self, run: Run, position: int) -> Step[Header | None]:
        """A header whose opening marker is missing, at a place where only a header should stand."""
        return None
        yield  # type: ignore[unreachable]  # makes it a generator

    def call(self, run: Run, header: Header) -> Step[int | None]:
        """Read the message of a call: its end, or None, without a trace, when it is none."""
        raise NotImplementedError

    def render(self, turn: Turn) -> str:
        """What the model writes for the turn, without the end-of-turn token."""
        raise NotImplementedError

    def markers(self, reasoning: ReasoningFormat | None, ends: tuple[str, ...]) -> Markers:
        """What to look for in each channel."""
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
        never_closed: set[Channel] = set()  # channels whose end markers do not come any more
        dangling = False
        untold = True  # no header yet: one at the very beginning is the first, whatever the prompt has opened
        position = 0
        header = yield from self._next(run, position)
        while True:
            if header is None:
                match = yield from run.next_marker(markers.inside[channel], position)
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
            first, untold = untold and run.follows_markup(header.start), False
            if channel is not None and channel not in never_closed and not first:
                # What stands in a message that is closed later is quoted there. Without an end marker the message ends
                # where the next begins: models forget it.
                closing = yield from run.find(self._closing[channel], header.end)
                if closing is not None:
                    if channel is Channel.REASONING and header.channel is Channel.CALL:
                        run.drafts(self, header.start, closing.start())
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
        self._tail(run, channel)
        run.finish()

    def _next(self, run: Run, position: int) -> Step[Header | None]:
        """The header behind the end of a message where it lacks its opening marker."""
        position = yield from run.skip_space(position)
        return (yield from self.bare_header(run, position))

    def _join(self, run: Run, position: int, channel: Channel) -> Step[None]:
        """The line break between two messages of a kind, where the second says anything."""
        if not run.has_text or not (yield from run.more(position + 1)):
            return
        if (yield from run.starts(position, self._closing[channel])) is None:
            run.put(JOINT)

    def _closes(self, run: Run, position: int) -> Step[bool]:
        """Whether a marker that ends at `position` ends a message: a header follows, or nothing. In prose about the
        format text follows."""
        position = yield from run.skip_space(position)
        markers = cast(ChannelMarkers, run.markers).inside[None]
        if position == len(run.text) or (yield from run.starts(position, markers)) is not None:
            return True
        return (yield from self.bare_header(run, position)) is not None

    def _end_of_turn(self, run: Run, position: int) -> Step[int | None]:
        """The end of the text when nothing but ends stands from `position` on."""
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

    def _cut(self, run: Run, header: Header, channel: Channel | None) -> int:
        """The text ends inside a header: an attempt where it is a call's, else markup, or a word in a text."""
        end = len(run.text)
        begins = run.follows_markup(header.start)
        if header.channel is Channel.CALL and (begins or channel is not Channel.REASONING):
            run.begin_block(header.start)
            run.to_content()
            run.end_call(header.start, end, CallStatus.INCOMPLETE, error="the text ends inside the header")
            run.fail(end)
        elif begins:
            run.begin_block(header.start)
            run.skip(end)
            run.open_at_end = True
        return end

    def _tail(self, run: Run, channel: Channel | None) -> None:
        """The text ends inside the marker that begins a header."""
        position = SPACE.match(run.text, run.taken).end()  # type: ignore[union-attr]  # matches anywhere
        rest = run.text[position:]
        if not rest or channel is not None or not run.taken or not run.follows_markup(position):
            return
        if any(opener.startswith(rest) and opener != rest for opener in self.openers):
            run.skip(len(run.text))
            run.open_at_end = True


# -- recipients and channels in words ---------------------------------------------------------------------------------

_RECIPIENT = re.compile(r"to=([^\s<]*)")


@dataclass(frozen=True, eq=False)
class WordHeaders(ChannelGrammar):
    """Headers of words: `<|start|>assistant to=RECIPIENT<|channel|>CHANNEL TYPE<|message|>`, in any order.

    A recipient that is no reader names the tool of a call. The header's first words, up to the role, stand in the
    prompt, so that the first message of a completion has none.
    """

    start: str
    message: str
    """Marker behind the header."""
    ends: tuple[str, ...]
    """Markers behind a message."""
    call_ends: tuple[str, ...]
    """Those of them that only stand behind calls and answers: a message that is neither does not end with one."""
    inner: tuple[str, ...]
    """Markers within a header; the first can begin one."""
    channels: dict[str, Channel]
    recipients: dict[str, Channel]
    """Recipients that are readers, not tools."""
    types: frozenset[str]
    """Words for the type of the body."""
    role: str = "assistant"
    namespace: str = ""
    """What the names of tools begin with in a header."""

    @cached_property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        return (self.start, *self.inner[:1])

    @property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.ends

    def own_closers(self, channel: Channel) -> tuple[str, ...]:
        return tuple(end for end in self.ends if end not in self.call_ends)

    @cached_property
    def _stops(self) -> Needles:
        return Needles(self.start, self.message, *self.inner, *self.ends, "\n")

    @cached_property
    def _bare(self) -> Needles:
        return Needles(self.role, *self.channels, "to=", self.message, *self.inner[1:])

    @cached_property
    def _end(self) -> Needles:
        return Needles(*self.ends)

    @cached_property
    def _body_ends(self) -> Needles:
        """What a call's body cannot go beyond where it is no JSON."""
        return Needles(*self.ends, *self.openers)

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[Header | None]:
        return (yield from self._header(run, start, body, bare=False))

    def bare_header(self, run: Run, position: int) -> Step[Header | None]:
        if (yield from run.starts(position, self._bare)) is None:
            return None
        header = yield from self._header(run, position, position, bare=True)
        return None if header is not None and header.cut and header.channel is not Channel.CALL else header

    def _header(self, run: Run, start: int, position: int, *, bare: bool) -> Step[Header | None]:
        limit = start + HEADER_WIDTH
        pieces: list[str] = []
        while True:
            stop = self._stops.pattern.search(run.text, position, limit)
            if stop is None:
                if len(run.text) >= limit:
                    return None
                if not run.final:
                    yield
                    continue
                pieces.append(run.text[position : self._stops.unsettled(run.text, position)])
                break
            pieces.append(run.text[position : stop.start()])
            position = stop.end()
            if stop.group() == self.message:
                break
            if stop.group() not in self.inner or len(pieces) > SECTION_LIMIT:
                return None
        return self._words(run, start, position, " ".join(pieces).split(), bare=bare, cut=stop is None)

    def _words(self, run: Run, start: int, end: int, words: list[str], *, bare: bool, cut: bool) -> Header | None:
        """What the words of a header say; None when they say nothing."""
        channel, recipient, typed, junk = None, None, False, []
        for index, word in enumerate(words):
            if recipient is None and (match := _RECIPIENT.fullmatch(word)) is not None:
                recipient = match[1]
            elif word in self.channels and channel in (None, word):
                channel = word
            elif word in self.types:
                typed = True
            elif not ((index == 0 and word == self.role) or (cut and index == len(words) - 1 and self._begins(word))):
                junk.append(word)
        kind = self.channels.get(channel or "", Channel.ANSWER)
        if recipient is not None:
            kind = self.recipients.get(recipient, Channel.CALL)
        elif typed and kind is Channel.PREAMBLE:
            kind = Channel.CALL  # arguments, but nobody is named
        # Prose, too, may begin with such a word or have a marker in it. What is not a call's has no place to be told.
        if len(junk) > (JUNK_LIMIT if kind is Channel.CALL and recipient is not None and not (bare or cut) else 0):
            return None
        errors = [f"unexpected words in the header: {' '.join(junk)}"] if junk else []
        if not run.text.startswith(self.start, start) and SPACE.match(run.text).end() < start:  # type: ignore[union-attr]
            errors.append(f"{self.start} is missing")
        name = (recipient or "").removeprefix(self.namespace) if kind is Channel.CALL else ""
        return Header(start, end, kind, name, "; ".join(errors) or None, cut)

    def _begins(self, word: str) -> bool:
        """Whether a header's word may begin like this."""
        return any(known.startswith(word) for known in (self.role, *self.channels, *self.types, "to="))

    def json_call(self, run: Run, header: Header) -> Step[int]:
        """Read the message of a call whose arguments are JSON: its end."""
        run.begin_block(header.start)
        run.to_content()
        position = yield from run.skip_space(header.end)
        if header.name:
            run.start_call(header.name)
        notes = [header.error] if header.error else []
        end = len(run.text)
        if position == end:
            found = Arguments(CallStatus.INCOMPLETE, {}, "", "the text ends before the arguments")
        elif run.text[position] in "{[":
            value = yield from read_value(run, position, self._body_ends, ArgumentsWatch(run, position))
            raw, end = run.text[position : value.end], value.end
            found = Arguments(value.status, {}, raw, value.error)
            if value.status in (CallStatus.OK, CallStatus.REPAIRED):
                found = read_arguments(value.value, raw)
                if value.error:
                    notes.append(value.error)
        else:
            stop = yield from run.find(self._body_ends, position)
            end = stop.start() if stop is not None else len(run.text)
            found = self._other(run.text[position:end].rstrip(), stop is None)
        notes += [found.error] if found.error else []
        status = found.status
        if status is not CallStatus.INCOMPLETE:
            end, surplus, followed = yield from self._behind(run, end)
            if status in CALLABLE:
                notes += [f"one {surplus!r} too many"] if surplus else []
                notes += [] if followed else ["text behind the arguments"]
                status = CallStatus.REPAIRED if notes else status
                if not header.name:
                    status, notes = CallStatus.MISSING_NAME, ["no recipient is named"]
        error = "; ".join(notes) or None
        usable = run.end_call(header.start, end, status, header.name, found.value, found.raw, error=error)
        (run.skip if usable else run.fail)(end)
        return end

    def _other(self, raw: str, cut: bool) -> Arguments:
        """Arguments that are no object, nor a list."""
        if not raw:
            return Arguments(CallStatus.REPAIRED, {}, "", "there are no arguments")
        try:
            literal = read_json(raw)
            if literal.end == len(raw):
                return read_arguments(literal.value, raw)
        except LiteralError as error:
            if cut and error.incomplete:
                return Arguments(CallStatus.INCOMPLETE, {}, raw, "the text ends inside the arguments")
        return Arguments(CallStatus.INVALID_JSON, {}, raw, "the arguments are no JSON")

    def _behind(self, run: Run, end: int) -> Step[tuple[int, str, bool]]:
        """What follows arguments that end at `end`: where the message ends, a bracket too many, and whether it ends."""
        surplus = ""
        while True:
            position = yield from run.skip_space(end)
            closer = yield from run.starts(position, self._end)
            if closer is not None:
                return position + len(closer), surplus, True
            if not run.text.startswith(("}", "]"), position):
                break
            surplus, end = run.text[position], position + 1
        opener = yield from run.starts(position, self._body_ends)
        if opener is None and self._end.begins(run.text, position):
            return len(run.text), surplus, True
        return end, surplus, position == len(run.text) or opener is not None


class Harmony(WordHeaders):
    """Arguments as a JSON object: gpt-oss."""

    def call(self, run: Run, header: Header) -> Step[int | None]:
        return (yield from self.json_call(run, header))

    def render(self, turn: Turn) -> str:
        messages = []
        if turn.reasoning is not None:
            messages.append(f"<|channel|>analysis<|message|>{turn.reasoning}<|end|>")
        if turn.content and turn.calls:
            messages.append(f"<|channel|>commentary<|message|>{turn.content}<|end|>")
        elif turn.content:
            messages.append(f"<|channel|>final<|message|>{turn.content}")
        for call in turn.calls:
            head = f" to={self.namespace}{call.name}<|channel|>commentary json<|message|>"
            messages.append(f"{head}{call.json_text}<|call|>")
        if turn.calls:
            messages[-1] = messages[-1].removesuffix("<|call|>")  # it ends the turn
        return f"{self.start}{self.role}".join(messages)


class NamespacedTags(TagBlocks):
    """Calls as tags by a model that doubles a name without a namespace: `f.f` for `f`."""

    @cached_property
    def _call_head(self) -> re.Pattern[str]:
        return re.compile(f"(?:){super()._call_head.pattern}")  # told apart from a parameter's by identity

    def _head(self, run: Run, start: int, pattern: re.Pattern[str]) -> Step[TagHead | None]:
        head = yield from super()._head(run, start, pattern)
        if head is None or pattern is not self._call_head or run.tools.offered(head.name):
            return head
        namespace, _, name = head.name.partition(".")
        return head._replace(name=name) if namespace == name and run.tools.offered(name) else head


@dataclass(frozen=True, eq=False)
class TaggedMessages(WordHeaders):
    """Arguments as tags: Muse."""

    tags: TagBlocks = field(kw_only=True)

    @cached_property
    def block_closers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        return self.tags.closers

    @cached_property
    def _openers(self) -> Needles:
        return Needles(*self.tags.openers)

    def bare_header(self, run: Run, position: int) -> Step[Header | None]:
        if (yield from run.starts(position, self._openers)) is not None:
            return Header(position, position, Channel.CALL)  # the prompt may have written all of the header
        return (yield from super().bare_header(run, position))

    def call(self, run: Run, header: Header) -> Step[int | None]:
        position = yield from run.skip_space(header.end)
        opener = yield from run.starts(position, self._openers)
        if opener is not None:
            end = yield from self.tags.block(run, header.start, position + len(opener), opener)
            if end is not None:
                return end
            if header.end == header.start:
                return None
        if run.text.startswith("{", position):
            notes = filter(None, (header.error, "a JSON object instead of tags"))
            return (yield from self.json_call(run, replace(header, error="; ".join(notes))))
        cut = position == len(run.text) or (opener is None and self._openers.begins(run.text, position))
        stop = yield from run.find(self._body_ends, position)
        end = len(run.text) if stop is None else stop.end() if stop.group() in self.ends else stop.start()
        run.begin_block(header.start)
        run.to_content()
        status = CallStatus.INCOMPLETE if cut else CallStatus.MALFORMED
        error = "the text ends before the call" if cut else "the message holds no call"
        run.end_call(header.start, end, status, header.name, error=error)
        run.fail(end)
        return end

    def render(self, turn: Turn) -> str:
        messages = []
        if turn.reasoning is not None:
            messages.append(f" to=self{self.message}{turn.reasoning}")
        if turn.content:
            messages.append(f" to={'commentary' if turn.calls else 'user'}{self.message}{turn.content}")
        for call in turn.calls:
            block = self.tags.render_calls(replace(turn, calls=(call,)))
            messages.append(f" to={call.name}{self.message}{block}")
        text = f"{self.ends[0]}{self.start}{self.role}".join(messages)
        return text if turn.content or turn.calls or not messages else text + self.ends[0]


# -- kinds of content in markers --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TypedMessages(ChannelGrammar):
    """Headers of a marker for the role and one for the kind of content: `<|message_model|>NAME<|content_KIND|>`.

    The name stands before calls only. The marker for the role stands in the prompt, so that the first message of a
    completion has none.
    """

    role: str
    end: str
    kinds: dict[str, Channel]
    """Channels by the marker for the kind."""
    calls: BlockGrammar
    """What a call is, its opener being the marker for the kind."""

    @cached_property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        return (self.role, *self.kinds)

    @property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.end,)

    @cached_property
    def _kind(self) -> Needles:
        return Needles(*self.kinds)

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[Header | None]:
        if opener in self.kinds:
            return Header(start, body, self.kinds[opener])
        header = yield from self._named(run, start, body)
        if header is not None:
            return header
        position = _NAME.match(run.text, body).end()  # type: ignore[union-attr]  # matches the empty text
        rest = run.text[position : position + self._kind.longest]
        if run.final and (not rest or (self._kind.begins(run.text, position) and rest not in self.kinds)):
            return Header(start, position, Channel.CALL if position > body else Channel.NONE, cut=True)
        return None

    def bare_header(self, run: Run, position: int) -> Step[Header | None]:
        header = yield from self._named(run, position, position)
        # Of a kind without a name its own marker tells, and a word before another kind is text.
        return header if header is not None and header.channel is Channel.CALL else None

    def _named(self, run: Run, start: int, position: int) -> Step[Header | None]:
        """A header whose name begins at `position`."""
        while True:
            end = _NAME.match(run.text, position).end()  # type: ignore[union-attr]  # matches the empty text
            if end < len(run.text) or run.final:
                break
            yield
        kind = yield from run.starts(end, self._kind)
        if kind is None or (end > position and self.kinds[kind] is not Channel.CALL):
            return None
        return Header(start, end + len(kind), self.kinds[kind], run.text[position:end])

    def call(self, run: Run, header: Header) -> Step[int | None]:
        return (yield from self.calls.block(run, header.start, header.end, self.calls.openers[0]))

    def render(self, turn: Turn) -> str:
        kinds = {channel: marker for marker, channel in reversed(self.kinds.items())}
        messages = []
        if turn.reasoning is not None:
            messages.append(f"{kinds[Channel.REASONING]}{turn.reasoning}{self.end}")
        if turn.content:
            messages.append(f"{kinds[Channel.PREAMBLE]}{turn.content}{self.end}")
        messages += (call.name + self.calls.render_calls(replace(turn, calls=(call,))) for call in turn.calls)
        return self.role.join(messages)


# -- nested elements --------------------------------------------------------------------------------------------------

_ATTRIBUTE = re.compile(r"""([\w\-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))""")
_ATTRIBUTES = re.compile(r"""(?>(?:\s++[\w\-]++\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s"']++))*)\s*+""")
_WORD = re.compile(r"\s*([\w\-]*)")
_ENDS_OF_CALL = (("call", True), ("call", False), ("tools", True), ("message", True))
_CUT_TAG = re.compile(r"""([\w\-]*)((?:\s+[\w\-]+(?:=(?:"[^"]*(?:"|$))?)?)*\s*)""")


@dataclass(frozen=True, slots=True)
class Tag:
    """An opening or closing tag: `text[start:end]`."""

    start: int
    end: int
    name: str
    closing: bool
    attributes: dict[str, str]


@dataclass(frozen=True, eq=False)
class Elements(ChannelGrammar):
    """Elements in control tokens, `<|open|>NAME key="value"<|sep|>..<|close|>NAME<|sep|>`: Kimi K3.

    An argument's `type` says how it is written: a string as it is, to the last character, all else as JSON. A closing
    tag ends an argument where markup follows it; elsewhere it is a part of the value.
    """

    open: str = "<|open|>"
    close: str = "<|close|>"
    sep: str = "<|sep|>"
    channels: tuple[tuple[str, Channel], ...] = (
        ("think", Channel.REASONING),
        ("response", Channel.PREAMBLE),
        ("tools", Channel.CALL),
        ("call", Channel.CALL),
        ("message", Channel.NONE),
    )

    @cached_property
    def openers(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, and fixed all the same
        return (self.open,)

    @cached_property
    def closers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"{self.close}{name}{self.sep}" for name, _ in self.channels)

    def closers_of(self, channel: Channel) -> tuple[str, ...]:
        return tuple(f"{self.close}{name}{self.sep}" for name, own in self.channels if own is channel)

    @cached_property
    def _control(self) -> Needles:
        return Needles(self.open, self.close, self.sep)

    @cached_property
    def _tags(self) -> Needles:
        return Needles(self.open, self.close)

    @cached_property
    def _argument_end(self) -> Needles:
        return Needles(f"{self.close}argument{self.sep}")

    @cached_property
    def _json_end(self) -> Needles:
        return Needles(f"{self.close}json{self.sep}", f"{self.close}call{self.sep}")

    @cached_property
    def _behind_argument(self) -> Needles:
        opening = (f"{self.open}{name}" for name in ("argument", "json", "call"))
        return Needles(*opening, *(f"{self.close}{name}" for name in ("call", "tools", "message")))

    @cached_property
    def _call_end(self) -> Needles:
        closing = (f"{self.close}{name}{self.sep}" for name in ("call", "tools", "message"))
        return Needles(*closing, f"{self.open}call ")

    # -- reading ------------------------------------------------------------------------------------------------------

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[Header | None]:
        channels = dict(self.channels)
        tag = yield from self._tag(run, start)
        if tag is not None:
            channel = None if tag.closing else channels.get(tag.name)
            return Header(start, tag.end, channel) if channel is not None else None
        name = self._cut_name(run, start)
        if name is None:
            return None
        return Header(start, len(run.text), channels.get(name, Channel.NONE), cut=True)

    def _cut_name(self, run: Run, start: int) -> str | None:
        """The name of an opening tag, or the beginning of one, where the text ends inside the tag."""
        body = start + len(self.open)
        if not run.final or not run.text.startswith(self.open, start) or len(run.text) - body >= HEADER_WIDTH:
            return None
        cut = _CUT_TAG.fullmatch(run.text, body, self._control.unsettled(run.text, body))
        if cut is None or self._control.pattern.search(run.text, body) is not None:
            return None
        whole = bool(cut[2])  # else the name itself may be cut
        names = (name for name, _ in self.channels if name == cut[1] or (not whole and name.startswith(cut[1])))
        return cut[1] if next(names, None) is not None else None

    def _tag(self, run: Run, start: int) -> Step[Tag | None]:
        """The tag that begins at `start`."""
        token = yield from run.starts(start, self._tags)
        if token is None:
            return None
        body = start + len(token)
        while (stop := self._control.pattern.search(run.text, body, body + HEADER_WIDTH)) is None:
            if run.final or len(run.text) >= body + HEADER_WIDTH:
                return None
            yield
        if stop.group() != self.sep:
            return None
        word = _WORD.match(run.text, body, stop.start())
        assert word is not None
        if _ATTRIBUTES.fullmatch(run.text, word.end(), stop.start()) is None:
            return None
        attributes = {
            match[1]: unescape(match[2] or match[3] or match[4] or "")
            for match in _ATTRIBUTE.finditer(run.text, word.end(), stop.start())
        }
        return Tag(start, stop.end(), word[1], token == self.close, attributes)

    def call(self, run: Run, header: Header) -> Step[int | None]:
        begin = header.start
        tag = yield from self._tag(run, begin)
        assert tag is not None  # a header is a tag
        position, begun = tag.end, tag.name == "call"
        if begun:
            begin = position = yield from self._call(run, begin, tag)
        while True:
            position = yield from run.skip_space(position)
            tag = yield from self._tag(run, position)
            if tag is None:
                if not begun and (
                    position == len(run.text)
                    or self._tags.begins(run.text, position)
                    or self._cut_name(run, position) is not None
                ):
                    return cut_off(run, begin, ())
                return begin if begun else None
            if tag.name == "call" and not tag.closing:
                begin = position = yield from self._call(run, begin, tag)
                begun = True
            elif begun and tag.name == "tools" and tag.closing:
                if run.follows_markup(position):
                    run.skip(tag.end)
                    return tag.end
                return begin
            else:
                return begin if begun else None

    def _call(self, run: Run, begin: int, tag: Tag) -> Step[int]:
        """A call whose markup begins at `begin`, behind its opening tag: its end."""
        run.begin_block(begin)
        run.to_content()
        name = tag.attributes.get("tool", "").strip()
        if name:
            run.start_call(name)
        read = _Arguments(run, name)
        body = position = tag.end
        while True:
            end = position = yield from run.skip_space(position)
            following = yield from self._tag(run, position)
            if following is None or following.name not in ("argument", "json") or following.closing:
                break
            element = self._argument if following.name == "argument" else self._json
            position = yield from element(run, following, read)
            if read.status is CallStatus.INCOMPLETE:
                end = position
                break
        raw = run.text[body:end].strip() if read.whole is None else read.whole
        if read.status is not CallStatus.INCOMPLETE and (
            following is None or (following.name, following.closing) not in _ENDS_OF_CALL
        ):
            if following is None and self._ends_in_tag(run, end):
                read.fail(CallStatus.INCOMPLETE, "the text ends inside the call")
                end = len(run.text)
            else:
                read.fail(CallStatus.MALFORMED, "between the arguments stands text")
                stop = yield from run.find(self._call_end, end)
                end = len(run.text) if stop is None else stop.start()
                following = (yield from self._tag(run, end)) if stop is not None else None
        if following is not None and following.name == "call" and following.closing:
            end = following.end
        if not name and read.status in CALLABLE:
            read.fail(CallStatus.MISSING_NAME, "the call names no tool")
        usable = run.end_call(
            begin, end, read.status, name, read.values, raw, error=read.error, json_text=read.json_text()
        )
        (run.skip if usable else run.fail)(end)
        return end

    def _ends_in_tag(self, run: Run, position: int) -> bool:
        """Whether the text ends at `position`, or in a tag that begins there."""
        if position == len(run.text) or self._tags.begins(run.text, position):
            return True
        token = self._tags.pattern.match(run.text, position)
        return run.final and token is not None and self._control.pattern.search(run.text, token.end()) is None

    def _argument(self, run: Run, tag: Tag, read: _Arguments) -> Step[int]:
        """An argument behind its opening tag: its end."""
        key, kind = tag.attributes.get("key", ""), tag.attributes.get("type")
        is_string = kind == "string" or (kind is None and run.tools.is_string(read.name, key))
        if read.whole is not None:
            read.fail(CallStatus.MALFORMED, "arguments twice")
        read.begin(key, is_string)
        sent = position = tag.end
        while True:
            stop = self._argument_end.pattern.search(run.text, position)
            if stop is None:
                position = self._argument_end.unsettled(run.text, position)
                if is_string:
                    read.piece(run.text, sent, position)
                    sent = position
                if run.final:
                    read.fail(CallStatus.INCOMPLETE, f"the text ends inside the argument {key!r}")
                    return len(run.text)
                yield
                continue
            position = yield from run.skip_space(stop.end())
            if position == len(run.text) or (yield from run.starts(position, self._behind_argument)) is not None:
                break
            position = stop.end()
        text = run.text[tag.end : stop.start()]
        if is_string:
            read.piece(run.text, sent, stop.start())
            read.end(key, text, '"')
        else:
            self._typed(read, key, kind, text)
        if not key:
            read.fail(CallStatus.MALFORMED, "an argument without a key")
        return stop.end()

    def _typed(self, read: _Arguments, key: str, kind: str | None, text: str) -> None:
        """The value of an argument that is no string."""
        tools, bare = read.run.tools, text.strip()
        if kind is None:
            value = tools.coerce(read.name, key, text)
        else:
            try:
                literal = read_json(bare)
                if literal.end == len(bare):
                    read.end(key, literal.value, bare)
                    return
            except LiteralError:
                pass
            value = coerce(text, {"type": kind})
            if isinstance(value, str):
                value = tools.coerce(read.name, key, text)
            read.fail(CallStatus.REPAIRED, f"the argument {key!r} is written as no {kind}")
        read.end(key, value, json.dumps(value, ensure_ascii=False) if read.run.started else "")

    def _json(self, run: Run, tag: Tag, read: _Arguments) -> Step[int]:
        """All arguments as one JSON object behind its opening tag: its end."""
        position = yield from run.skip_space(tag.end)
        if read.values or read.whole is not None:
            read.fail(CallStatus.MALFORMED, "arguments twice")
        if position == len(run.text):
            read.fail(CallStatus.INCOMPLETE, "the text ends before the arguments")
            return position
        if run.text[position] not in "{[":
            read.fail(CallStatus.INVALID_JSON, "the arguments are no JSON")
            stop = yield from run.find(self._json_end, position)
            end = len(run.text) if stop is None else stop.start()
        else:
            watch = ArgumentsWatch(run, position) if read.status is CallStatus.OK else None
            value = yield from read_value(run, position, self._json_end, watch)
            read.whole, end = run.text[position : value.end], value.end
            found = Arguments(value.status, {}, read.whole, value.error)
            if value.status in CALLABLE:
                found = read_arguments(value.value, read.whole)
                read.values = found.value
            if found.status is not CallStatus.OK or value.error:
                read.fail(
                    value.status if found.status is CallStatus.OK else found.status,
                    found.error or value.error or "the arguments are no object",
                )
        end = yield from run.skip_space(end)
        closer = yield from run.starts(end, self._json_end)
        return end + len(closer) if closer == f"{self.close}json{self.sep}" else end

    # -- writing ------------------------------------------------------------------------------------------------------

    def _element(self, head: str, body: str) -> str:
        return f"{self.open}{head}{self.sep}{body}{self.close}{head.split(' ', 1)[0]}{self.sep}"

    def render(self, turn: Turn) -> str:
        parts = []
        if turn.reasoning is not None:
            parts.append(self._element("think", turn.reasoning))
        if turn.content:
            parts.append(self._element("response", turn.content))
        if turn.calls:
            calls = []
            for index, call in enumerate(turn.calls, 1):
                arguments = (
                    self._element(f'argument key="{escape(key)}" type="{type_of(value)}"', written(value))
                    for key, value in call.arguments.items()
                )
                calls.append(self._element(f'call tool="{escape(call.name)}" index="{index}"', "".join(arguments)))
            parts.append(self._element("tools", "".join(calls)))
        return "".join(parts)


class _Arguments:
    """The arguments of a call as they are read, and their JSON text as it is told."""

    __slots__ = ("_parts", "error", "name", "run", "status", "values", "whole")

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.values: dict[str, Any] = {}
        self.status = CallStatus.OK
        self.error: str | None = None
        self.whole: str | None = None
        """The JSON text of all arguments, where they are one object."""
        self._parts: list[str] = []

    def fail(self, status: CallStatus, error: str) -> None:
        """Something is wrong. What is wrong first counts, but for repairs, and for the end of the text."""
        if self.status in CALLABLE or status is CallStatus.INCOMPLETE:
            self.status, self.error = status, error

    def _tell(self, text: str) -> None:
        self._parts.append(text)
        self.run.send_arguments(text)

    def begin(self, key: str, is_string: bool) -> None:
        """An argument's value begins."""
        if self.run.started:
            before = ", " if self._parts else "{"
            self._tell(f"{before}{json.dumps(key, ensure_ascii=False)}: " + ('"' if is_string else ""))

    def piece(self, text: str, start: int, end: int) -> None:
        """More of a string."""
        if end > start and self.run.started:
            self._tell(json.dumps(text[start:end], ensure_ascii=False)[1:-1])

    def end(self, key: str, value: object, rest: str) -> None:
        """The value is whole; `rest` is what its JSON text lacks."""
        if key:
            self.values[key] = value
        if self.run.started:
            self._tell(rest)

    def json_text(self) -> str | None:
        """All of the JSON text that was told; None where it was not told in pieces."""
        if not self.run.started or self.whole is not None or self.status not in CALLABLE:
            return None
        return "".join(self._parts) + ("}" if self._parts else "{}")


def escape(text: str) -> str:
    """Text for an attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def unescape(text: str) -> str:
    """The text of an attribute."""
    return text.replace("&quot;", '"').replace("&amp;", "&")


def type_of(value: object) -> str:
    """The `type` of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list | tuple) else "object"


def written(value: object) -> str:
    """A value as it is written: a string as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
