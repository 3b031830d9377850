"""Headers of a recipient on a line of its own: `>>>all`, or `>>>NAME` before JSON arguments. Functionary v3.2."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tool_call_parsers.channels.messages import Channel, MessageHeader
from tool_call_parsers.channels.word_headers import WordHeaders
from tool_call_parsers.engine import RenderTurn, Run, Step

_NAME = re.compile(r"[^\W\d][\w.\-]{0,127}")


@dataclass(frozen=True, eq=False)
class Recipients(WordHeaders):
    """Headers `>>>RECIPIENT` and a line break. A recipient that is not a reader is the tool of a call.

    The first mark is in the generation prompt, so the first header of a completion has none.
    """

    def header(self, run: Run, start: int, body: int, opener: str) -> Step[MessageHeader | None]:
        while (yield from run.more(body + 1)) and run.text[body] == self.start[-1]:
            start, body = start + 1, body + 1  # content that ends in the mark's own character
        return (yield from super().header(run, start, body, opener))

    def bare_header(self, run: Run, position: int) -> Step[MessageHeader | None]:
        if run.text[:position].strip():
            return None
        while True:
            name = _NAME.match(run.text, position)
            end = name.end() if name is not None else position
            if end < len(run.text) or run.final:
                break
            yield
        if name is None or not run.text.startswith(self.message, end):
            return None
        header = self._words(run, position, end + len(self.message), [name.group()], bare=True, cut=False)
        if header is None or header.channel is not Channel.CALL:
            return header
        body = yield from run.skip_space(header.end)
        return header if run.text.startswith("{", body) or header.name in run.tools.names() else None

    def _words(
        self, run: Run, start: int, end: int, words: list[str], *, bare: bool, cut: bool
    ) -> MessageHeader | None:
        # Python's prompt is the same mark, with a blank after it.
        blank = not bare and run.text[start + len(self.start) : start + len(self.start) + 1].isspace()
        if len(words) != 1 or blank or not _NAME.fullmatch(words[0]):
            return None
        known = (*self.recipients, *run.tools.names())
        if cut and run.tools.names() and not any(name.startswith(words[0]) for name in known):
            return None
        kind = self.recipients.get(words[0], Channel.CALL)
        return MessageHeader(start, end, kind, words[0] if kind is Channel.CALL else "", cut=cut)

    def call(self, run: Run, header: MessageHeader) -> Step[int | None]:
        position = yield from run.skip_space(header.end)
        body = run.text[position : position + 1]
        if body and body != "{" and header.name not in run.tools.names():
            return None
        return (yield from self.json_call(run, header))

    def render(self, turn: RenderTurn) -> str:
        answer = next(iter(self.recipients))
        messages = [f"{answer}{self.message}{turn.content}"] if turn.content else []
        messages += [f"{call.name}{self.message}{call.json_text}" for call in turn.calls]
        return self.start.join(messages)
