"""The tokens of a rollout's conversation, as its server counts them. Nothing is tokenised here."""

from __future__ import annotations

from typing import Final

from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, ToolResponse, as_message

_TOKENS_PER_CHARACTER: Final = 0.25
"""Until a server has counted text of this conversation, and where it counts nothing."""
_LEAST, _MOST = 0.1, 1.5
"""Bounds of what is learned: the count after a turn whose reasoning the template drops is too small."""
_IMAGE: Final = 1000
"""Characters that an image counts for."""


class ContextSize:
    """Tokens of each message, and of all of them.

    A completion counts its prompt and itself, which gives the tokens of the messages since the one before, with what
    the template writes around them. Several such messages share them by their length. Those that no completion has
    counted yet are estimated from their length and from what the earlier ones took.
    """

    def __init__(self) -> None:
        self.sizes: list[float] = []
        """By message. The first ones have the tools and ephemeral messages too."""
        self._counted = 0
        """Messages that a completion has counted."""
        self._characters: int | None = None
        """Of the messages since then; None where these are not all that the next count adds."""
        self._learned = [0, 0.0]
        """Characters that were counted after the first completion, and their tokens."""

    @property
    def total(self) -> int:
        """The tokens of the next prompt."""
        return round(sum(self.sizes))

    def of(self, message: Message) -> float:
        """An estimate."""
        characters, tokens = self._learned
        rate = min(_MOST, max(_LEAST, tokens / characters)) if characters else _TOKENS_PER_CHARACTER
        return _length(message) * rate

    def add(self, entry: ChatResponse | ToolResponse | Message) -> None:
        """The last message of the conversation."""
        message = as_message(entry)
        if not isinstance(entry, ChatResponse):
            self._characters = None if self._characters is None else self._characters + _length(message)
            self.sizes.append(self.of(message))
            return
        prompt, own = entry.usage.prompt_tokens, entry.usage.completion_tokens
        if prompt:  # 0 of a server that does not count
            self._count(prompt)
        self.sizes.append(own or self.of(message))
        self._counted += bool(prompt)

    def _count(self, prompt: int) -> None:
        at, known = self._counted, sum(self.sizes[: self._counted])
        if self._characters:
            self._learned[0] += self._characters
            self._learned[1] += max(0.0, prompt - known)
        if at == len(self.sizes) or prompt <= known:  # the template has dropped something
            at, known = 0, 0.0
        share = (prompt - known) / sum(self.sizes[at:])
        self.sizes[at:] = [size * share for size in self.sizes[at:]]
        self._counted, self._characters = len(self.sizes), 0

    def cut(self, length: int) -> None:
        """The messages from `length` on were taken back."""
        del self.sizes[length:]
        self._characters = 0 if length < self._counted else None
        self._counted = min(length, self._counted)

    def replace(self, start: int, stop: int, *messages: Message) -> None:
        """`messages` replaced those from `start` to before `stop`."""
        self.sizes[start:stop] = map(self.of, messages)
        self._counted, self._characters = min(start, self._counted), None


def _length(message: Message) -> int:
    """In characters, and not 0: the template writes something around each message."""
    images = [] if isinstance(message.content, str) else [part for part in message.content or () if "text" not in part]
    calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    return max(1, len(message.text) + len(message.reasoning or "") + calls + _IMAGE * len(images))
