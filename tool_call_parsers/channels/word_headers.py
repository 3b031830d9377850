"""Headers of words, which name a recipient and a channel, before JSON (Harmony, of gpt-oss) or tags (Muse)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from tool_call_parsers.arguments import ArgumentsWatch, FoundArguments, no_arguments, read_arguments, read_literal
from tool_call_parsers.channels.messages import HEADER_WIDTH, Channel, ChannelGrammar, MessageHeader
from tool_call_parsers.engine import SPACE, Needles, RenderTurn, Run, Step
from tool_call_parsers.json_blocks.attempts import skip_repeated
from tool_call_parsers.json_scan import read_value
from tool_call_parsers.literals.literal import LiteralError
from tool_call_parsers.literals.strict import read_json
from tool_call_parsers.tag_blocks import Head as TagHead
from tool_call_parsers.tag_blocks import TagBlocks
from tool_call_parsers.types import CALLABLE, CallStatus

SECTION_LIMIT = 6
"""The maximum number of markers in a header."""
JUNK_LIMIT = 2
"""How many unknown words a header may have."""
_RECIPIENT = re.compile(r"to=([^\s<|>]*)")


@dataclass(frozen=True, eq=False)
class WordHeaders(ChannelGrammar):
    """Headers of words: `<|start|>assistant to=RECIPIENT<|channel|>CHANNEL TYPE<|message|>`, in any order.

    A recipient that is not a reader is the tool of a call. The header's first words, up to the role, are in the
    generation prompt, so the first message of a completion has none.
    """

    start: str
    """The marker before the header."""
    message: str
    """The marker after the header."""
    ends: tuple[str, ...]
    """The markers after a message."""
    call_ends: tuple[str, ...]
    """Those of them that only follow calls and answers. Other messages do not end with one."""
    inner: tuple[str, ...]
    """Markers within a header; the first can begin one."""
    channels: dict[str, Channel]
    """Channels by their names in a header."""
    recipients: dict[str, Channel]
    """Recipients that are readers and not tools."""
    types: frozenset[str]
    """Words for the type of the body."""
    role: str = "assistant"
    """The role in the header."""
    namespace: str = ""
    """The prefix of a tool's name in a header."""

    openers = cached_property(lambda self: (self.start, *self.inner[:1]))
    closers = cached_property(lambda self: self.ends)

    def own_closers(self, channel: Channel) -> tuple[str, ...]:
        return tuple(end for end in self.ends if end not in self.call_ends)

    _stops = cached_property(lambda self: Needles(self.start, self.message, *self.inner, *self.ends, "\n"))
    _bare = cached_property(
        lambda self: Needles(self.role, *self.channels, "to=", self.message, *self.inner[1:], self.namespace)
    )
    _end = cached_property(lambda self: Needles(*self.ends))
    _body_ends = cached_property(lambda self: Needles(*self.ends, *self.openers))
    """Markers that end a call's body if it is not JSON."""

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[MessageHeader | None]:
        return (yield from self._header(run, start, body, bare=False))

    def bare_header(self, run: Run, position: int) -> Step[MessageHeader | None]:
        if (yield from run.starts(position, self._bare)) is None:
            return None
        header = yield from self._header(run, position, position, bare=True)
        return None if header is not None and header.cut and header.channel is not Channel.CALL else header

    def _header(self, run: Run, start: int, position: int, *, bare: bool) -> Step[MessageHeader | None]:
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

    def _words(
        self, run: Run, start: int, end: int, words: list[str], *, bare: bool, cut: bool
    ) -> MessageHeader | None:
        """The header that the words make; None if they are not a header."""
        channel, recipient, typed, junk = None, None, False, []
        errors: list[str] = []
        for index, word in enumerate(words):
            if recipient is None and (match := _RECIPIENT.fullmatch(word)) is not None:
                recipient = match[1]
            elif word in self.channels and channel in (None, word):
                channel = word
            elif word in self.types:
                typed = True
            elif recipient is None and self.namespace and self._names_tool(run, word):
                recipient = word
                errors.append(f"{word!r} is not a channel but the recipient")
            elif not ((index == 0 and word == self.role) or (cut and index == len(words) - 1 and self._begins(word))):
                junk.append(word)
        kind = self.channels.get(channel or "", Channel.ANSWER)
        if recipient is not None:
            kind = self.recipients.get(recipient, Channel.CALL)
        elif typed and kind is Channel.PREAMBLE:
            kind = Channel.CALL  # arguments without a recipient
        # Prose may also begin with such a word or contain a marker. Only the header of a call can report an error.
        if len(junk) > (JUNK_LIMIT if kind is Channel.CALL and recipient is not None and not (bare or cut) else 0):
            return None
        errors += [f"unexpected words in the header: {' '.join(junk)}"] if junk else []
        if not run.text.startswith(self.start, start) and SPACE.match(run.text).end() < start:  # type: ignore[union-attr]
            errors.append(f"{self.start} is missing")
        name = (recipient or "").removeprefix(self.namespace) if kind is Channel.CALL else ""
        if name and not run.tools.offered(name):
            glued = (name.removesuffix(word) for word in self.channels)
            if (plain := next((own for own in glued if own in run.tools.names()), None)) is not None:
                errors.append(f"the recipient is written {recipient!r}")
                name = plain
        return MessageHeader(start, end, kind, name, "; ".join(errors) or None, cut)

    def _names_tool(self, run: Run, word: str) -> bool:
        name = word.removeprefix(self.namespace)
        return name in run.tools.names() or (name != word and bool(name))

    def _begins(self, word: str) -> bool:
        """Whether a word of a header may begin like this."""
        return any(known.startswith(word) for known in (self.role, *self.channels, *self.types, "to="))

    def json_call(self, run: Run, header: MessageHeader) -> Step[int]:
        """Read the message of a call with JSON arguments. Return its end."""
        run.begin_block(header.start)
        run.to_content()
        position = yield from run.skip_space(header.end)
        if header.name:
            run.start_call(header.name)
        notes = [header.error] if header.error else []
        end = len(run.text)
        if position == end:
            found = FoundArguments(CallStatus.INCOMPLETE, {}, "", "the text ends before the arguments")
        elif run.text[position] in "{[":
            value = yield from read_value(run, position, self._body_ends, ArgumentsWatch(run, position))
            raw, end = run.text[position : value.end], value.end
            found = FoundArguments(value.status, {}, raw, value.error)
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
            end, after = yield from self._after(run, end)
            if status in CALLABLE:
                notes += after
                status = CallStatus.REPAIRED if notes else status
                if not header.name:
                    status, notes = CallStatus.MISSING_NAME, ["the header names no recipient"]
        error = "; ".join(notes) or None
        run.end_call(header.start, end, status, header.name, found.value, found.raw, error=error)
        return end

    def _other(self, raw: str, cut: bool) -> FoundArguments:
        """Arguments that are neither an object nor a list."""
        if not raw:
            return no_arguments("nothing")
        try:
            literal = read_json(raw)
            if literal.end == len(raw):
                return read_literal(literal, raw)
        except LiteralError as error:
            if cut and error.incomplete:
                return FoundArguments(CallStatus.INCOMPLETE, {}, raw, "the text ends inside the arguments")
        return FoundArguments(CallStatus.INVALID_JSON, {}, raw, "the arguments are not JSON")

    def _after(self, run: Run, end: int) -> Step[tuple[int, list[str]]]:
        """The end of the message whose arguments end at `end`, and what is wrong with it. The marker that ends a call
        ends the turn, so it may be missing at the end of the text."""
        notes: list[str] = []
        while True:
            position = yield from run.skip_space(end)
            closer = yield from run.starts(position, self._end)
            if closer is not None:
                end, again = yield from skip_repeated(run, position + len(closer), self._end)
                notes += [f"{closer} ends the call"] if closer not in self.call_ends[:1] else []
                return end, [*notes, "the end marker twice"] if again else notes
            if not run.text.startswith(("}", "]"), position):
                break
            notes, end = [f"one {run.text[position]!r} too many"], position + 1
        if position == len(run.text):
            return end, notes
        opener = yield from run.starts(position, self._body_ends)
        if opener is None and self._end.begins(run.text, position):
            return len(run.text), notes
        if opener is not None and not self.call_ends:
            return end, notes  # the next header ends the call
        return end, [*notes, "text after the arguments" if opener is None else "no end marker"]


