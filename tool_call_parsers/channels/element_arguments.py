"""The arguments of a call whose elements arrive one by one."""

from __future__ import annotations

from typing import Any

from tool_call_parsers.arguments import ArgumentsText
from tool_call_parsers.engine import Run
from tool_call_parsers.types import CALLABLE, CallStatus


class ElementArguments:
    """The arguments of a call while they are read, and their JSON text as a stream sends it."""

    __slots__ = ("_streamed", "error", "name", "run", "status", "values", "whole")

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.values: dict[str, Any] = {}
        self.status = CallStatus.OK
        self.error: str | None = None
        self.whole: str | None = None
        """The JSON text of all arguments, if they are one object."""
        self._streamed = ArgumentsText(run) if run.started else None

    def fail(self, status: CallStatus, error: str) -> None:
        """Record a defect. The first counts, except that a later one overrides a repair, and a cut overrides all."""
        if self.status in CALLABLE or status is CallStatus.INCOMPLETE:
            self.status, self.error = status, error

    def begin(self, key: str, is_string: bool) -> None:
        """Begin the value of an argument."""
        if self._streamed is not None:
            self._streamed.member(key, '"' if is_string else "")

    def piece(self, text: str, start: int, end: int) -> None:
        """Add characters of a string."""
        if end > start and self._streamed is not None:
            self._streamed.characters(text[start:end])

    def end(self, key: str, value: object, rest: str) -> None:
        """End the value. `rest` is the part of its JSON text that was not sent."""
        if key:
            self.values[key] = value
        if self._streamed is not None:
            self._streamed.add(rest)

    def json_text(self) -> str | None:
        """All of the JSON text that was sent; None if it was not sent in pieces."""
        if self._streamed is None or self.whole is not None or self.status not in CALLABLE:
            return None
        return self._streamed.whole()
