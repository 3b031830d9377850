"""The arguments of a call whose elements come one by one."""

from __future__ import annotations

from typing import Any

from tool_call_parsers.arguments import ArgumentsText
from tool_call_parsers.engine import Run
from tool_call_parsers.types import CALLABLE, CallStatus


class ElementArguments:
    """The arguments of a call as they are read, and their JSON text as it is told."""

    __slots__ = ("_streamed", "error", "name", "run", "status", "values", "whole")

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.values: dict[str, Any] = {}
        self.status = CallStatus.OK
        self.error: str | None = None
        self.whole: str | None = None
        """The JSON text of all arguments, where they are one object."""
        self._streamed = ArgumentsText(run) if run.started else None

    def fail(self, status: CallStatus, error: str) -> None:
        """Something is wrong. What is wrong first counts, but for repairs, and for the end of the text."""
        if self.status in CALLABLE or status is CallStatus.INCOMPLETE:
            self.status, self.error = status, error

    def begin(self, key: str, is_string: bool) -> None:
        """An argument's value begins."""
        if self._streamed is not None:
            self._streamed.member(key, '"' if is_string else "")

    def piece(self, text: str, start: int, end: int) -> None:
        """More of a string."""
        if end > start and self._streamed is not None:
            self._streamed.characters(text[start:end])

    def end(self, key: str, value: object, rest: str) -> None:
        """The value is whole; `rest` is what its JSON text lacks."""
        if key:
            self.values[key] = value
        if self._streamed is not None:
            self._streamed.add(rest)

    def json_text(self) -> str | None:
        """All of the JSON text that was told; None where it was not told in pieces."""
        if self._streamed is None or self.whole is not None or self.status not in CALLABLE:
            return None
        return self._streamed.whole()