class Harmony(WordHeaders):
    """Headers of words, with arguments as a JSON object: gpt-oss."""

    _written = cached_property(
        lambda self: re.compile(
            rf"(?:{re.escape(self.start)}{self.role})?\s*"
            rf"(?:to={re.escape(self.namespace)}[\w.\-]+\s*{re.escape(self.inner[0])}\s*commentary"
            rf"|{re.escape(self.inner[0])}\s*commentary\s+to={re.escape(self.namespace)}[\w.\-]+)"
            rf"\s*(?:{re.escape(self.inner[1])}\s*)?json\s*{re.escape(self.message)}"
        )
    )
    """The header of a call as the models write it."""

    def call(self, run: Run, header: MessageHeader) -> Step[int | None]:
        if self._written.fullmatch(run.text, header.start, header.end) is None:
            errors = (header.error, "a header that the model does not write")
            header = replace(header, error="; ".join(filter(None, errors)))
        return (yield from self.json_call(run, header))

    def render(self, turn: RenderTurn) -> str:
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
    """Calls as tags, of a model that doubles a name without a namespace: `f.f` for `f`."""

    @cached_property
    def _call_head(self) -> re.Pattern[str]:
        return re.compile(f"(?:){super()._call_head.pattern}")  # another object than a parameter's pattern

    def _head(self, run: Run, start: int, pattern: re.Pattern[str]) -> Step[TagHead | None]:
        head = yield from super()._head(run, start, pattern)
        if head is None or pattern is not self._call_head or run.tools.offered(head.name):
            return head
        namespace, _, name = head.name.partition(".")
        return head._replace(name=name) if namespace == name and run.tools.offered(name) else head


