"""The state of a lexer on one completion: each character becomes content, reasoning, or part of an attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tool_call_parsers.engine.foreign import FOREIGN, find_foreign
from tool_call_parsers.engine.text import SPACE, GrowingText, Markers, Step
from tool_call_parsers.reasoning import ReasoningFormat
from tool_call_parsers.schema import ToolIndex
from tool_call_parsers.types import (
    CALLABLE,
    ArgumentsDelta,
    CallEnd,
    CallSpan,
    CallStart,
    CallStatus,
    ContentDelta,
    Event,
    Finish,
    ParsedCompletion,
    ParsedToolCall,
    ReasoningDelta,
    new_call_id,
)

_LOOK_BACK = 48
"""Room for a closing marker of reasoning and the blank lines after it."""


@dataclass(slots=True)
class _Sink:
    """Text of one kind. Blank text at its beginning waits for more."""

    delta: type[ContentDelta] | type[ReasoningDelta]
    parts: list[str] = field(default_factory=list)
    blank: str = ""

    def put(self, text: str, events: list[Event] | None) -> None:
        if not text:
            return
        if not self.parts:
            text = self.blank + text
            if text.isspace():
                self.blank = text
                return
        self.parts.append(text)
        if events is not None:
            events.append(self.delta(text))

    def text(self) -> str | None:
        return "".join(self.parts) or None


@dataclass(slots=True, eq=False, kw_only=True)
class Run(GrowingText):
    """One completion in a lexer: its text, the results so far, and their events."""

    tools: ToolIndex
    markers: Markers
    reasoning_format: ReasoningFormat | None = None
    reads_reasoning: bool = False
    """Reasoning goes to `reasoning`. Otherwise it stays content, and still hides the calls drafted in it."""
    opened: bool = False
    """The generation prompt opened the reasoning."""
    strict: bool = False
    """Calls that need a repair are rejected."""
    events: list[Event] | None = None
    """The events since the last piece; None if the run does not stream."""
    offset: int = 0
    """Where the text begins in the completion."""
    attempts: list[ParsedToolCall] = field(default_factory=list)
    usable: int = 0
    """How many of `attempts` are calls."""
    in_reasoning: bool = False
    """Free text is reasoning now."""
    reasoning_complete: bool = True
    open_at_end: bool = False
    taken: int = 0
    """Text before this position belongs to a result."""
    hints: set[str] = field(default_factory=set)
    """Facts about this completion that a lexer keeps from block to block."""
    rejections: int = 0
    """How often the JSON decoder rejected a text. Its errors cost time in proportion to the text before them."""
    strayed: int = 0
    """Characters read in texts that only looked like calls, with overlaps counted each time."""
    memo: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Results of searches in stretches of the text, so that they are not repeated."""
    never_closed: bool = False
    """No closing marker of reasoning follows."""
    _content: _Sink = field(default_factory=partial(_Sink, ContentDelta))
    _reasoning: _Sink = field(default_factory=partial(_Sink, ReasoningDelta))
    _held: str = ""
    _block: int | None = None
    _blank: int = 0
    """All text from `taken` to this position is whitespace."""
    _fresh: bool = True
    _dangling: int | None = None
    _ids: set[str] = field(default_factory=set)
    _call: CallStart | None = None
    _args_sent: int = 0

    # -- free text ----------------------------------------------------------------------------------------------------

    def _sink(self) -> _Sink:
        return self._reasoning if self.in_reasoning else self._content

    def flow(self, position: int) -> None:
        """Pass on the free text before `position`, except for whitespace at its end, which may be framing."""
        start = max(self.taken, self._blank)
        if chunk := self.text[start:position].rstrip():
            self.take(start + len(chunk))
        self._blank = position

    def put(self, text: str) -> None:
        """Add text to the content or the reasoning, unchanged."""
        if text:
            if self._fresh and not text.isspace():
                self._fresh = False
            self._sink().put(text, self.events)

    def take(self, end: int) -> None:
        """Add the free text before `end`, with all whitespace."""
        self.put(self.text[self.taken : end])
        self.taken = end

    def begin_block(self, start: int, separators: tuple[str, ...] = ()) -> None:
        """A block begins at `start`. One separator before it belongs to the block, and so does all whitespace between
        calls or at the beginning; if the block fails, they become text again. Repeated calls have no effect."""
        if self._block == start:
            return
        self._block = start
        text = self.text[self.taken : start]
        self.taken = start
        if self._fresh and (not text or text.isspace()):
            self._held = text
            return
        self._held = next((separator for separator in separators if separator and text.endswith(separator)), "")
        self.put(text.removesuffix(self._held))

    def skip(self, end: int) -> None:
        """The block ends at `end`, and its text is dropped."""
        self.taken = end
        self._block = None
        self._held = ""
        self._fresh = True

    def fail(self, end: int) -> None:
        """The block failed: its text before `end` becomes free text."""
        self._block = None
        self.put(self._held)
        self._held = ""
        self.take(end)

    def to_content(self) -> None:
        """Free text is content from here on."""
        if self.in_reasoning:
            self.in_reasoning = False
            self.reasoning_complete = True
            self._fresh = True

    @property
    def has_text(self) -> bool:
        """Whether there is content, or reasoning while free text is reasoning."""
        return bool(self._sink().parts)

    def follows_markup(self, position: int) -> bool:
        """Whether only whitespace is between the last block, or the beginning, and `position`."""
        if not self._fresh:
            return False
        # Pending text may be long, and every marker in it asks this.
        start = max(self.taken, self._blank)
        if start < position:
            self._blank = start = SPACE.match(self.text, start, position).end()  # type: ignore[union-attr]
        return start >= position

    def begins_answer(self, position: int) -> bool:
        """Whether `position` follows a block, or a closing marker of reasoning that is not read or was not opened."""
        if self.follows_markup(position):
            return True
        before = self.text[max(0, position - _LOOK_BACK) : position].rstrip()
        return self.reasoning_format is not None and before.endswith(self.reasoning_format.closes)

    def dangle(self, start: int) -> None:
        """An opener at `start` begins no block. It is text, unless a closing marker shows that a block was meant."""
        if self._dangling is None:
            self._dangling = start

    def close(self, start: int, end: int) -> None:
        """A closing marker without a block. After an opener it ends an attempt, after a call it is surplus."""
        if self._dangling is not None:
            self.end_call(
                self._dangling, end, CallStatus.MALFORMED, error="no call between the markers", ends_block=False
            )
        elif self.usable and self.follows_markup(start):
            self.skip(end)

    # -- calls --------------------------------------------------------------------------------------------------------

    def claim_id(self, native: str | None = None) -> str:
        """The native id if it is new in this completion, else a fresh one."""
        chosen = native if native and native not in self._ids else new_call_id()
        self._ids.add(chosen)
        return chosen

    def start_call(self, name: str, native_id: str | None = None) -> None:
        """A call's name is complete, and its arguments follow. Has an effect only while `streams`."""
        if self.events is not None and self._call is None:
            self._call = CallStart(len(self.attempts), self.claim_id(native_id), name)
            self._args_sent = 0
            self.events.append(self._call)

    @property
    def streams(self) -> bool:
        """Whether the run sends events of calls that are not complete."""
        return self.events is not None

    @property
    def started(self) -> bool:
        """Whether `start_call` announced the current call."""
        return self._call is not None

    def send_arguments(self, fragment: str) -> None:
        """More of the arguments' JSON text, after `start_call`."""
        if self._call is not None and fragment and self.events is not None:
            self._args_sent += len(fragment)
            self.events.append(ArgumentsDelta(self._call.index, fragment))

    def end_call(
        self,
        start: int,
        end: int,
        status: CallStatus,
        name: str = "",
        arguments: dict[str, Any] | None = None,
        arguments_raw: str = "",
        *,
        error: str | None = None,
        native_id: str | None = None,
        json_text: str | None = None,
        ends_block: bool = True,
    ) -> bool:
        """Record an attempt that spans `start:end`. `OK` becomes `UNKNOWN_TOOL` if the tool was not offered.

        `json_text` is all of the arguments' JSON text, of which `send_arguments` has sent the beginning
        (default: `arguments_raw` if that is the JSON text). Returns whether the call is usable. The block ends at
        `end`, and its text is dropped if the call is usable, else becomes text again: see `skip` and `fail`.
        """
        usable = status in CALLABLE and not (self.strict and status is CallStatus.REPAIRED)
        if usable and not self.tools.offered(name):
            error = f"no tool named {name!r} was offered" + (f"; {error}" if error else "")
            status = CallStatus.UNKNOWN_TOOL
        if status is CallStatus.INCOMPLETE:
            self.open_at_end = True
        self._dangling = None
        started, self._call = self._call, None
        call = ParsedToolCall(
            id=started.id if started else self.claim_id(native_id),
            name=name,
            arguments=arguments if arguments is not None else {},
            arguments_raw=arguments_raw,
            status=status,
            error=error,
            raw=self.text[start:end],
            span=CallSpan(self.offset + start, self.offset + end),
        )
        if usable:
            self.usable += 1
            self.to_content()
        if self.events is not None:
            index = len(self.attempts)
            if usable:
                if started is None:
                    self.events.append(CallStart(index, call.id, name))
                    self._args_sent = 0
                text = json_text
                if text is None and not self._args_sent:
                    text = call.arguments_json
                elif text is None:  # the stream has sent the model's text, repaired or not
                    text = arguments_raw if arguments_raw.startswith("{") else ""
                if rest := text[self._args_sent :]:
                    self.events.append(ArgumentsDelta(index, rest))
            self.events.append(CallEnd(index, call))
        self.attempts.append(call)
        if ends_block:
            (self.skip if usable else self.fail)(end)
        return usable

    def drafts(self, read: Callable[[Run], Step[None]], start: int, end: int) -> None:
        """Record attempts in `start:end`, inside a closed reasoning block, as drafts. `read` is that of the grammar."""
        draft = Run(tools=self.tools, markers=self.markers, offset=self.offset + start)
        draft.append(self.text[start:end])
        draft.final = True
        for _ in read(draft):
            raise AssertionError("a lexer waits for text after the end of the text")
        for attempt in draft.attempts:
            # A native id stays free for the real call.
            error = "drafted in reasoning, not made"
            call = replace(attempt, id=new_call_id(), status=CallStatus.IN_REASONING, error=error)
            if self.events is not None:
                self.events.append(CallEnd(len(self.attempts), call))
            self.attempts.append(call)

    # -- the end ------------------------------------------------------------------------------------------------------

    def drop_cut(self, closers: tuple[str, ...]) -> None:
        """Drop the beginning of a closing marker after a call, where the text is cut."""
        rest = self.text[self.taken :].lstrip()
        if self._fresh and self.usable and rest and not self.in_reasoning and any(c.startswith(rest) for c in closers):
            self.skip(len(self.text))

    def finish(self) -> None:
        """The text is over. The rest is text, unless it is blank and follows a block."""
        rest = self.text[self.taken :]
        self.taken = len(self.text)
        if not (self._fresh and rest.isspace()):
            self.put(rest)
        if not self.usable and all(attempt.status is CallStatus.IN_REASONING for attempt in self.attempts):
            self._foreign_call(self._content.text() or "")

    def _foreign_call(self, content: str) -> None:
        """Record a call in markup that the format does not read as an attempt from its beginning to the end."""
        if (found := find_foreign(content, self.tools.names())) is not None:
            raw = content[found.start :].strip()
            start = self.text.rfind(raw)
            if start < 0:  # markers were dropped inside it
                start, raw = 0, self.text
            end = start + len(raw)
            self.end_call(start, end, CallStatus.MALFORMED, found.name, error=FOREIGN, ends_block=False)

    def result(self) -> ParsedCompletion:
        """The result."""
        usable: tuple[ParsedToolCall, ...] = ()
        if self.usable:
            callable_ = CALLABLE - {CallStatus.REPAIRED} if self.strict else CALLABLE
            usable = tuple(call for call in self.attempts if call.status in callable_)
        return ParsedCompletion(
            content=self._content.text(),
            reasoning=self._reasoning.text(),
            reasoning_complete=self.reasoning_complete,
            tool_calls=usable,
            attempts=tuple(self.attempts),
            finish=Finish.INCOMPLETE
            if self.open_at_end or not self.reasoning_complete
            else Finish.TOOL_CALLS
            if usable
            else Finish.STOP,
        )
