"""Headers of words before calls as tags: Muse."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property

from tool_call_parsers.channels.messages import Channel, MessageHeader
from tool_call_parsers.channels.word_headers import WordHeaders
from tool_call_parsers.engine import Needles, RenderTurn, Run, Step
from tool_call_parsers.tag_blocks import Head as TagHead
from tool_call_parsers.tag_blocks import TagBlocks
from tool_call_parsers.types import CallStatus


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

    def bare_header(self, run: Run, position: int) -> Step[MessageHeader | None]:
        if (yield from run.starts(position, self._openers)) is not None:
            return MessageHeader(position, position, Channel.CALL)  # the prompt may contain all of the header
        return (yield from super().bare_header(run, position))

    def call(self, run: Run, header: MessageHeader) -> Step[int | None]:
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
        return end

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
