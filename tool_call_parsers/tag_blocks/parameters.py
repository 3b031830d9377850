"""The parameters of a call as tags, where a message's header has named the tool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from tool_call_parsers.arguments import ArgumentsText
from tool_call_parsers.engine import RenderCall, Run, Step
from tool_call_parsers.tag_blocks.blocks import TagBlocks
from tool_call_parsers.tag_blocks.tags import TagRole
from tool_call_parsers.tag_blocks.values import OpenCall


@dataclass(frozen=True)
class Parameters(TagBlocks):
    """Calls without tags of their own. `ends` are the markers that end the message, and servers strip the last one."""

    header: str = ""
    """The marker that begins the header of a message."""

    missing_end = None

    @cached_property
    def _variants(self) -> frozenset[str]:
        return frozenset()  # any marker that ends a message ends the call

    def read_call(self, run: Run, start: int, body: int, name: str, error: str | None) -> Step[int]:
        """Read the parameters from `body` on, up to the end of the message. Return its end."""
        run.begin_block(start)
        call = OpenCall(name, start, body, wrapped=False)
        if error:
            call.notes.append(error)
        if run.streams and name:
            run.start_call(name)
            call.streamed = ArgumentsText(run)
        mark = yield from self._next(run, body)
        if mark.role is TagRole.DONE and name in run.tools.names() and not run.tools.required(name):
            # The server removed the marker that ended the turn.
            done = yield from self._closed(run, call, mark.start, mark.end)
        else:
            done = yield from self._parameters(run, call, mark)
        return done.end

    def _lost(self, run: Run, call: OpenCall) -> str | None:
        texts = (text for text in call.arguments.values() if isinstance(text, str))
        if any(self.header in text and self.parameters[0] in text for text in texts):
            return "a value holds another call"
        return super()._lost(run, call)

    def write(self, call: RenderCall) -> str:
        """The parameters of a call, in the order of their names, as the models write them."""
        return self._render_call(replace(call, name="", arguments=dict(sorted(call.arguments.items()))))
