"""What the loop needs of the compression of its conversation, which lachesis_data has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse


@dataclass(frozen=True, slots=True)
class ContextEdit:
    """One compression, or an attempt that left the conversation as it was."""

    turn: int
    """Turns before it."""
    by: str
    tokens_before: int
    """Of the next prompt, as far as the server has counted them; the newest messages are estimated."""
    tokens_after: int
    """The same; the summary is estimated."""
    messages: int
    """Messages that the summary replaced."""
    seconds: float
    error: str | None = None
    """Why the conversation was not compressed."""
    at: int | None = None
    """The place of the first of them."""

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3)}


class CountedMessages(Protocol):
    """The tokens of the messages. It is told of each change."""

    def add(self, entry: ChatResponse | ToolResponse | Message) -> None: ...
    def cut(self, length: int) -> None: ...
    def replace(self, start: int, stop: int, *messages: Message) -> None: ...


class RolloutCompression(Protocol):
    """The compression of one rollout."""

    @property
    def size(self) -> CountedMessages: ...

    @property
    def edits(self) -> Sequence[ContextEdit]: ...

    @property
    def broken(self) -> Exception | None:
        """Why the last attempt failed, if that was not the agent's own doing."""

    @property
    def due(self) -> bool: ...

    async def run(self) -> None:
        """Compress the conversation, or record why it stays as it is."""

    def copied(self, rollout: Any) -> RolloutCompression:
        """The compression of another rollout, which goes on from here."""


class Compression(Protocol):
    """When the contexts of a run are compressed, and how."""

    def of_rollout(self, rollout: Any, *, max_resamples: int) -> RolloutCompression: ...
