"""Headers of words before the parameters of a call as tags: `<rfl:parameter name="k">`. Beam."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tool_call_parsers.channels.messages import MessageHeader
from tool_call_parsers.channels.word_headers import WordHeaders
from tool_call_parsers.engine import RenderTurn, Run, Step
from tool_call_parsers.tag_blocks import Parameters


@dataclass(frozen=True, eq=False)
class ParameterMessages(WordHeaders):
    """Headers of words, of which the recipient is the tool, and parameters as tags in the message."""

    parameters: Parameters = field(kw_only=True)

    def call(self, run: Run, header: MessageHeader) -> Step[int | None]:
        position = yield from run.skip_space(header.end)
        if run.text.startswith("{", position):
            notes = filter(None, (header.error, "a JSON object instead of tags"))
            return (yield from self.json_call(run, replace(header, error="; ".join(notes))))
        run.begin_block(header.start)
        run.to_content()
        return (yield from self.parameters.read_call(run, header.start, header.end, header.name, header.error))

    def render(self, turn: RenderTurn) -> str:
        messages = []
        if turn.reasoning is not None:
            messages.append(f"{self.inner[0]}analysis{self.message}{turn.reasoning}{self.ends[0]}")
        if turn.content:
            # A final message ends the turn.
            channel, end = ("commentary", self.ends[0]) if turn.calls else ("final", "")
            messages.append(f"{self.inner[0]}{channel}{self.message}{turn.content}{end}")
        for call in turn.calls:
            head = f" to={call.name}{self.inner[0]}analysis {self.inner[1]}xml{self.message}"
            messages.append(f"{head}{self.parameters.write(call)}{self.ends[0]}")
        if turn.calls:
            messages[-1] = messages[-1].removesuffix(self.ends[0])
        return f"{self.start}{self.role}".join(messages)
