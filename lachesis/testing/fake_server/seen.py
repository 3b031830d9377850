"""What the server remembers of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lachesis.testing.fake_server.completions import Call, Completion
from lachesis.testing.fake_server.shapes import JSON

State: TypeAlias = Literal["open", "answered", "refused", "cut", "cancelled"]


@dataclass(slots=True)
class Seen:
    """One request to a route of completions, and what became of it."""

    number: int
    """Counted from 0."""
    route: str
    """Name of the API: "vllm-completions", "vllm-generate", "chat-completions", "sglang", "atropos"."""
    body: JSON
    """As it came."""
    headers: Mapping[str, str]
    started: float
    """`time.monotonic()`."""
    call: Call | None = None
    """As it was understood; None for what was refused before that."""
    completions: list[Completion] = field(default_factory=list)
    """What was sampled, prompt by prompt, each prompt's `n` together; also where the answer was lost or spoiled."""
    mischief: list[str] = field(default_factory=list)
    """What happened to it on the wire."""
    status: int | None = None
    state: State = "open"
    """"answered": a 200 with completions went out whole; "cut": mischief lost it; "cancelled": the client left."""
    seconds: float = 0.0

    def record(self) -> JSON:
        """A JSON line: ids, logprobs and finish reasons of everything that was sampled."""
        return {
            "number": self.number,
            "route": self.route,
            "state": self.state,
            "status": self.status,
            "seconds": round(self.seconds, 6),
            "mischief": self.mischief,
            "prompts": [list(prompt) for prompt in self.call.prompts] if self.call else [],
            "sampling": self.call.sampling.record("raw") if self.call else None,
            "completions": [
                {
                    "prompt": made.prompt,
                    "index": made.index,
                    "ids": made.ids,
                    "logprobs": made.logprobs,
                    "text": made.text,
                    "finish_reason": made.finish_reason,
                    "stop_reason": made.stop_reason,
                    "mischief": made.mischief,
                }
                for made in self.completions
            ],
        }
