"""Markers that name the kind of content: Inkling, Solar."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from tool_call_parsers.channels.messages import Channel, ChannelGrammar, MessageHeader
from tool_call_parsers.engine import BlockGrammar, Needles, RenderTurn, Run, Step

_NAME = re.compile(r"[\w.\-]{0,128}")


@dataclass(frozen=True, eq=False)
class TypedMessages(ChannelGrammar):
    """Headers of a marker for the role and one for the kind of content: `<|message_model|>NAME<|content_KIND|>`.

    Only calls have a name. The marker for the role is in the generation prompt, so the first message of a
    completion has none.
    """

    role: str
    end: str
    kinds: dict[str, Channel]
    """Channels by the marker for the kind."""
    calls: BlockGrammar
    """The grammar of a call. Its opener is the marker for the kind."""

    one_end = True
    openers = cached_property(lambda self: (self.role, *self.kinds))
    closers = cached_property(lambda self: (self.end,))
    _kind = cached_property(lambda self: Needles(*self.kinds))

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[MessageHeader | None]:
        if opener in self.kinds:
            return MessageHeader(start, body, self.kinds[opener])
        header = yield from self._named(run, start, body)
        if header is not None:
            return header
        position = _NAME.match(run.text, body).end()  # type: ignore[union-attr]  # matches the empty text
        rest = run.text[position : position + self._kind.longest]
        if run.final and (not rest or (self._kind.begins(run.text, position) and rest not in self.kinds)):
            return MessageHeader(start, position, Channel.CALL if position > body else Channel.NONE, cut=True)
        return None

    def bare_header(self, run: Run, position: int) -> Step[MessageHeader | None]:
        header = yield from self._named(run, position, position)
        # A kind without a name has its marker, and a word before another kind is text.
        return header if header is not None and header.channel is Channel.CALL else None

    def _named(self, run: Run, start: int, position: int) -> Step[MessageHeader | None]:
        """A header whose name begins at `position`."""
        while True:
            end = _NAME.match(run.text, position).end()  # type: ignore[union-attr]  # matches the empty text
            if end < len(run.text) or run.final:
                break
            yield
        kind = yield from run.starts(end, self._kind)
        if kind is None or (end > position and self.kinds[kind] is not Channel.CALL):
            return None
        return MessageHeader(start, end + len(kind), self.kinds[kind], run.text[position:end])

    def call(self, run: Run, header: MessageHeader) -> Step[int | None]:
        return (yield from self.calls.block(run, header.start, header.end, self.calls.openers[0]))

    def render(self, turn: RenderTurn) -> str:
        kinds = {channel: marker for marker, channel in reversed(self.kinds.items())}
        messages = []
        if turn.reasoning is not None:
            messages.append(f"{kinds[Channel.REASONING]}{turn.reasoning}{self.end}")
        if turn.content:
            messages.append(f"{kinds[Channel.PREAMBLE]}{turn.content}{self.end}")
        messages += (call.name + self.calls.render_calls(replace(turn, calls=(call,))) for call in turn.calls)
        return self.role.join(messages)


class ListedCalls(TypedMessages):
    """All calls of a turn in one message, each with its name inside: Solar."""

    def render(self, turn: RenderTurn) -> str:
        before = super().render(replace(turn, calls=()))
        if not turn.calls:
            return before.removesuffix(self.end) if turn.content else before
        calls = self.calls.render_calls(turn)
        return f"{before}{self.role}{calls}" if before else calls
