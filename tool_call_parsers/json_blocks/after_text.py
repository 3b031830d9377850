"""JSON calls after content between the markers: `<|python_start|>content<|python_end|>{...}{...}`, of Llama 4."""

from __future__ import annotations

from dataclasses import replace

from tool_call_parsers.engine import RenderTurn, Run, Step
from tool_call_parsers.json_blocks.blocks import Block, JsonBlocks


class JsonAfterText(JsonBlocks):
    """Calls as JSON objects after the closing marker, with the content of the turn between the two markers.

    Calls between the markers, and bare ones, are read too.
    """

    def block(self, run: Run, start: int, body: int, opener: str) -> Step[int | None]:
        position = yield from run.skip_space(body)
        closer = None
        if opener in self.opens and not run.text.startswith(("{", "["), position):
            closer = yield from run.find(self._close, body)
        if closer is None:
            return (yield from super().block(run, start, body, opener))
        position = yield from run.skip_space(closer.end())
        if not run.text.startswith("{", position):
            return None
        run.begin_block(start)
        run.skip(body)
        run.take(closer.start())
        run.skip(position)
        return (yield from self._calls(run, position, Block(position, "", in_list=False, fence=None, notes=())))

    def render(self, turn: RenderTurn) -> str:
        if not turn.calls:
            return super().render(turn)
        calls = self.render_calls(turn)
        before = super().render(replace(turn, content="")).removesuffix(calls)
        return f"{before}{self.opens[0]}{turn.content}{self.closes[0]}{calls}"
