"""The arguments of a call in elements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tool_call_parsers.arguments import ArgumentsText
from tool_call_parsers.engine import Run
from tool_call_parsers.literals.strict import REPEATED_KEY
from tool_call_parsers.types import CALLABLE, CallStatus


@dataclass(slots=True)
class ElementArguments:
    """The arguments of a call while they are read."""

    run: Run
    name: str
    streamed: ArgumentsText
    values: dict[str, Any] = field(default_factory=dict)
    status: CallStatus = CallStatus.OK
    error: str | None = None
    whole: str | None = None
    """The JSON text of all arguments, if they are one object."""

    def fail(self, status: CallStatus, error: str) -> None:
        """Record a defect. Repairs add up; the first of the others counts, except that a cut overrides all."""
        if status is CallStatus.REPAIRED and self.status is CallStatus.REPAIRED:
            self.error = f"{self.error}; {error}" if error not in (self.error or "") else self.error
        elif self.status in CALLABLE or status is CallStatus.INCOMPLETE:
            self.status, self.error = status, error

    def end(self, key: str, value: object, rest: str) -> None:
        """End the value. `rest` is the part of its JSON text that was not sent."""
        if key in self.values:
            self.fail(CallStatus.REPAIRED, REPEATED_KEY)
        if key:
            self.values[key] = value
        self.streamed.add(rest)

    def json_text(self) -> str | None:
        """All of the JSON text that was sent; None if it was not sent in pieces."""
        return self.streamed.whole() if self.whole is None and self.status in CALLABLE else None
