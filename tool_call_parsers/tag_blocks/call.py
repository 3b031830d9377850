"""A call while it is read, and the stream of its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tool_call_parsers.arguments import ArgumentsText
from tool_call_parsers.engine import Run


@dataclass(slots=True)
class OpenCall:
    """A call while it is read."""

    name: str
    start: int
    body: int
    wrapped: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    streamed: ArgumentsText | None = None
    """The arguments' JSON text as far as it was sent; None if the run does not stream."""

    def set(self, key: str, value: Any) -> None:
        """Set an argument. Of repeated parameters the last counts, in the last place."""
        self.arguments.pop(key, None)
        self.arguments[key] = value


@dataclass(slots=True)
class StringStream:
    """Sends a string value piece by piece."""

    run: Run
    streamed: ArgumentsText
    position: int

    def upto(self, end: int) -> None:
        """Send the text before `end`, except for a newline at its end, which may be framing."""
        text = self.run.text
        if end > self.position and text[end - 1] == "\n":
            end -= 1
        self.rest(end)

    def rest(self, end: int) -> None:
        if end > self.position:
            self.streamed.characters(self.run.text[self.position : end])
            self.position = end
