"""What a reward did in the sandbox, written down apart from what the agent did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_LONGEST = 500


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One use of a `ToolContext`."""

    method: str
    arguments: tuple[str, ...]
    """In short: a long value is cut, bytes are only counted."""
    seconds: float
    error: str = ""
    """Of an exception that it raised."""

    def to_record(self) -> dict[str, Any]:
        record = {"method": self.method, "arguments": list(self.arguments), "seconds": self.seconds}
        return {**record, "error": self.error} if self.error else record


def brief(value: Any) -> str:
    """An argument in at most a few hundred characters."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