@dataclass(frozen=True, eq=False)
class TaggedMessages(WordHeaders):
    """Headers of words, with arguments as tags: Muse."""

    tags: TagBlocks = field(kw_only=True)

    block_closers = cached_property(lambda self: self.tags.closers)
    _openers = cached_property(lambda self: Needles(*self.tags.openers))
    _usual_call = cached_property(lambda self: "\n" + self.tags.call.partition("{name}")[0] + '{name}"')
    """The text between the opener and the name of the first call."""

    def bare_header(self, run: Run, position: int) -> Step[MessageHeader | None]:
        if (yield from run.starts(position, self._openers)) is not None:
            return MessageHeader(position, position, Channel.CALL)  # the prompt may contain all of the header
        return (yield from super().bare_header(run, position))

    def call(self, run: Run, header: MessageHeader) -> Step[int | None]:
        position = yield from run.skip_space(header.end)
        opener = yield from run.starts(position, self._openers)
        other = None
        if opener is not None and header.name in run.tools.names():
            other = yield from self._other_tool(run, header.name, position + len(opener))
        if opener is not None and other is None:
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
        if other is not None:
            error = f"the header names {header.name!r}, the tag {other!r}"
        run.end_call(header.start, end, status, header.name, error=error)
        return end

    def _other_tool(self, run: Run, name: str, position: int) -> Step[str | None]:
        """The offered tool that the first tag of a call names, if it is not the one that the header names."""
        if run.text.startswith(self._usual_call.format(name=name), position):
            return None
        named = yield from self.tags.first_name(run, position)
        return named if named != name and named in run.tools.names() else None

    def render(self, turn: RenderTurn) -> str:
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
