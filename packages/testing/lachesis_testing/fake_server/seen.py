"""The server's record of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lachesis_testing.fake_server.completions import Call, Completion
from lachesis_tokens.model_routes.host import JSON

State: TypeAlias = Literal["open", "answered", "rejected", "cut", "cancelled"]


@dataclass(slots=True)
class Seen:
    """One request for completions, and its result."""

    number: int
    """Counted from 0."""
    route: str
    """Name of the API: "vllm-completions", "vllm-generate", "chat-completions", "sglang", "atropos"."""
    body: JSON
    """The JSON body of the request."""
    headers: Mapping[str, str]
    started: float
    """`time.monotonic()`."""
    call: Call | None = None
    """The parsed request; None if it was rejected earlier."""
    completions: list[Completion] = field(default_factory=list)
    """All sampled completions, `n` for each prompt in order; also if the answer was lost or changed."""
    faults: list[str] = field(default_factory=list)
    """Its wire faults."""
    status: int | None = None
    state: State = "open"
    """"answered": a whole 200 was sent; "cut": a fault lost the answer; "cancelled": the client disconnected."""
    seconds: float = 0.0
    rank: int = 0
    """The data-parallel rank that served it."""
    cached: list[int] = field(default_factory=list)
    """Tokens of each prompt that the rank had in its cache; empty without a prefix cache."""

    def record(self) -> JSON:
        """A JSON line: ids, logprobs and finish reasons of all sampled completions."""
        return {
            "number": self.number,
            "route": self.route,
            "state": self.state,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "faults": self.faults,
            "prompts": [list(prompt) for prompt in self.call.prompts] if self.call else [],
            "sampling": self.call.sampling.record("raw") if self.call else None,
            "completions": [made.record() for made in self.completions],
        }
